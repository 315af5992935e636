"""``list_slots`` and ``change_tree_mask`` of ``attention_layout`` as one Triton kernel each. They run inside
graphs: what they read of a forward's geometry is on the device."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from adaserve.engine.trees.verify import SCRATCH_SLOT

BLOCK = 1024
"""Slots that a program lists at once."""

PROGRAMS = 8
"""For each request."""

COLUMNS = 32
"""Of a window that a program writes at once."""


def list_fused(req_to_token: Tensor, lists: Tensor, out: Tensor) -> None:
    """``lists`` int64 [R, 5], contiguous."""
    _list[(len(lists), PROGRAMS)](req_to_token, lists, out, req_to_token.stride(0), SCRATCH_SLOT, BLOCK)


def change_fused(mask: Tensor, ends: Tensor, seen: Tensor, shows: bool) -> None:
    """``mask``: as int32."""
    rows, tokens, width = seen.shape
    _change[(rows, tokens)](mask, ends.contiguous(), seen, *seen.stride(), width, COLUMNS, shows)


# Compiled once: uploads start anywhere.
@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["lists"])
def _list(table, lists, out, stride, scratch: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    mine = lists + 5 * tl.program_id(0)
    start, length, row = tl.load(mine), tl.load(mine + 1), tl.load(mine + 2)
    gap_at, gap_length = tl.load(mine + 3), tl.load(mine + 4)
    for at in range(tl.program_id(1) * block, length, tl.num_programs(1) * block):
        key = at + tl.arange(0, block)
        inside = key < length
        place = key + tl.where(key >= gap_at, gap_length, 0)
        slot = tl.load(table + row * stride + place, mask=inside & (row >= 0), other=scratch)
        tl.store(out + start + key, slot, mask=inside)


@triton.jit(
    do_not_specialize=["row_stride", "token_stride", "column_stride", "width"],
    do_not_specialize_on_alignment=["ends", "seen"],
)
def _change(  # type: ignore[no-untyped-def]
    mask, ends, seen, row_stride, token_stride, column_stride, width, columns: tl.constexpr,
    shows: tl.constexpr,
):  # fmt: skip
    row, token = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    end = tl.load(ends + row * tl.num_programs(1) + token)
    seen += row * row_stride + token * token_stride
    for first in range(0, width, columns):
        column = first + tl.arange(0, columns)
        is_column = (column < width) & (end >= 0)
        hidden = is_column & (tl.load(seen + column * column_stride, mask=is_column, other=1) == 0)
        at = end - width + column
        word, bit = mask + (at >> 5), 1 << (at & 31).to(tl.int32)
        # Windows of two tokens may share a word.
        if shows:
            tl.atomic_or(word, bit, mask=hidden)
        else:
            tl.atomic_and(word, ~bit, mask=hidden)
