"""Attention of tree forwards on a GPU: what kernels read and do, SDPA as the reference, and what SGLang's
models call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from adaserve.engine.gpu.attention_layout import Extent, change_tree_mask, unpack
from adaserve.engine.kv_writes import scales_of, write_kv
from adaserve.engine.model_support import plain_layers, require_no_more
from adaserve.engine.trees.attention import Scores, TreeAttentionPlan, attend, indptr


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
        slots, mask = self.kv_indices.numel(), self.mask.numel()
        remedy = "lower --max-running-requests or --context-length"
        if entries > slots:
            raise RuntimeError(f"{entries} KV entries are more than the {slots} that are reserved: {remedy}")
        if used > mask:
            raise RuntimeError(f"a tree mask of {used} bytes exceeds the {mask} reserved: {remedy}")

    @contextmanager
    def hiding(self, ends: Tensor, seen: Tensor) -> Iterator[None]:
        """What tokens do not see of their windows is hidden meanwhile (``change_tree_mask``)."""
        change_tree_mask(self.mask, ends, seen, shows=False)
        try:
            yield
        finally:
            change_tree_mask(self.mask, ends, seen, shows=True)


class TreeKernel(Protocol):
    """Masked attention over the slots in ``AttentionBuffers``; one per padded size."""

    def plan(self, extent: Extent) -> np.ndarray:
        """Prepares the next run; only host values, so it waits for nothing. Returns what the device must be
        given before: where each request's queries, keys and mask start, in one dimension, always as many."""
        ...

    def take(self, starts: Tensor) -> None:
        """What ``plan`` returned, on the device; a graph does this before it runs the kernel."""
        ...

    def shorten(self, starts: Tensor, short: Tensor, q: int) -> None:
        """What ``plan`` was told of each request was the longest case: it has as many keys fewer, at the end,
        as ``short`` int64 [R] says, and q tokens as all have. Changes ``starts``, those of ``take``."""
        ...

    def hiding(self, ends: Tensor, seen: Tensor) -> AbstractContextManager[None]:
        """Tokens do not see all of their windows meanwhile: only ``seen`` bool [R, q, width] of the last keys
        of their requests. ``ends`` int64 [R, q]: ``Extent.window_ends``; -1 = a token sees all."""
        ...

    def run(
        self, q: Tensor, keys: Tensor, values: Tensor, scores: Scores, positions: Tensor | None = None
    ) -> Tensor:
        """q [T, heads, D] over the pool's keys and values -> [T, heads * D]. ``positions`` int64 [T], needed
        where ``scores`` have a window; those of padding may be any."""
        ...


class SdpaKernel:
    """The reference, on any device: unpacks the mask and attends request by request."""

    def __init__(self, buffers: AttentionBuffers) -> None:
        self._buffers, self.hiding = buffers, buffers.hiding
        self._extent: Extent | None = None
        self._short: list[int] = []  # keys that each request has less than the extent says

    def plan(self, extent: Extent) -> np.ndarray:
        self._extent, self._short = extent, [0] * len(extent.q_lens)
        return np.zeros(0, np.int32)

    def shorten(self, starts: Tensor, short: Tensor, q: int) -> None:
        self._short = short.tolist()

    def take(self, starts: Tensor) -> None:
        """It reads the extent."""

    @property
    def tree_plan(self) -> TreeAttentionPlan:
        """What the buffers say now, in the CPU forward's terms."""
        e = self._extent
        assert e is not None
        kv_lens = e.kv_lens - self._short
        # All but the windows at the end is seen.
        mask = [
            unpack(self._buffers.mask, int(b), int(q), int(k))[:, less:].flatten()
            for b, q, k, less in zip(e.byte_starts[:-1], e.q_lens, e.kv_lens, self._short, strict=True)
        ]
        slots = [self._buffers.kv_indices[a : a + k] for a, k in zip(e.kv_starts, kv_lens, strict=False)]
        return TreeAttentionPlan(
            torch.from_numpy(e.qo_starts.astype(np.int32)),
            torch.from_numpy(indptr(kv_lens).astype(np.int32)),
            torch.cat(slots),
            torch.cat(mask),
        )

    def run(
        self, q: Tensor, keys: Tensor, values: Tensor, scores: Scores, positions: Tensor | None = None
    ) -> Tensor:
        plan = replace(self.tree_plan, positions=positions)
        return attend(q.float(), keys, values, plan, scores).to(q.dtype)


def set_out(kernel: TreeKernel, extent: Extent, device: torch.device) -> None:
    """Plans the next run of a kernel outside a graph, and copies the plan to the device."""
    kernel.take(torch.from_numpy(kernel.plan(extent)).to(device))


MakeKernel = Callable[[AttentionBuffers, int, int], TreeKernel]
"""A kernel for so many requests, padding included. Kernels that are planned before any of them runs, as those
of one draft are, need different places for their plans: the last argument, from 0 on."""


class TreeAttentionBackend(AttentionBackend):
    """What the model's attention layers call while one of our forwards runs."""

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.kv_index_translator = getattr(runner, "kv_index_translator", None)
        self.kernel: TreeKernel | None = None
        self.positions: Tensor | None = None
        self.slides = any(Scores.of(layer).window for layer in plain_layers(runner.model))

    @property
    def plan(self) -> TreeAttentionPlan:
        """For our own CPU forward, which computes attention itself."""
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
        sinks: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        require_no_more(more)
        assert self.kernel is not None
        pool = self.token_to_kv_pool
        if save_kv_cache:
            write_kv(pool, layer, forward_batch.out_cache_loc, k, v)
        heads = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        of_keys, of_values = scales_of(pool, layer)
        out = self.kernel.run(heads, keys, values, Scores.of(layer, sinks).times(of_keys), self.positions)
        return out if of_values == 1 else out * of_values

    forward_decode = forward_extend

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def support_triton(self) -> bool:
        return False
