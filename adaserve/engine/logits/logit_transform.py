"""How logits are read: scaled, with a request's Gumbel noise added (``adaserve.noise``)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """How rows of logits are read: ``scale * logits + spread * g``; arrays of one entry per row."""

    scale: np.ndarray  # float32
    spread: np.ndarray  # float32; 0 reads without noise
    keys: np.ndarray  # uint64, of the requests
    positions: np.ndarray  # int64, of the tokens whose logits these are

    def __len__(self) -> int:
        return len(self.scale)

    @classmethod
    def plain(cls, scale: np.ndarray) -> LogitTransform:
        """Without noise."""
        rows = len(scale)
        zeros = np.zeros(rows, np.float32)
        return cls(scale.astype(np.float32), zeros, np.zeros(rows, np.uint64), np.zeros(rows, np.int64))

    @classmethod
    def draws(cls, temperature: np.ndarray, keys: np.ndarray, positions: np.ndarray) -> LogitTransform:
        """Whose best token is a draw at ``temperature``; at 0 it is the likeliest."""
        greedy = temperature <= 0
        scale = np.where(greedy, 1.0, 1.0 / np.where(greedy, 1.0, temperature))
        return cls(scale.astype(np.float32), (~greedy).astype(np.float32), keys, positions)
