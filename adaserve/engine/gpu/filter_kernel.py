"""``filters.by_sort`` as one Triton kernel, which looks for the last logit that is kept instead of sorting.

One program has a row, and bisects the integers that stand in the order of fp32 numbers: a logit passes while
fewer than ``top_k`` tokens stand above it, with no more than ``top_p`` of the probability. Every step goes on
at a logit that is there, so 128k tokens take about 17 steps, and any number takes 32 at most. Of the tokens
with the last logit the first ones are kept, as many as there is room for.

Counts are exact. Probabilities are added up in an order that nothing but the block size decides, so that the
sums are the same in every run and on every rank. And since adding is monotonic, what is above a smaller logit
never adds up to less.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 8192, 16
"""Tokens that a program reads at once, 16 by each thread: 32 KB on their way to a multiprocessor."""

LOWEST = tl.constexpr(-2139095041)
"""Minus infinity among the integers."""


def filter_fused(
    logits: Tensor, at: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> None:
    """A ``Filter`` that takes no memory; the rows of ``logits`` must lie one behind another."""
    assert logits.is_contiguous()
    columns = [c.contiguous() for c in (at, temperature, top_k, top_p, min_p)]
    if len(at):
        _filter_row[(len(at),)](logits, *columns, logits.shape[1], BLOCK, num_warps=WARPS)


# Compiled once for each type: columns come from uploads, where they start anywhere.
@triton.jit(do_not_specialize_on_alignment=["at", "temperature", "top_k", "top_p", "min_p"])
def _filter_row(  # type: ignore[no-untyped-def]
    logits, at, temperature, top_k, top_p, min_p, vocabulary, block: tl.constexpr
):
    place = tl.program_id(0)
    row = logits + tl.load(at + place) * vocabulary  # int64
    most = tl.minimum(tl.load(top_k + place), vocabulary).to(tl.int32)
    share, least = tl.load(top_p + place), tl.load(min_p + place)
    by_mass = share < 1.0

    highest = tl.full([block], float("-inf"), tl.float32)
    for start in range(0, vocabulary, block):
        highest = tl.maximum(highest, _read(row, start, vocabulary, block))
    first = tl.max(highest, axis=0)
    scale = 1.4426950408889634 / tl.load(temperature + place)  # powers of 2
    room = 0.0
    if by_mass:
        likely = tl.zeros([block], tl.float32)
        for start in range(0, vocabulary, block):
            likely += _likely(_read(row, start, vocabulary, block), first, scale)
        room = share * tl.sum(likely, axis=0)

    high, above, heavier = _lowest_that_passes(row, most, share, room, first, scale, vocabulary, block)
    last = _number(high)
    equal = most - above  # so many tokens with this logit have room
    if by_mass:
        fitting = tl.floor((room - heavier) / _likely(last, first, scale))
        equal = tl.minimum(equal, tl.minimum(fitting, 1.0 * vocabulary).to(tl.int32) + 1)
    _write_row(row, last, equal, first, scale, least, vocabulary, block)


@triton.jit
def _lowest_that_passes(  # type: ignore[no-untyped-def]
    row, most, share, room, first, scale, vocabulary, block: tl.constexpr
):
    """The last logit that is kept, as an integer; how many tokens stand above it, and their probability."""
    # ``high`` passes, and ``low`` does not. Above ``high`` are so many tokens, with so much probability.
    low, high, above, heavier = LOWEST - 1, _ordered(first), 0, 0.0
    if (most == vocabulary) & (share >= 1.0):
        high = LOWEST  # there is nothing to look for
    while low + 1 < high:
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, rounded down; a sum would overflow
        bound = _number(middle)
        count, mass = tl.zeros([block], tl.int32), tl.zeros([block], tl.float32)
        under = tl.full([block], float("-inf"), tl.float32)
        over = tl.full([block], float("inf"), tl.float32)
        for start in range(0, vocabulary, block):
            value = _read(row, start, vocabulary, block)
            is_above = value > bound
            count += is_above.to(tl.int32)
            under = tl.maximum(under, tl.where(is_above, float("-inf"), value))
            over = tl.minimum(over, tl.where(is_above, value, float("inf")))
            if share < 1.0:
                mass += tl.where(is_above, _likely(value, first, scale), 0.0)
        many, much = tl.sum(count, axis=0), tl.sum(mass, axis=0)
        if (many < most) & ((much <= room) | (share >= 1.0)):
            high, above, heavier = tl.minimum(_ordered(tl.max(under, axis=0)), middle), many, much
        else:
            low = tl.maximum(_ordered(tl.min(over, axis=0)) - 1, middle)
    return high, above, heavier


@triton.jit
def _write_row(  # type: ignore[no-untyped-def]
    row, last, equal, first, scale, least, vocabulary, block: tl.constexpr
):
    """Keeps the tokens above ``last``, and ``equal`` at it, where they are as likely as ``least``."""
    met = 0
    for start in range(0, vocabulary, block):
        value = _read(row, start, vocabulary, block)
        column = start + tl.arange(0, block)
        is_equal = (value == last) & (column < vocabulary)
        here = tl.sum(is_equal.to(tl.int32), axis=0)
        kept = value >= last
        if (here > 0) & (met + here > equal):
            kept = (value > last) | (is_equal & (met + tl.cumsum(is_equal.to(tl.int32), axis=0) <= equal))
        met += here
        kept &= _likely(value, first, scale) >= least
        tl.store(row + column, float("-inf"), mask=(column < vocabulary) & ~kept)


@triton.jit
def _read(row, start, vocabulary, block: tl.constexpr):  # type: ignore[no-untyped-def]
    column = start + tl.arange(0, block)
    return tl.load(row + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)


@triton.jit
def _likely(value, first, scale):  # type: ignore[no-untyped-def]
    """How likely a token is beside the likeliest one."""
    return tl.exp2((value - first) * scale)


@triton.jit
def _ordered(number):  # type: ignore[no-untyped-def]
    """int32 that stand in the order of fp32 numbers."""
    bits = number.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _number(order):  # type: ignore[no-untyped-def]
    """The fp32 number that ``order`` stands for."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
