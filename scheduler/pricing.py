"""Marginal pricing of candidate nodes: which prefix of the most valuable ones pays best per second.

V(m) / T(m) is compared at every m: V the value of the roots and the m best nodes, T the seconds of an
iteration that verifies so many. A latency table with steps is so handled as well as a line. A row's part
of any such prefix is a tree: weight x f never rises along a path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from adaserve.scheduler.arrays import row_size, total
from adaserve.scheduler.interface import BoolArray, CandidateTrees, FloatArray, IntArray
from adaserve.scheduler.selection import best_nodes, keep_nodes, row_of


@dataclass(frozen=True, slots=True)
class Priced:
    """What is bought, and at which price."""

    keep: BoolArray  # [m]
    counts: IntArray  # [n]: kept nodes
    expected: FloatArray  # [n]: tokens, bonus included
    f: FloatArray | list[float]  # [m]: probability that a node is accepted
    value: FloatArray | list[float]  # [m]: that times the weight of its row
    rate: float  # value per second of the iteration
    price: float  # value that the time of one verify token is worth


class Pricing(Protocol):
    """All of it in one call, as an accelerated host may offer it (``PolicyConfig.pricing``)."""

    def __call__(
        self,
        trees: CandidateTrees,
        factors: FloatArray,
        weight: FloatArray,
        cap: IntArray | None,
        seconds: FloatArray,
    ) -> Priced:
        """``factors`` [n, N_BINS + 1] as ``Calibrator.batch_factors`` gives; the rest as ``price_nodes``.

        ``cap`` [n]: deepest node that may be kept.
        """
        ...


def price_nodes(
    trees: CandidateTrees, f: FloatArray | list[float], weight: FloatArray, seconds: FloatArray
) -> Priced:
    """Buys the prefix with the best rate.

    ``f`` [m] falls along every path; ``weight`` [n]; ``seconds`` [most + 1]: of an iteration in which 0 to
    ``most`` nodes are verified. Of nodes worth the same the first are taken.
    """
    if isinstance(f, list):
        return _price_few(trees, f, weight, seconds)
    return _price_many(trees, f, weight, seconds)


def _price_many(trees: CandidateTrees, f: FloatArray, weight: FloatArray, seconds: FloatArray) -> Priced:
    per_row, most = row_size(trees), len(seconds) - 1
    value = _times_weight(trees, f, weight, per_row)
    falling = _largest(value, most)
    worth = np.empty(most + 1)
    worth[0] = roots = total(weight)
    falling.cumsum(out=worth[1:])
    worth[1:] += roots
    rate = worth / seconds
    best = int(rate.argmax())
    if best and falling[best - 1] <= 0:  # only where the latency falls with tokens
        best = int(rate[: np.count_nonzero(falling) + 1].argmax())
    keep = best_nodes(value, falling[best - 1], best) if best else np.zeros(len(value), np.bool_)
    kept = keep_nodes(trees, keep, f, per_row)
    last = float(falling[best - 1]) if best else 0.0
    price = _price(float(rate[best]), seconds, best, trees, last)
    return Priced(keep, kept.counts, kept.expected_tokens, f, value, float(rate[best]), price)


def _price_few(trees: CandidateTrees, f: list[float], weight: FloatArray, seconds: FloatArray) -> Priced:
    """The same in plain numbers."""
    n, m, starts = trees.n_rows, trees.n_nodes, trees.row_start.tolist()
    value: list[float] = []
    for row, w in enumerate(weight.tolist()):
        value += [w * x for x in f[starts[row] : starts[row + 1]]]
    # Falling, of equals the first: Python's sort is stable in reverse, too.
    order = sorted(range(m), key=value.__getitem__, reverse=True)
    most, at = len(seconds) - 1, seconds.tolist()
    worth = sum(weight.tolist())
    best, best_rate = 0, worth / at[0]
    for count, node in enumerate(order[:most], 1):
        if value[node] <= 0.0:
            break
        worth += value[node]
        if worth / at[count] > best_rate:
            best, best_rate = count, worth / at[count]
    kept = [False] * m
    for node in order[:best]:
        kept[node] = True
    counts, expected = [], []
    for row in range(n):
        mine = [f[i] for i in range(starts[row], starts[row + 1]) if kept[i]]
        counts.append(len(mine))
        expected.append(1.0 + sum(mine))
    price = _price(best_rate, seconds, best, trees, value[order[best - 1]] if best else 0.0)
    return Priced(np.array(kept), np.array(counts), np.array(expected), f, value, best_rate, price)


def _price(rate: float, seconds: FloatArray, best: int, trees: CandidateTrees, last: float) -> float:
    """What the seconds of one verify token more or less are worth; ``last``: value of the last one bought."""
    most = len(seconds) - 1
    low, high = max(0, best - trees.n_rows), min(most, best + trees.n_rows)
    price = rate * float(seconds[high] - seconds[low]) / max(1, high - low)
    # Where B binds, a place costs what the last one in is worth.
    return max(price, last) if 0 < best == most < trees.n_nodes else price


def _times_weight(trees: CandidateTrees, f: FloatArray, weight: FloatArray, per_row: int) -> FloatArray:
    """weight of its row x ``f``, [m]."""
    if per_row:
        return (f.reshape(-1, per_row) * weight[:, None]).reshape(-1)
    return f * weight[row_of(trees)]


def _largest(value: FloatArray, count: int) -> FloatArray:
    """The ``count`` largest, falling; [count]."""
    value = value.copy()
    if 2 * count < len(value):
        value.partition(len(value) - count - 1)
        value = value[len(value) - count :]
    value.sort()
    return value[::-1][:count]
