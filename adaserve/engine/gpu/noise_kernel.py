"""``noise.transformed`` as one Triton kernel, and ``noise.best`` as two: each logit is read once, and its
noise is never written to memory. For the best tokens nothing is written but a few numbers of every block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Tokens of the vocabulary that one program reads."""


def transform_fused(logits: Tensor, scale: Tensor, spread: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """fp32 [T, V]: ``scale * logits + spread * noise``; ``keys`` int64 [T], the bits of uint64 ones.

    The hash is that of ``noise.gumbel`` bit for bit. The logarithms are rounded otherwise, by a few units in
    the last place. Rows without spread pay for no noise.
    """
    rows, vocabulary = logits.shape
    out = torch.empty(rows, vocabulary, dtype=torch.float32, device=logits.device)
    columns = [c.contiguous() for c in (scale, spread, keys, positions)]
    grid = (rows, triton.cdiv(vocabulary, BLOCK))
    _read_row[grid](logits, out, *columns, *logits.stride(), vocabulary, BLOCK)
    return out


def best_fused(
    logits: Tensor,
    scale: Tensor,
    spread: Tensor,
    keys: Tensor,
    positions: Tensor,
    words: Tensor | None,
    count: int,
) -> tuple[Tensor, Tensor]:
    """``noise.best``: of what ``transform_fused`` gives the best, of equal ones the first column first:
    log-probabilities fp32 and columns int64, [T, count] each. A logit that is not a number, as where fp16
    overflows, counts as minus infinity, and a probability that is none as 0."""
    rows, vocabulary = logits.shape
    blocks, device = triton.cdiv(vocabulary, BLOCK), logits.device
    values = torch.empty(rows, blocks, count, dtype=torch.float32, device=device)
    at, sums = torch.empty_like(values, dtype=torch.int32), torch.empty_like(values[..., 0])
    logprobs = torch.empty(rows, count, dtype=torch.float32, device=device)
    found = torch.empty(rows, count, dtype=torch.int64, device=device)
    columns = [c.contiguous() for c in (scale, spread, keys, positions)]
    strides, is_mapped = logits.stride(), words is not None
    _best_of_block[(rows, blocks)](
        logits, values, at, sums, *columns, words if is_mapped else keys, *strides, vocabulary, count, BLOCK,
        is_mapped,
    )  # fmt: skip
    sizes = triton.next_power_of_2(blocks), triton.next_power_of_2(blocks * count)
    _best_of_row[(rows,)](values, at, sums, logprobs, found, blocks, count, *sizes)
    return logprobs, found


# Compiled once for each type: columns come from uploads, where they start anywhere.
@triton.jit(do_not_specialize_on_alignment=["scale", "spread", "keys", "positions"])
def _read_row(  # type: ignore[no-untyped-def]
    logits, out, scale, spread, keys, positions, row_stride, stride, vocabulary, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    value = _value(logits + row * row_stride, scale, spread, keys, positions, keys, row, column, stride,
                   vocabulary, False)  # fmt: skip
    tl.store(out + row * vocabulary + column, value, mask=column < vocabulary)


@triton.jit(do_not_specialize_on_alignment=["scale", "spread", "keys", "positions", "words"])
def _best_of_block(  # type: ignore[no-untyped-def]
    logits, values, at, sums, scale, spread, keys, positions, words, row_stride, stride, vocabulary,
    count: tl.constexpr, block: tl.constexpr, is_mapped: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, block)
    column = part * block + place
    value = _value(logits + row * row_stride, scale, spread, keys, positions, words, row, column, stride,
                   vocabulary, is_mapped)  # fmt: skip
    is_number = value == value  # noqa: PLR0124
    value = tl.where((column < vocabulary) & is_number, value, float("-inf"))
    to = row * tl.num_programs(1) + part
    tl.store(sums + to, _sum_beside_largest(value, 1.0))
    for rank in tl.static_range(count):
        best = tl.argmax(value, axis=0)
        tl.store(values + to * count + rank, tl.max(value, axis=0))
        tl.store(at + to * count + rank, part * block + best)
        value = tl.where(place == best, float("-inf"), value)


@triton.jit
def _best_of_row(  # type: ignore[no-untyped-def]
    values, at, sums, logprobs, found, blocks, count: tl.constexpr, most_blocks: tl.constexpr,
    most_values: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    values, at = values + row * blocks * count, at + row * blocks * count
    part, place = tl.arange(0, most_blocks), tl.arange(0, most_values)
    largest = tl.load(values + part * count, mask=part < blocks, other=float("-inf"))
    weight = tl.load(sums + row * blocks + part, mask=part < blocks, other=0.0)
    total = tl.max(largest, axis=0) + tl.log(_sum_beside_largest(largest, weight))
    value = tl.load(values + place, mask=place < blocks * count, other=float("-inf"))
    for rank in tl.static_range(count):
        best = tl.argmax(value, axis=0)
        logprob = tl.max(value, axis=0) - total
        is_number = logprob == logprob  # noqa: PLR0124
        tl.store(logprobs + row * count + rank, tl.where(is_number, logprob, float("-inf")))
        tl.store(found + row * count + rank, tl.load(at + best).to(tl.int64))
        value = tl.where(place == best, float("-inf"), value)


@triton.jit
def _value(  # type: ignore[no-untyped-def]
    logits, scale, spread, keys, positions, words, row, column, stride, vocabulary, is_mapped: tl.constexpr
):
    """``scale * logits + spread * noise`` of a row, which starts at ``logits``; anything beyond its end."""
    inside = column < vocabulary
    value = tl.load(logits + column * stride, mask=inside, other=0.0).to(tl.float32)
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
    return value


@triton.jit
def _sum_beside_largest(value, weight):  # type: ignore[no-untyped-def]
    """Of ``weight * exp(value)``, divided by the largest exponential."""
    largest = tl.max(value, axis=0)
    return tl.sum(weight * tl.exp(value - tl.where(largest == float("-inf"), 0.0, largest)), axis=0)


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
