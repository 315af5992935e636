"""Gumbel noise that a request's draft and target share: a hash of (key of the request, position, token).

Imports numpy alone: the servers, the C kernels' tests and the training of the embedded pair agree on it.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np


def request_key(*parts: object) -> int:
    """64 bits that stand for a request in its noise: the same parts give the same key, on every rank."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def gumbel(keys: np.ndarray, positions: np.ndarray, vocabulary: int) -> np.ndarray:
    """The noise itself, float32 [rows, vocabulary]: `read_rows` of csrc/sampling.h in numpy."""
    tokens = np.arange(vocabulary, dtype=np.uint32)[None, :]
    noise: np.ndarray = -np.log(-np.log1p(-_uniform(keys[:, None], positions[:, None], tokens)))
    return noise.astype(np.float32)


def quantile(keys: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Where the noise of tokens stands among all noise, float64 in (0, 1); arrays of one common shape."""
    return 1.0 - _uniform(keys, positions, tokens)


def _uniform(keys: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    seed = _mix64(
        keys.astype(np.uint64) ^ _mix64(positions.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    )
    low, high = seed.astype(np.uint32), (seed >> np.uint64(32)).astype(np.uint32)
    bits = _mix32(_mix32(tokens.astype(np.uint32) + low) ^ high)
    u: np.ndarray = ((bits >> np.uint32(1)).astype(np.float64) + 0.5) * 2.0**-31
    return u


def _mix64(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix32(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))
