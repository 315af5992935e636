"""The draft model as SGLang workers see it: own weights and KV, the target's slots."""

from __future__ import annotations

from typing import Any

from sglang.srt.configs.draft_parallel import DraftParallelSpec, DraftTPExecution
from sglang.srt.layers.moe.utils import draft_model_build_scope
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.speculative.base_spec_worker import EagleDraftWorkerBase
from sglang.srt.speculative.draft_parallel import resolve_draft_parallel_layout
from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context


class DraftModel(EagleDraftWorkerBase):
    """A stand-alone language model with the target's vocabulary."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: TpModelWorker) -> None:
        super().__init__()
        self.parallel_layout = resolve_draft_parallel_layout(
            DraftParallelSpec(tp_execution=DraftTPExecution.TARGET_LAYOUT)
        )
        with draft_tp_context(self.parallel_layout), draft_pp_context(), draft_model_build_scope():
            self.draft_worker = TpModelWorker(
                server_args=server_args,
                gpu_id=gpu_id,
                nccl_port=nccl_port,
                is_draft_worker=True,
                context_length=target_worker.model_runner.model_config.context_len,
            )
        self.draft_runner = self.draft_worker.model_runner
        require_common_vocabulary(target_worker, self.draft_worker)

    def alloc_memory_pool(self, **pools: Any) -> None:
        self.draft_worker.alloc_memory_pool(**pools)

    def init_attention_backends(self) -> None:
        self.draft_worker.init_attention_backends()

    def init_cuda_graphs(self) -> None:
        self.draft_worker.init_cuda_graphs(capture_decode_cuda_graph=False)

    def draft(self) -> None:
        raise RuntimeError("AdaServe drafts through adaserve.engine.sources.beam")

    draft_extend = draft

    def extend(self, batch: Any) -> None:
        """Writes the draft's KV of the tokens that the target has just prefilled."""
        with draft_tp_context(self.parallel_layout):
            self.draft_runner.forward(
                ForwardBatch.init_new(batch, self.draft_runner, return_hidden_states_before_norm=False)
            )


def require_common_vocabulary(target: Any, draft: Any) -> None:
    """Raises ValueError with the reason when draft tokens would mean something else to the target."""
    t_size, d_size = target.model_runner.model_config.vocab_size, draft.model_runner.model_config.vocab_size
    # A larger model of a family may pad its vocabulary further. Looked up, its padding would read beyond the
    # draft's embedding, so only forwards that guard against it (those on a device) may have such a draft.
    may_be_smaller = target.tokenizer is not None and str(target.model_runner.device) != "cpu"
    if t_size != d_size and not (may_be_smaller and len(target.tokenizer) <= d_size < t_size):
        raise ValueError(
            f"the draft model has a vocabulary of {d_size} tokens and the target one of {t_size}: "
            "choose a draft of the same family with the same tokenizer"
        )
    if target.tokenizer is None or draft.tokenizer is None:
        return
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    if ours != theirs:
        token = next(t for t in sorted(ours.keys() | theirs.keys()) if ours.get(t) != theirs.get(t))
        raise ValueError(
            f"draft and target number their tokens differently (first difference: {token!r} is "
            f"{theirs.get(token)} in the draft and {ours.get(token)} in the target): "
            "choose a draft with the target's tokenizer"
        )
