"""Reductions of short arrays without numpy's call overhead: about 0.3 us instead of 1.5 to 3."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from adaserve.scheduler.interface import BoolArray, CandidateTrees, FloatArray, IntArray


def largest(x: FloatArray | IntArray) -> float:
    """``x.max()``; NaN if one entry is NaN. ``x`` must not be empty."""
    return float(x.item(x.argmax()))


def smallest(x: FloatArray | IntArray) -> float:
    """``x.min()``; NaN if one entry is NaN. ``x`` must not be empty."""
    return float(x.item(x.argmin()))


def total(x: FloatArray | IntArray) -> float:
    """``x.sum()``."""
    return float(x.dot(_ones(len(x), x.dtype.char)))


@lru_cache(maxsize=256)
def _ones(n: int, kind: str) -> FloatArray | IntArray:
    return np.ones(n, kind)


def all_true(mask: BoolArray) -> bool:
    """``mask.all()``."""
    return bool(np.count_nonzero(mask) == mask.size)


def any_true(mask: BoolArray) -> bool:
    """``mask.any()``."""
    return bool(np.count_nonzero(mask) > 0)


@lru_cache(maxsize=256)
def _starts(n: int, k: int) -> IntArray:
    return np.arange(n + 1) * k


def row_size(trees: CandidateTrees) -> int:
    """Nodes of every row when all rows have equally many, else 0."""
    n, m = trees.n_rows, trees.n_nodes
    k = m // n
    return k if k * n == m and all_true(trees.row_start == _starts(n, k)) else 0


def rows_of_nodes(trees: CandidateTrees, nodes: IntArray) -> IntArray:
    """Row of each of ``nodes`` (flat indices)."""
    rows: IntArray = trees.row_start.searchsorted(nodes, "right")
    rows -= 1
    return rows
