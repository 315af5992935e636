"""Gumbel noise that draft and target share, so that a draft can guess what a sampled request draws.

``argmax(logits / T + g)`` with g standard Gumbel noise is a draw of ``softmax(logits / T)``. Here g is a
function of (key of the request, position, token) alone. The target's draw at a position is therefore exact
whatever was drafted, and does not even depend on it; and a draft that adds the same g to its own logits
finds that very draw far more often than one that only knows which tokens are likely (Daliri, Musco, Suresh:
"Coupling without Communication and Drafter-Invariant Speculative Decoding", 2024).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import torch

from adaserve.engine.cpu import build
from adaserve.engine.logits.logit_reading import Reading
from adaserve.noise import gumbel


def read(logits: torch.Tensor, reading: Reading) -> torch.Tensor:
    """fp32 [rows, vocab]: ``logits`` as ``reading`` says, in plain torch."""
    out = logits.float() * torch.from_numpy(reading.scale)[:, None]
    noisy = np.flatnonzero(reading.spread)
    if len(noisy):
        noise = gumbel(reading.keys[noisy], reading.positions[noisy], logits.shape[1])
        noise *= reading.spread[noisy, None]
        out[torch.from_numpy(noisy)] += torch.from_numpy(noise)
    return out


def best_of(
    logits: torch.Tensor,
    reading: Reading,
    width: int,
    forbid: Callable[[torch.Tensor], None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``width`` likeliest tokens of softmax(``logits`` as read), best first: log-probabilities, fp32, and
    tokens, int64, [rows, width] each. ``forbid`` sets some of the logits to -inf."""
    if forbid is not None:
        forbid(logits)
    # A head may know none of the tokens that a grammar allows: then there is no distribution.
    logprobs = read(logits, reading).log_softmax(-1).nan_to_num_(nan=-torch.inf, neginf=-torch.inf)
    best, tokens = logprobs.topk(width)
    return best, tokens


def draw(logits: torch.Tensor, reading: Reading) -> torch.Tensor:
    """The best token of every row of fp32 ``logits`` [rows, vocab] as read, int64 [rows]."""
    kernels = build.load_kernels()
    if kernels is None:
        return read(logits, reading).argmax(dim=-1)
    logits, native = logits.float().contiguous(), NativeReading(reading)
    tokens = torch.empty(len(reading), dtype=torch.int64)
    source, target = (ctypes.c_void_p(t.data_ptr()) for t in (logits, tokens))
    kernels.ada_draw(source, *logits.shape, native, target, torch.get_num_threads())
    return tokens


class _Reading(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("scale", "spread", "keys", "positions"))


class NativeReading:
    """A reading as an argument of the C kernels."""

    def __init__(self, reading: Reading) -> None:
        columns: Sequence[tuple[np.ndarray, type[np.generic]]] = (
            (reading.scale, np.float32),
            (reading.spread, np.float32),
            (reading.keys, np.uint64),
            (reading.positions, np.int64),
        )
        self._arrays = [np.ascontiguousarray(values, kind) for values, kind in columns]
        self._struct = _Reading(*(a.ctypes.data for a in self._arrays))
        self._as_parameter_ = ctypes.c_void_p(ctypes.addressof(self._struct))
