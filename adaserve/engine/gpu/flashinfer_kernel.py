"""FlashInfer's attention for tree forwards."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from adaserve.engine.gpu.attention import AttentionBuffers
from adaserve.engine.gpu.attention_layout import Extent
from adaserve.engine.gpu.attention_shape import AttentionShape
from adaserve.engine.gpu.flashinfer_planner import planned_rows
from adaserve.engine.trees.attention import Scores
from adaserve.errors import UnsupportedError

INT_WORKSPACE_BYTES = 8 << 20


class FlashInferKernel:
    """FlashInfer's batch prefill over pages of one slot, with a custom mask, in CUDA graph mode.

    For plain scores: it counts windows by the order of a request's queries, which is not that of a tree.

    Its planner is given host arrays only. Slots and mask are written into its buffers by us, and where each
    request's queries, slots and mask start: the mask's at bytes (the planner would count bits when it is
    given a packed mask). The first plan has as many tokens as all later ones, and its longest request decides
    for which tiles (``tiles``).
    """

    def __init__(
        self, buffers: AttentionBuffers, rows: int, heads: AttentionShape, workspace: Tensor, integers: Tensor
    ) -> None:
        self._buffers, self._rows, self._heads = buffers, rows, heads
        self.hiding = buffers.hiding
        self._workspaces = workspace, integers
        self._no_slots = buffers.kv_indices[:0]
        self._wrapper: Any = None

    def _open(self, first: Extent) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        buffers, (workspace, integers) = self._buffers, self._workspaces
        tokens, longest = int(first.qo_starts[-1]), int(first.q_lens.max())
        rows = planned_rows(self._heads, self._rows, tokens, longest, workspace.numel())
        device = buffers.kv_indices.device
        self._starts = torch.zeros(3, rows + 1, dtype=torch.int32, device=device)
        self._queries, self._slots, self._bytes = self._starts
        self._page_lens = torch.ones(rows, dtype=torch.int32, device=device)
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=self._queries,
            paged_kv_indptr_buf=self._slots,
            paged_kv_indices_buf=buffers.kv_indices,
            paged_kv_last_page_len_buf=self._page_lens,
            custom_mask_buf=buffers.mask,
            mask_indptr_buf=self._bytes,
            backend="fa2",  # the only backend with custom masks
        )
        # Forwards run one after the other on one stream, so that all can work in the same memory, except for
        # the plans in ``integers`` of those that are planned before any of them runs.
        self._wrapper.reset_workspace_buffer(workspace, integers)

    def plan(self, extent: Extent) -> np.ndarray:
        is_first = self._wrapper is None
        if is_first:
            self._open(extent)
        starts = np.empty(self._starts.shape, np.int32)
        for row, values in zip(starts, (extent.qo_starts, extent.kv_starts, extent.byte_starts), strict=True):
            row[: len(values)], row[len(values) :] = values, values[-1]
        queries, slots = torch.from_numpy(starts[:2]).unbind()
        if is_first:
            self._plan_first(queries, slots)
        else:
            self._plan_again(queries, slots, torch.from_numpy(np.diff(starts[1])))
        return starts.ravel()

    def take(self, starts: Tensor) -> None:
        self._starts.copy_(starts.view_as(self._starts))

    def shorten(self, starts: Tensor, short: Tensor, q: int) -> None:
        raise RuntimeError("FlashInfer is planned on the host, which has to know all lengths")

    def _plan_first(self, queries: Tensor, slots: Tensor) -> None:
        """Through FlashInfer's wrapper, which compiles what it needs."""
        h, lens = self._heads, torch.ones(len(self._page_lens), dtype=torch.int32)
        shape = h.q_heads, h.kv_heads, h.head_dim, 1  # of heads, and a page size of 1
        types = {"q_data_type": h.q_dtype, "kv_data_type": h.kv_dtype, "o_data_type": h.q_dtype}
        self._wrapper.plan(
            queries, slots, self._no_slots, lens, *shape, sm_scale=h.scaling, non_blocking=True, **types
        )

    def _plan_again(self, queries: Tensor, slots: Tensor, lens: Tensor) -> None:
        """Asks the wrapper's planner alone, as SGLang's ``fast_prefill_plan`` does: the wrapper would upload
        five arrays."""
        h, w = self._heads, self._wrapper
        w._plan_info = w._cached_module.plan(
            w._float_workspace_buffer, w._int_workspace_buffer, w._pin_memory_int_workspace_buffer,
            queries, slots, lens, w._max_total_num_rows, len(lens), h.q_heads, h.kv_heads, 1, True,
            h.head_dim, h.head_dim, False, -1,  # not causal, no window
            -1, False, 0, 0,  # keys are split as it likes
        )  # fmt: skip

    def run(
        self, q: Tensor, keys: Tensor, values: Tensor, scores: Scores, positions: Tensor | None = None
    ) -> Tensor:
        if not scores.are_plain:  # layers don't tell of sinks before they run
            raise UnsupportedError("FlashInfer serves no attention sinks: use --adaserve-attention triton")
        # A pool is [slots, heads, D]; a page of one slot is [slots, 1, heads, D]. The kernel reads queries by
        # their strides and writes every row, so they are not copied, and the output is not cleared before.
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        return self._wrapper.run(q, (keys.unsqueeze(1), values.unsqueeze(1)), out=out).flatten(1)
