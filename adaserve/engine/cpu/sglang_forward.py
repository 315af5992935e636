"""Tree forwards through SGLang's own models, for those that our own forward does not cover.

Target and draft trees alike run as ``TARGET_VERIFY``, the mode that gives logits for every row. The layout of
their attention goes straight to our backend, as on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_model

from adaserve.engine.cpu.attention_backend import CpuAttentionBackend
from adaserve.engine.cpu.noise import best_of
from adaserve.engine.cpu.params import Inputs
from adaserve.engine.cpu.torch_forward import all_tokens
from adaserve.engine.logits.logit_transform import LogitTransform
from adaserve.engine.trees.attention import TreeAttentionPlan


class SGLangForward:
    """A ``CpuModel`` over a ``ModelRunner``. "Hidden states" are the logits themselves."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._backend = runner, CpuAttentionBackend(runner)

    def hidden(self, inputs: Inputs) -> torch.Tensor:
        assert inputs.before is None, "heads have a forward of their own"
        logits = self._run(self._forward_batch(inputs), inputs.plan).next_token_logits
        if (known := getattr(self._runner.model, "hot_token_id", None)) is None:
            return logits
        return all_tokens(logits, known, self._runner.model_config.vocab_size)

    def _forward_batch(self, inputs: Inputs) -> ForwardBatch:
        plan = inputs.plan
        prefix_lens = (plan.kv_indptr.diff() - plan.qo_indptr.diff()).long()
        return ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=plan.num_requests,
            input_ids=inputs.tokens,
            req_pool_indices=torch.zeros(plan.num_requests, dtype=torch.int64),
            seq_lens=prefix_lens,
            seq_lens_cpu=prefix_lens,
            seq_lens_sum=int(prefix_lens.sum()),
            out_cache_loc=inputs.slots,
            positions=inputs.positions.clone(),  # to which Gemma 3 adds 1, in place
            mrope_positions=inputs.positions.repeat(3, 1),  # read in place of these where there is M-RoPE
            spec_algorithm=self._runner.spec_algorithm,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
        )

    def _run(self, batch: ForwardBatch, plan: TreeAttentionPlan) -> Any:
        """SGLang's model, without the bookkeeping of its runner."""
        model, self._backend.plan = self._runner.model, plan
        with (
            torch.no_grad(),
            get_model().override(shared_experts=model.shared_experts_config),
            forward_context(ForwardContext(attn_backend=self._backend), forward_batch=batch),
        ):
            return model.forward(batch.input_ids, batch.positions, batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.float().contiguous()  # SGLang cuts off the padding of the vocabulary

    def argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.argmax(dim=-1)

    def topk_logprobs(
        self, hidden: torch.Tensor, transform: LogitTransform, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return best_of(hidden, transform, width)
