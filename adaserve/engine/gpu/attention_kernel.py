"""Attention of tree forwards as one Triton kernel.

A program has a tile of one request's queries, for all heads that read one key head, and a part of its keys.
It reads everything from the device, including the geometry, so it can run inside a CUDA graph. Contexts are
cut into parts, as in Flash-Decoding, but no second kernel combines them: the last program of a tile to finish
does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from adaserve.engine.gpu.attention import AttentionBuffers
from adaserve.engine.gpu.attention_layout import Extent
from adaserve.engine.gpu.attention_shape import AttentionShape
from adaserve.engine.gpu.follow_kernel import shorten_fused
from adaserve.engine.trees.attention import Scores
from adaserve.scheduler.compiled import INT, INTS, compiled

TILE = 6
"""Numbers of each tile: the first token of its request, its first row and all rows of the request, where the
request's KV slots start and how many they are, and how many of them a part has at least. A row is one head of
one token."""

MIN_ROWS, MAX_ROWS, MAX_NUMBERS = 16, 64, 8192
"""Of a tile: a tensor core multiplies 16 rows. More numbers than that, rows times dimensions, do not fit into
the shared memory of smaller GPUs, beside their keys and values."""

MAX_KEPT, MAX_SPLITS = 1 << 16, 32
"""Rows of all parts of all tiles together, where contexts are cut, and parts of one."""

BUSY = 256
"""Tiles of all key heads that keep a GPU busy, as two for each multiprocessor do. Up to so many, parts are
short, so that there are more of them."""

SHORT, LONG = 64, 256
"""Keys of a part, at least."""

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)

Window = tuple[Tensor, Tensor]
"""``ends`` and ``seen``, see ``TreeKernel.hiding``."""


@dataclass(frozen=True)
class Cut:
    """How the work of a padded size is cut."""

    rows: int  # of a tile
    tiles: int  # at most
    splits: int  # parts of a context, at most
    heads: int  # that have keys
    warps: int
    keys: int = 64  # that a program reads at a time
    stages: int = 2


class Workspace:
    """What the forwards of one model share: they run one after the other."""

    def __init__(self, heads: AttentionShape, device: torch.device) -> None:
        self.group, self._kv_heads = heads.q_heads // heads.kv_heads, heads.kv_heads
        self._dim = triton.next_power_of_2(heads.head_dim)
        self.partial = torch.empty(MAX_KEPT * (self._dim + 2), dtype=torch.float32, device=device)
        self.counters = torch.zeros(MAX_KEPT // MIN_ROWS, dtype=torch.int32, device=device)
        """Of each tile and key head, parts that are done. All are 0 between two forwards."""

    def cut(self, requests: int, tokens: int, longest: int) -> Cut:
        """For so many requests with ``tokens`` in all, of which the ``longest`` has so many: others may come,
        but it is made for these. By what was tried on an H200, where short contexts counted most, with heads
        of 64 dimensions. Larger tiles have more warps, which hold them in their registers."""
        most = min(MAX_ROWS, MAX_NUMBERS // self._dim)
        rows = min(most, max(MIN_ROWS, triton.next_power_of_2(longest * self.group)))
        tiles = tokens * self.group // rows + requests
        programs = tiles * self._kv_heads
        splits = min(MAX_SPLITS, max(1, MAX_KEPT // (programs * rows)))
        warps = max(2 if programs >= BUSY else 4, self._dim // 32, rows * self._dim // 1024)
        return Cut(rows, tiles, splits, self._kv_heads, warps)


class TritonKernel:
    """``TreeKernel`` that needs no nvcc, and reads the table of what tokens see of their windows as it is."""

    def __init__(self, buffers: AttentionBuffers, rows: int, workspace: Workspace) -> None:
        self._buffers, self._rows, self._workspace = buffers, rows, workspace
        self._cut: Cut | None = None
        self._window: Window | None = None

    def plan(self, extent: Extent) -> np.ndarray:
        if self._cut is None:
            self._cut = self._workspace.cut(self._rows, int(extent.qo_starts[-1]), int(extent.q_lens.max()))
        return tiles_of(extent.q_lens, extent.kv_lens, self._workspace.group, self._cut).ravel()

    def take(self, starts: Tensor) -> None:
        self._tiles = starts.view(-1, TILE)

    def shorten(self, starts: Tensor, short: Tensor, q: int) -> None:
        shorten_fused(starts.view(-1, TILE), short, q)

    @contextmanager
    def hiding(self, ends: Tensor, seen: Tensor) -> Iterator[None]:
        self._window = ends, seen
        try:
            yield
        finally:
            self._window = None

    def run(
        self, q: Tensor, keys: Tensor, values: Tensor, scores: Scores, positions: Tensor | None = None
    ) -> Tensor:
        assert self._cut is not None
        slots, window = self._buffers.kv_indices, self._window
        return attend_fused(
            q, keys, values, slots, self._tiles, window, scores, positions, self._workspace, self._cut
        ).flatten(1)


def tiles_of(q_lens: np.ndarray, kv_lens: np.ndarray, group: int, cut: Cut) -> np.ndarray:
    """int32 [tiles, TILE]: those of all requests, then unused ones, which have no keys."""
    tiles: np.ndarray = _tiles_of(q_lens, kv_lens, group, cut.rows, cut.tiles, cut.heads)
    return tiles


@compiled(INTS, INTS, INT, INT, INT, INT)
def _tiles_of(
    q_lens: np.ndarray, kv_lens: np.ndarray, group: int, rows: int, count: int, heads: int
) -> np.ndarray:
    tiles = np.zeros((count, TILE), np.int32)
    n = token = key = 0
    for r in range(len(q_lens)):
        for first_row in range(0, q_lens[r] * group, rows):
            assert n < count
            tiles[n, 0], tiles[n, 1], tiles[n, 2] = token, first_row, q_lens[r] * group
            tiles[n, 3], tiles[n, 4] = key, kv_lens[r]
            n += 1
        token, key = token + q_lens[r], key + kv_lens[r]
    # As many as there are, whatever the padded size could have: a verification's may be of few requests.
    tiles[:, 5] = SHORT if n * heads <= BUSY else LONG
    return tiles


def attend_fused(
    q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, tiles: Tensor, window: Window | None,
    scores: Scores, positions: Tensor | None, workspace: Workspace, cut: Cut,
) -> Tensor:  # fmt: skip
    """q [T, heads, D] over ``slots`` of a pool's keys and values [slots, key heads, D] -> [T, heads, D].
    ``positions``: as in ``TreeKernel.run``."""
    (tokens, heads, dim), kv_heads = q.shape, keys.shape[1]
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    if window is None:
        ends = seen = tiles
        strides: tuple[int, ...] = (0, 0, 0)
        each, width = 1, 0
    else:
        ends, seen = window
        strides, each, width = seen.stride(), seen.shape[1], seen.shape[2]
        seen = seen.view(torch.uint8)
    # The kernel computes exponentials to the base 2, of which it also makes the hyperbolic tangent.
    log2_e: float = LOG2_E.value
    scale = scores.scaling * log2_e
    if scores.cap:
        scale *= 2 / scores.cap
    of_scores = (
        positions if scores.window else tiles,  # which is not read then
        tiles if scores.sinks is None else scores.sinks,
        scale, scores.cap * log2_e, scores.window,
    )  # fmt: skip
    asked = scores.window > 0, scores.cap > 0, scores.sinks is not None
    _attend[(len(tiles), kv_heads, cut.splits)](
        q, keys, values, out, slots, tiles, ends, seen, workspace.partial, workspace.counters, *of_scores,
        q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        *strides, each, width, heads // kv_heads, dim, triton.next_power_of_2(dim), cut.rows, cut.keys,
        *asked, num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    return out


# Compiled once for a model and a cut: windows and tiles are views that start anywhere, with any strides.
@triton.jit(
    do_not_specialize=["cap", "reach", "s_row", "s_token", "s_column", "each", "width"],
    do_not_specialize_on_alignment=["tiles", "ends", "seen", "positions", "sinks"],
)
def _attend(  # type: ignore[no-untyped-def]
    q, keys, values, out, slots, tiles, ends, seen, partial, counters, positions, sinks, scale, cap, reach,
    q_token, q_head, k_slot, k_head, v_slot, v_head, s_row, s_token, s_column, each, width,
    group: tl.constexpr, dim: tl.constexpr, block_dim: tl.constexpr, block_rows: tl.constexpr,
    block_keys: tl.constexpr, reaches: tl.constexpr, caps: tl.constexpr, has_sinks: tl.constexpr,
):  # fmt: skip
    head, split, splits = tl.program_id(1).to(tl.int64), tl.program_id(2), tl.num_programs(2)
    tiles += 6 * tl.program_id(0)
    length, least = tl.load(tiles + 4), tl.load(tiles + 5)
    # Parts are whole blocks, and none of them is short where the context is not.
    part = tl.maximum(tl.cdiv(tl.cdiv(length, splits), block_keys) * block_keys, least)
    begin = split * part
    if begin < length:
        start, first_row, all_rows = tl.load(tiles), tl.load(tiles + 1), tl.load(tiles + 2)
        row, column = first_row + tl.arange(0, block_rows), tl.arange(0, block_dim)
        is_row = row < all_rows
        token, row_head = (start + row // group).to(tl.int64), head * group + row % group
        inside = is_row[:, None] & (column < dim)[None, :]
        of_query = token * q_token + row_head * q_head
        query = tl.load(q + of_query[:, None] + column[None, :], mask=inside, other=0.0)
        if keys.dtype.element_ty.primitive_bitwidth > 8:
            query = query.to(keys.dtype.element_ty)  # --kv-cache-dtype may be another one than the model's
        # Rows that hide something read what they see of the last ``width`` keys.
        hides = is_row & (width > 0)
        hides = hides & (tl.load(ends + token, mask=hides, other=-1) >= 0)
        of_seen = seen + (token // each) * s_row + (token % each) * s_token
        end, oldest = tl.minimum(begin + part, length), row
        if reaches:  # each row sees the keys from its oldest one on
            oldest = (tl.load(positions + token, mask=is_row, other=1 << 30) - reach).to(tl.int32)
            begin = tl.maximum(begin, tl.min(oldest, axis=0))
        best, total, sums = _over(
            query, keys + head * k_head, values + head * v_head, slots + tl.load(tiles + 3), of_seen, hides,
            scale, cap, oldest, begin, end, length - width, k_slot, v_slot, s_column, dim, block_dim,
            block_rows, block_keys, reaches, caps,
        )  # fmt: skip
        parts = tl.cdiv(length, part)
        is_last = parts == 1
        if parts > 1:
            tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
            size: tl.constexpr = block_rows * (block_dim + 2)
            those = partial + (tile * splits).to(tl.int64) * size
            _keep(those + split * size, best, total, sums, block_dim, block_rows)
            tl.debug_barrier()  # what every thread has kept must be there before the count says so
            is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == parts - 1
            if is_last:
                tl.store(counters + tile, 0)
                best, total, sums = _together(those, parts, block_dim, block_rows)
        if is_last:
            if has_sinks:
                sink = tl.load(sinks + row_head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
                now = tl.maximum(best, sink)
                fade = tl.exp2(best - now)
                total, sums = total * fade + tl.exp2(sink - now), sums * fade[:, None]
            # A token that sees nothing gives 0; none of a request's does.
            result = sums / tl.where(total > 0, total, 1.0)[:, None]
            to = (token * (tl.num_programs(1) * group) + row_head) * dim
            tl.store(out + to[:, None] + column[None, :], result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _over(  # type: ignore[no-untyped-def]
    query, keys, values, slots, seen, hides, scale, cap, oldest, begin, end, window, k_slot, v_slot, s_column,
    dim: tl.constexpr, block_dim: tl.constexpr, block_rows: tl.constexpr, block_keys: tl.constexpr,
    reaches: tl.constexpr, caps: tl.constexpr,
):  # fmt: skip
    """Of every row over the keys from ``begin`` to ``end``: the best score, and what the exponentials of all
    and the values they weigh sum up to (Flash-Attention's running softmax, to the base 2)."""
    column = tl.arange(0, block_dim)[None, :]
    best = tl.full((block_rows,), float("-inf"), tl.float32)
    total = tl.zeros((block_rows,), tl.float32)
    sums = tl.zeros((block_rows, block_dim), tl.float32)
    for at in range(begin, end, block_keys):
        key = at + tl.arange(0, block_keys)
        is_key = key < end
        slot = tl.load(slots + key, mask=is_key, other=0).to(tl.int64)[:, None]
        inside = is_key[:, None] & (column < dim)
        k = tl.load(keys + slot * k_slot + column, mask=inside, other=0.0).to(query.dtype)
        v = tl.load(values + slot * v_slot + column, mask=inside, other=0.0).to(query.dtype)
        # Hidden slots may hold anything, as where another request's numbers overflowed: 0 x NaN is NaN.
        v = tl.where(v - v == 0.0, v, 0.0).to(v.dtype)
        score = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        if caps:
            score = cap * (1.0 - 2.0 / (tl.exp2(score) + 1.0))  # cap x tanh
        if at + block_keys > window:
            asked = hides[:, None] & ((key >= window) & is_key)[None, :]
            shown = tl.load(seen[:, None] + (key - window)[None, :] * s_column, mask=asked, other=1)
            score = tl.where(shown == 0, float("-inf"), score)
        if reaches:
            score = tl.where(key[None, :] >= oldest[:, None], score, float("-inf"))
        score = tl.where(is_key[None, :], score, float("-inf"))
        now = tl.maximum(best, tl.max(score, axis=1))
        base = tl.where(now == float("-inf"), 0.0, now)  # while nothing was seen
        weight, fade = tl.exp2(score - base[:, None]), tl.exp2(best - base)
        total = total * fade + tl.sum(weight, axis=1)
        sums = sums * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        best = now
    return best, total, sums


@triton.jit
def _keep(to, best, total, sums, block_dim: tl.constexpr, block_rows: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.arange(0, block_rows), tl.arange(0, block_dim)
    tl.store(to + row[:, None] * block_dim + column[None, :], sums)
    tl.store(to + block_rows * block_dim + row, best)
    tl.store(to + block_rows * (block_dim + 1) + row, total)


@triton.jit
def _together(parts_at, parts, block_dim: tl.constexpr, block_rows: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums of all parts that programs have kept, past the cache of this multiprocessor."""
    row, column = tl.arange(0, block_rows), tl.arange(0, block_dim)
    best = tl.full((block_rows,), float("-inf"), tl.float32)
    total = tl.zeros((block_rows,), tl.float32)
    sums = tl.zeros((block_rows, block_dim), tl.float32)
    for _ in range(parts):
        most = tl.load(parts_at + block_rows * block_dim + row, cache_modifier=".cg")
        its_total = tl.load(parts_at + block_rows * (block_dim + 1) + row, cache_modifier=".cg")
        its_sums = tl.load(parts_at + row[:, None] * block_dim + column[None, :], cache_modifier=".cg")
        now = tl.maximum(best, most)
        base = tl.where(now == float("-inf"), 0.0, now)
        fade, gain = tl.exp2(best - base), tl.exp2(most - base)
        total = total * fade + its_total * gain
        sums = sums * fade[:, None] + its_sums * gain[:, None]
        best = now
        parts_at += block_rows * (block_dim + 2)
    return best, total, sums
