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
from adaserve.engine.logits.logit_transform import LogitTransform
from adaserve.noise import gumbel


def transformed(logits: torch.Tensor, transform: LogitTransform) -> torch.Tensor:
    """fp32 [rows, vocab]: ``logits`` as ``transform`` says, in plain torch."""
    out = logits.float() * torch.from_numpy(transform.scale)[:, None]
    noisy = np.flatnonzero(transform.spread)
    if len(noisy):
        noise = gumbel(transform.keys[noisy], transform.positions[noisy], logits.shape[1])
        noise *= transform.spread[noisy, None]
        out[torch.from_numpy(noisy)] += torch.from_numpy(noise)
    return out


def best_of(
    logits: torch.Tensor,
    transform: LogitTransform,
    width: int,
    forbid: Callable[[torch.Tensor], None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``width`` likeliest tokens of softmax(``logits`` as read), best first: log-probabilities, fp32, and
    tokens, int64, [rows, width] each. ``forbid`` sets some of the logits to -inf."""
    if forbid is not None:
        forbid(logits)
    # A head may know none of the tokens that a grammar allows: then there is no distribution.
    logprobs = transformed(logits, transform).log_softmax(-1).nan_to_num_(nan=-torch.inf, neginf=-torch.inf)
    best, tokens = logprobs.topk(width)
    return best, tokens


def draw(logits: torch.Tensor, transform: LogitTransform) -> torch.Tensor:
    """The best token of every row of fp32 ``logits`` [rows, vocab] as read, int64 [rows]."""
    kernels = build.load_kernels()
    if kernels is None:
        return transformed(logits, transform).argmax(dim=-1)
    logits, native = logits.float().contiguous(), NativeTransform(transform)
    tokens = torch.empty(len(transform), dtype=torch.int64)
    source, target = (ctypes.c_void_p(t.data_ptr()) for t in (logits, tokens))
    kernels.ada_draw(source, *logits.shape, native, target, torch.get_num_threads())
    return tokens


class _Transform(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("scale", "spread", "keys", "positions"))


class NativeTransform:
    """A transform as an argument of the C kernels."""

    def __init__(self, transform: LogitTransform) -> None:
        columns: Sequence[tuple[np.ndarray, type[np.generic]]] = (
            (transform.scale, np.float32),
            (transform.spread, np.float32),
            (transform.keys, np.uint64),
            (transform.positions, np.int64),
        )
        self._arrays = [np.ascontiguousarray(values, kind) for values, kind in columns]
        self._struct = _Transform(*(a.ctypes.data for a in self._arrays))
        self._as_parameter_ = ctypes.c_void_p(ctypes.addressof(self._struct))
