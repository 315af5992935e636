"""Tree forwards through SGLang's own model runner, for models that the lean forward does not cover.

Target and draft trees alike run as ``TARGET_VERIFY``: that mode gives logits for every row and takes
positions and attention layout from the spec input. The layout is FlashInfer's, and our attention backend
(``attention_backend.py``) reads the same arrays.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType

from adaserve.engine.cpu.gumbel import read
from adaserve.engine.cpu.params import Inputs
from adaserve.engine.logit_reading import Reading
from adaserve.engine.trees.attention import TreeAttentionPlan


class TreeVerifyInput(SpecInput):
    """Positions and flat attention inputs of one tree forward."""

    def __init__(self, positions: torch.Tensor, plan: TreeAttentionPlan) -> None:
        # The type enum is closed; this member asks nothing of a backend beyond what we implement.
        super().__init__(SpecInputType.NGRAM_VERIFY)
        self.positions = positions
        self.plan = plan
        self.custom_mask = flat_mask(plan)
        # Rows differ in width; SGLang takes a positive value that fits no captured graph as "run eagerly".
        self.draft_token_num = self.num_tokens_per_req = self.num_tokens_for_logprob_per_req = 1 << 20

    def generate_attn_arg_prefill(
        self,
        *,
        req_pool_indices: torch.Tensor,
        paged_kernel_lens: torch.Tensor,
        paged_kernel_lens_sum: int,
        translator: Any,
        plan: Any,
        kind: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(kv_indices, kv_indptr, qo_indptr, mask), as FlashInfer's prefill wrapper plans with them."""
        p = self.plan
        return p.kv_indices, p.kv_indptr, p.qo_indptr, self.custom_mask


def flat_mask(plan: TreeAttentionPlan) -> torch.Tensor:
    """The plan's mask, written out where the plan leaves causality implicit."""
    if plan.custom_mask is not None:
        return plan.custom_mask
    parts = [m.flatten() for m in plan.masks]
    return torch.cat(parts) if parts else torch.ones(0, dtype=torch.bool)


class SGLangForward:
    """A ``CpuModel`` over a ``ModelRunner``. "Hidden states" are the logits themselves."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def hidden(self, inputs: Inputs) -> torch.Tensor:
        assert inputs.before is None, "heads have a forward of their own"
        output = self._runner.forward(self._forward_batch(inputs))
        return output.logits_output.next_token_logits

    def _forward_batch(self, inputs: Inputs) -> ForwardBatch:
        plan = inputs.plan
        prefix_lens = (plan.kv_indptr.diff() - plan.qo_indptr.diff()).long()
        batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=plan.num_requests,
            input_ids=inputs.tokens,
            req_pool_indices=torch.zeros(plan.num_requests, dtype=torch.int64),
            seq_lens=prefix_lens,
            seq_lens_cpu=prefix_lens,
            seq_lens_sum=int(prefix_lens.sum()),
            out_cache_loc=inputs.slots,
            positions=inputs.positions,
            spec_info=TreeVerifyInput(inputs.positions, plan),
            spec_algorithm=self._runner.spec_algorithm,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
        )
        translator = self._runner.kv_index_translator
        translator.own_plan(batch).bind(batch, translator, cols=None)
        return batch

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.float().contiguous()  # SGLang cuts off the padding of the vocabulary

    def argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.argmax(dim=-1)

    def topk_logprobs(
        self, hidden: torch.Tensor, reading: Reading, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return read(hidden, reading).log_softmax(dim=-1).topk(width, dim=-1)
