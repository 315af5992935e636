"""``noise.read`` as one Triton kernel: each logit is read once, and its noise is never written to memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Tokens of the vocabulary that one program reads."""


def read_fused(
    logits: Tensor,
    scale: Tensor,
    spread: Tensor,
    keys: Tensor,
    positions: Tensor,
    words: Tensor | None = None,
) -> Tensor:
    """fp32 [T, V]: ``scale * logits + spread * noise``; ``keys`` int64 [T], the bits of uint64 ones;
    ``words`` int64 [V], the tokens that the columns stand for, None = all in their order.

    The hash is that of ``noise.gumbel`` bit for bit. The logarithms are rounded otherwise, by a few units in
    the last place. Rows without spread pay for no noise.
    """
    rows, vocabulary = logits.shape
    out = torch.empty(rows, vocabulary, dtype=torch.float32, device=logits.device)
    columns = [c.contiguous() for c in (scale, spread, keys, positions)]
    grid = (rows, triton.cdiv(vocabulary, BLOCK))
    strides, is_mapped = logits.stride(), words is not None
    _read_row[grid](
        logits, out, *columns, words if is_mapped else keys, *strides, vocabulary, BLOCK, is_mapped
    )
    return out


# Compiled once for each type: columns come from uploads, where they start anywhere.
@triton.jit(do_not_specialize_on_alignment=["scale", "spread", "keys", "positions", "words"])
def _read_row(  # type: ignore[no-untyped-def]
    logits, out, scale, spread, keys, positions, words, row_stride, stride, vocabulary, block: tl.constexpr,
    is_mapped: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < vocabulary
    value = tl.load(logits + row * row_stride + column * stride, mask=inside, other=0.0).to(tl.float32)
    value = value * tl.load(scale + row)
    much = tl.load(spread + row)
    if much != 0.0:
        key = tl.load(keys + row).to(tl.uint64, bitcast=True)
        position = tl.load(positions + row).to(tl.uint64, bitcast=True)
        token = column
        if is_mapped:
            token = tl.load(words + column, mask=inside, other=0)
        seed = _mix64(key ^ _mix64(position + 0x9E3779B97F4A7C15))
        bits = _mix32(_mix32(token.to(tl.uint32) + seed.to(tl.uint32)) ^ (seed >> 32).to(tl.uint32))
        u = ((bits >> 1).to(tl.float32) + 0.5) * (2.0**-31)
        u = tl.minimum(u, 1.0 - 2.0**-24)  # noise.BELOW_ONE
        value += much * -tl.log(-_log1p_of_minus(u))
    tl.store(out + row * vocabulary + column, value, mask=inside)


@triton.jit
def _log1p_of_minus(u):  # type: ignore[no-untyped-def]
    """log(1 - u), also for a u that 1 - u rounds away: Goldberg, "What Every Computer Scientist Should Know
    About Floating-Point Arithmetic", theorem 4."""
    rest = 1.0 - u
    lost = rest - 1.0
    safe = tl.where(lost == 0.0, 1.0, lost)
    return tl.where(lost == 0.0, -u, tl.log(rest) * (-u / safe))


@triton.jit
def _mix64(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _mix32(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)
