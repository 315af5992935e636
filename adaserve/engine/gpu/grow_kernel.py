"""``Levels.grow`` of a beam search as one Triton kernel, in place of twelve of torch's.

One program has a request. It ranks the candidates of a level by counting those before each: the likelier
ones, and of equal ones the earlier. So ties are decided, the same on every rank. They are compared in parts:
all pairs of sixteen beams' candidates would not fit into a program's registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MIN_BLOCK = 16
"""So that trees of up to 16 columns and 16 candidates share one compiled kernel."""

PART = 32
"""Candidates that all others are compared with at once."""


def grow_fused(
    found: Tensor, visible: Tensor, logprob: Tensor, token: Tensor, before: slice, now: slice, children: int
) -> None:
    """``found`` int64 [3, a, nodes] and ``visible`` bool [a, nodes, width] are ``Levels``', contiguous;
    ``logprob`` and ``token`` int64 [a, beams, K]: what the nodes ``before`` offer, of which ``children`` are
    asked, best first. The best become the nodes ``now``."""
    assert found.is_contiguous() and visible.is_contiguous()
    rows, nodes, width = visible.shape
    offered = (before.stop - before.start) * children
    most = _block(offered)
    _grow[(rows,)](
        found, found.view(torch.float64), visible.view(torch.uint8), logprob, token, *logprob.stride(),
        *token.stride(), rows * nodes, nodes, width, before.start, now.start, now.stop - now.start, children,
        offered, most, _block(width), min(most, PART), num_warps=max(4, most // 16),
    )  # fmt: skip


def _block(size: int) -> int:
    return max(MIN_BLOCK, triton.next_power_of_2(size))


NUMBERS = (
    "l_row", "l_beam", "l_rank", "t_row", "t_beam", "t_rank", "plane", "nodes", "width", "before", "now",
    "beams", "children", "offered",
)  # fmt: skip


# Compiled once for all levels of all trees that have as large blocks.
@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=["logprob", "token"])
def _grow(  # type: ignore[no-untyped-def]
    found, logprobs, visible, logprob, token, l_row, l_beam, l_rank, t_row, t_beam, t_rank, plane, nodes,
    width, before, now, beams, children, offered, most: tl.constexpr, columns: tl.constexpr,
    part: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    found, logprobs = found + row * nodes, logprobs + 2 * plane + row * nodes
    visible, logprob, token = visible + row * nodes * width, logprob + row * l_row, token + row * t_row
    place = tl.arange(0, most)
    inside, beam = place < offered, place // children
    path = _path(logprobs + before, logprob, place, l_beam, l_rank, children, offered)
    rank = tl.zeros((most,), tl.int32)
    for start in range(0, offered, part):
        other = start + tl.arange(0, part)
        theirs = _path(logprobs + before, logprob, other, l_beam, l_rank, children, offered)[None, :]
        is_ahead = (theirs == path[:, None]) & (other[None, :] < place[:, None])
        rank += tl.sum((is_ahead | (theirs > path[:, None])).to(tl.int32), axis=1)
    kept = inside & (rank < beams)
    above, to = before + beam, now + rank
    tl.store(logprobs + to, path, mask=kept)
    said = tl.load(token + beam * t_beam + place % children * t_rank, mask=kept, other=0)
    tl.store(found + to, said, mask=kept)
    tl.store(found + plane + to, above.to(tl.int64), mask=kept)
    column = tl.arange(0, columns)[None, :]
    shown = kept[:, None] & (column < width)
    seen = tl.load(visible + above[:, None] * width + column, mask=shown, other=0)
    tl.store(visible + to[:, None] * width + column, seen, mask=shown & (seen != 0))


@triton.jit
def _path(above, logprob, place, l_beam, l_rank, children, offered):  # type: ignore[no-untyped-def]
    """Log-probabilities of paths; minus infinity where there is none, or no number."""
    inside, beam = place < offered, place // children
    path = tl.load(above + beam, mask=inside, other=float("-inf"))
    own = tl.load(logprob + beam * l_beam + place % children * l_rank, mask=inside, other=0.0)
    path += own.to(tl.float64)
    return tl.where(path == path, path, float("-inf"))  # noqa: PLR0124
