"""Attention of tree forwards on a GPU: a kernel in Triton, FlashInfer's, or SDPA, all reading the very same
slots."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from adaserve.engine.gpu.head_shape import HeadShape
from adaserve.engine.gpu.layout import Extent, change_windows, unpack
from adaserve.engine.gpu.tiles import planned_rows, workspace_bytes
from adaserve.engine.trees.attention import TreeAttentionPlan, attend

logger = logging.getLogger(__name__)

Attention = Literal["auto", "flashinfer", "triton"]
"""A setting: auto is FlashInfer, or Triton where FlashInfer cannot be compiled or run."""
Kernel = Literal["sdpa", "flashinfer", "triton"]

INT_WORKSPACE_BYTES = 8 << 20


@dataclass(frozen=True)
class AttentionBuffers:
    """Static inputs that all forwards share; each forward reads the front of them."""

    kv_indices: Tensor  # int32 [capacity]
    mask: Tensor  # uint8 [capacity]: packed bits, ``layout``; all are set but while a forward hides some

    @staticmethod
    def allocate(kv_entries: int, mask_bytes: int, device: torch.device) -> AttentionBuffers:
        mask = torch.full((-(-mask_bytes // 4) * 4,), 255, dtype=torch.uint8, device=device)
        return AttentionBuffers(torch.zeros(kv_entries, dtype=torch.int32, device=device), mask)

    def require(self, extent: Extent) -> None:
        """Raises RuntimeError with the remedy where a forward has no room."""
        entries, used = int(extent.kv_starts[-1]), int(extent.byte_starts[-1])
        remedy = "lower --max-running-requests or --context-length"
        if entries > len(self.kv_indices):
            raise RuntimeError(
                f"{entries} KV entries are more than the {len(self.kv_indices)} that are reserved: {remedy}"
            )
        if used > len(self.mask):
            raise RuntimeError(f"a tree mask of {used} bytes exceeds the {len(self.mask)} reserved: {remedy}")

    @contextmanager
    def hiding(self, ends: Tensor, seen: Tensor) -> Iterator[None]:
        """What tokens do not see of their windows is hidden meanwhile (``change_windows``)."""
        change_windows(self.mask, ends, seen, shows=False)
        try:
            yield
        finally:
            change_windows(self.mask, ends, seen, shows=True)


class TreeKernel(Protocol):
    """Masked attention over the slots in ``AttentionBuffers``; one per padded size."""

    def plan(self, extent: Extent) -> np.ndarray:
        """Prepares the next run; only host values, so it waits for nothing. Returns what the device must be
        given before: where each request's queries, keys and mask start, in one dimension, always as many."""
        ...

    def take(self, starts: Tensor) -> None:
        """What ``plan`` returned, on the device; a graph does this before it runs the kernel."""
        ...

    def hiding(self, ends: Tensor, seen: Tensor) -> AbstractContextManager[None]:
        """Tokens do not see all of their windows meanwhile: only ``seen`` bool [R, q, width] of the last keys
        of their requests. ``ends`` int64 [R, q]: ``Extent.window_ends``; -1 = a token sees all."""
        ...

    def run(self, q: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """q [T, heads, D] over the pool's keys and values -> [T, heads * D]."""
        ...


class SdpaKernel:
    """The reference, on any device: unpacks the mask and attends request by request."""

    def __init__(self, buffers: AttentionBuffers) -> None:
        self._buffers, self.hiding = buffers, buffers.hiding
        self._extent: Extent | None = None

    def plan(self, extent: Extent) -> np.ndarray:
        self._extent = extent
        return np.zeros(0, np.int32)

    def take(self, starts: Tensor) -> None:
        """It reads the extent."""

    @property
    def tree_plan(self) -> TreeAttentionPlan:
        """What the buffers say now, in the CPU forward's terms."""
        e = self._extent
        assert e is not None
        mask = [
            unpack(self._buffers.mask, int(b), int(q), int(k)).flatten()
            for b, q, k in zip(e.byte_starts[:-1], e.q_lens, e.kv_lens, strict=True)
        ]
        return TreeAttentionPlan(
            torch.from_numpy(e.qo_starts.astype(np.int32)),
            torch.from_numpy(e.kv_starts.astype(np.int32)),
            self._buffers.kv_indices[: int(e.kv_starts[-1])],
            torch.cat(mask),
        )

    def run(self, q: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        scaled = q * (scaling * q.shape[-1] ** 0.5)
        return attend(scaled.float(), keys, values, self.tree_plan).to(q.dtype)


class FlashInferKernel:
    """FlashInfer's batch prefill over pages of one slot, with a custom mask, in CUDA graph mode.

    Its planner is given host arrays only. Slots and mask are written into its buffers by us, and where each
    request's queries, slots and mask start: the mask's at bytes (the planner would count bits when it is
    given a packed mask). The first plan has as many tokens as all later ones, and its longest request decides
    for which tiles (``tiles``).
    """

    def __init__(
        self, buffers: AttentionBuffers, rows: int, heads: HeadShape, workspace: Tensor, integers: Tensor
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

    def run(self, q: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        # A pool is [slots, heads, D]; a page of one slot is [slots, 1, heads, D]. The kernel reads queries by
        # their strides and writes every row, so they are not copied, and the output is not cleared before.
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        return self._wrapper.run(q, (keys.unsqueeze(1), values.unsqueeze(1)), out=out).flatten(1)


def set_out(kernel: TreeKernel, extent: Extent, device: torch.device) -> None:
    """Plans the next run of a kernel that stands in no graph, and gives the device what it needs for it."""
    kernel.take(torch.from_numpy(kernel.plan(extent)).to(device))


MakeKernel = Callable[[AttentionBuffers, int, int], TreeKernel]
"""A kernel for so many requests, padding included. Kernels that are planned before any of them runs, as those
of one draft are, need different places for their plans: the last argument, from 0 on."""


def kernel_maker(
    setting: Attention | Kernel, runner: Any, device: torch.device, rows: int, tokens: int
) -> tuple[Kernel, MakeKernel]:
    """The kernel that serves, by name: what ``setting`` says on CUDA, SDPA elsewhere. Its forwards have at
    most ``rows`` requests, padding included, with ``tokens`` in all."""
    heads = HeadShape.of(runner)
    if device.type != "cuda":
        return "sdpa", lambda buffers, rows, place: SdpaKernel(buffers)
    if setting == "triton":
        return "triton", own_kernel(heads, device)
    workspace = torch.empty(workspace_bytes(heads, rows, tokens), dtype=torch.uint8, device=device)
    plans: dict[int, Tensor] = {}

    def flashinfer(buffers: AttentionBuffers, rows: int, place: int) -> TreeKernel:
        if place not in plans:
            plans[place] = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return FlashInferKernel(buffers, rows, heads, workspace, plans[place])

    if setting == "flashinfer":
        return "flashinfer", flashinfer
    return usable("flashinfer", flashinfer, heads, device)


def own_kernel(heads: HeadShape, device: torch.device) -> MakeKernel:
    """Triton's, for a model with such heads."""
    from adaserve.engine.gpu.attention_kernel import TritonKernel, Workspace

    workspace = Workspace(heads, device)
    return lambda buffers, rows, place: TritonKernel(buffers, rows, workspace)


def usable(
    name: Kernel, make: MakeKernel, heads: HeadShape, device: torch.device
) -> tuple[Kernel, MakeKernel]:
    """``make`` if its kernel can be planned, which compiles it, and run; else Triton's, with a sentence."""
    try:
        kernel = make(AttentionBuffers.allocate(8, 8, device), 1, 0)
        set_out(kernel, Extent(np.array([1]), np.array([1])), device)
        q = torch.zeros(1, heads.q_heads, heads.head_dim, dtype=heads.q_dtype, device=device)
        pool = torch.zeros(1, heads.kv_heads, heads.head_dim, dtype=heads.kv_dtype, device=device)
        kernel.run(q, pool, pool, heads.scaling)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # or what it failed with shows later
    except Exception as error:  # nvcc, ninja, a header, a library: it can be anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1][:300]
        logger.warning(
            "AdaServe: %s cannot be compiled or run on this host, so trees are verified with AdaServe's own "
            "kernel in Triton (--adaserve-attention flashinfer shows the whole error): %s",
            name, reason,
        )  # fmt: skip
        return "triton", own_kernel(heads, device)
    return name, make


class TreeAttentionBackend(AttentionBackend):
    """What the model's attention layers call while one of our forwards runs."""

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.kv_index_translator = getattr(runner, "kv_index_translator", None)
        self.kernel: TreeKernel | None = None

    @property
    def plan(self) -> TreeAttentionPlan:
        """For the lean CPU forward, which computes attention itself."""
        assert isinstance(self.kernel, SdpaKernel)
        return self.kernel.tree_plan

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Planned before, by ``TreeKernel.plan``."""

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **_: Any,
    ) -> Tensor:
        assert self.kernel is not None
        pool = self.token_to_kv_pool
        if save_kv_cache:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        heads = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        return self.kernel.run(heads, keys, values, layer.scaling)

    forward_decode = forward_extend

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def support_triton(self) -> bool:
        return False
