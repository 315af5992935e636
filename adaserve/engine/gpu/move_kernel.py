"""Moves of accepted paths between slots of a pool, as one Triton kernel.

SGLang's kernel for moves reads all slots before it writes any, but each warp for itself: a slot that one
warp has written may be one that another has still to read. The slots where a path belongs are among those
where it was drafted, so that can happen here. In this kernel a thread keeps to its own bytes of every slot
and moves the tokens of a path in their order, root first. It needs no barrier, and skips what lies where it
belongs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

WORD = 8
"""Bytes that a thread moves at once."""

BLOCK = 256
"""Words of a slot that one program moves."""


class PathMover:
    """For the ``buffers`` of one pool: [slots, ..] each, a token's entry a multiple of 8 bytes long."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        sizes = [buffer[0].nbytes for buffer in buffers]
        if any(size % WORD for size in sizes) or not all(buffer.is_contiguous() for buffer in buffers):
            raise ValueError(f"entries of {sorted(set(sizes))} bytes cannot be moved: they have to be whole "
                             f"words of {WORD} bytes, one behind another")  # fmt: skip
        device = buffers[0].device
        self._pointers = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.int64, device=device)
        self._words = torch.tensor([size // WORD for size in sizes], dtype=torch.int64, device=device)
        self._blocks = triton.cdiv(max(sizes) // WORD, BLOCK)

    def move(self, target: Tensor, source: Tensor) -> None:
        """Slots int64 [n, deepest]; each row is a path from the root on, and no token of it may be drafted at
        a slot where an earlier one belongs. Entries that move onto themselves cost nothing."""
        n, deepest = target.shape
        grid = (len(self._pointers), n, self._blocks)
        # One stage: nothing may be read ahead of a write.
        _move[grid](
            self._pointers, self._words, target, source, *target.stride(), *source.stride(), deepest, BLOCK,
            num_stages=1,
        )  # fmt: skip


# Compiled once: slots come from views that start anywhere, with any strides.
@triton.jit(
    do_not_specialize=["t_path", "t_step", "s_path", "s_step", "deepest"],
    do_not_specialize_on_alignment=["target", "source"],
)
def _move(  # type: ignore[no-untyped-def]
    pointers, words, target, source, t_path, t_step, s_path, s_step, deepest, block: tl.constexpr
):
    length = tl.load(words + tl.program_id(0))
    entries = tl.load(pointers + tl.program_id(0)).to(tl.pointer_type(tl.int64))
    word = tl.program_id(2) * block + tl.arange(0, block)
    inside = word < length
    path = tl.program_id(1)
    for step in range(deepest):
        to = tl.load(target + path * t_path + step * t_step)
        start = tl.load(source + path * s_path + step * s_step)
        if to != start:
            value = tl.load(entries + start * length + word, mask=inside)
            tl.store(entries + to * length + word, value, mask=inside)
