"""Gumbel noise of requests in a device's draws and drafts: the numbers of ``adaserve.noise``.

A GPU has kernels for it (``noise_kernel.py``). On a CPU torch's operators replace them; these are also
the reference for the kernels. The hash is the same bit for bit: a request draws the same text on a CPU and on
every rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

BELOW_ONE = 1.0 - 2.0**-24
"""The largest fp32 number below 1, where the noise ends: at -2.8 instead of -3.1."""


def gumbel(keys: Tensor, positions: Tensor, words: Tensor) -> Tensor:
    """fp32 [T, V], of the tokens ``words`` int32 [V]; ``keys`` int64 [T] (the bits of uint64 ones),
    ``positions`` int64 [T]."""
    seed = _mix64(keys ^ _mix64(positions + _signed(0x9E3779B97F4A7C15, 64)))
    low, high = seed[:, None].contiguous().view(torch.int32).split(1, dim=1)
    bits = words + low
    bits = _mix32_(_mix32_(bits).bitwise_xor_(high))
    u = _shifted(bits, 1).float().add_(0.5).mul_(2.0**-31).clamp_(max=BELOW_ONE)
    return u.neg_().log1p_().neg_().log_().neg_()


def transformed(logits: Tensor, scale: Tensor, spread: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """fp32 [T, V]: ``scale * logits + spread * noise``, all [T]. One kernel on a GPU."""
    if logits.is_cuda:
        from adaserve.engine.gpu.noise_kernel import transform_fused

        return transform_fused(logits, scale, spread, keys, positions)
    return _transformed(logits, scale, spread, keys, positions, None)


def best(
    logits: Tensor,
    scale: Tensor,
    spread: Tensor,
    keys: Tensor,
    positions: Tensor,
    words: Tensor | None,
    count: int,
) -> tuple[Tensor, Tensor]:
    """The best ``count`` of ``transformed``, best first: log-probabilities fp32 and columns int64, [T, count]
    each. ``words`` int64 [V]: the tokens that the columns stand for, None = all in their order. Two kernels
    on a GPU, where torch's operators would take twenty."""
    if logits.is_cuda:
        from adaserve.engine.gpu.noise_kernel import best_fused

        return best_fused(logits, scale, spread, keys, positions, words, count)
    out = _transformed(logits, scale, spread, keys, positions, words)
    found = out.topk(count, dim=-1)
    return found.values - out.logsumexp(dim=-1, keepdim=True), found.indices


def _transformed(
    logits: Tensor, scale: Tensor, spread: Tensor, keys: Tensor, positions: Tensor, words: Tensor | None
) -> Tensor:
    every = torch.arange(logits.shape[1]) if words is None else words
    out = logits.float() * scale[:, None]
    return out.addcmul_(gumbel(keys, positions, every.int()), spread[:, None])


def _mix64(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9, 64)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB, 64)
    return x ^ _shifted(x, 31)


def _mix32_(x: Tensor) -> Tensor:
    """In place: [T, vocab] is large."""
    x.bitwise_xor_(_shifted(x, 16)).mul_(0x7FEB352D)
    x.bitwise_xor_(_shifted(x, 15)).mul_(_signed(0x846CA68B, 32))
    return x.bitwise_xor_(_shifted(x, 16))


def _shifted(x: Tensor, places: int) -> Tensor:
    """Shifts bits right and fills with zeros: torch's own shift keeps the sign."""
    width = 8 * x.itemsize
    return (x >> places) & ((1 << (width - places)) - 1)


def _signed(value: int, width: int) -> int:
    """Two's complement: products of signed numbers wrap to the bits that those of unsigned ones have."""
    return value - (1 << width) if value >> (width - 1) else value
