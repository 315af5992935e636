"""``follow_verification.begin_with`` as one Triton kernel, and its part of our attention as another."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from adaserve.engine.device import Awaited
from adaserve.engine.gpu.attention_layout import LIST


def begin_fused(awaited: Awaited, rows: Tensor, there: Mapping[str, Tensor]) -> Tensor:
    """All of ``there`` is contiguous."""
    short = torch.empty_like(rows)
    tokens, emitted = there["tokens"], awaited.emitted
    _begin[(len(rows),)](
        rows, awaited.length, emitted, awaited.tokens, awaited.root, tokens, there["places"], there["base"],
        there["lists"], short, awaited.most, emitted.stride(0), emitted.stride(1), tokens.shape[1], LIST,
    )  # fmt: skip
    return short


def shorten_fused(tiles: Tensor, short: Tensor, q: int) -> None:
    """``tiles`` int32 [tiles, TILE] of ``attention_kernel``, of requests with q tokens each; every one's
    keys become as many fewer as ``short`` int64 [R] says."""
    _shorten[(len(tiles),)](tiles, short, q, tiles.shape[1])


# Compiled once: uploads start anywhere, and so do views of what was accepted.
@triton.jit(
    do_not_specialize=["most", "e_row", "e_place", "first"],
    do_not_specialize_on_alignment=[
        "rows", "length", "emitted", "verified", "root", "tokens", "places", "base", "lists", "short",
    ],
)  # fmt: skip
def _begin(  # type: ignore[no-untyped-def]
    rows, length, emitted, verified, root, tokens, places, base, lists, short, most, e_row, e_place, first,
    each: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request)
    if row < 0:
        tl.store(short + request, row * 0)
    else:
        count = tl.load(length + row)
        less = most - count
        tl.store(short + request, less)
        answer = emitted + row * e_row
        before = tl.load(verified + tl.load(root + row))
        if count > 1:
            before = tl.load(answer + (count - 2) * e_place)
        end = (request + 1) * first
        tl.store(tokens + end - 2, before)
        tl.store(tokens + end - 1, tl.load(answer + (count - 1) * e_place))
        for place in range(1, 3):
            tl.store(places + end - place, tl.load(places + end - place) - less)
        tl.store(base + request, tl.load(base + request) - less)
        keys = lists + request * each + 1
        tl.store(keys, tl.load(keys) - less)


@triton.jit(do_not_specialize=["q"], do_not_specialize_on_alignment=["tiles", "short"])
def _shorten(tiles, short, q, each: tl.constexpr):  # type: ignore[no-untyped-def]
    tile = tiles + tl.program_id(0) * each
    length = tl.load(tile + 4)
    if length > 0:
        less = tl.load(short + tl.load(tile) // q)
        tl.store(tile + 4, length - less.to(tl.int32))
