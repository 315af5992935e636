"""Marginal pricing of candidate nodes: which prefix of the most valuable ones pays best per second.

V(m) / T(m) is compared at every m: V the value of the roots and the m best nodes, T the seconds of an
iteration that verifies them. This works for a latency table with steps as well as for a line. A row's part
of any such prefix is a tree: weight x f never rises along a path.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from adaserve.scheduler.interface import BoolArray, CandidateTrees, FloatArray, Selection
from adaserve.scheduler.selection import path_probability


@dataclass(frozen=True, slots=True)
class Priced:
    """What is bought, and at which price."""

    selection: Selection
    value: FloatArray  # [m]: probability that a node is accepted times the weight of its row
    rate: float  # value per second of the iteration
    price: float  # value that the time of one verify token is worth


def price_nodes(trees: CandidateTrees, f: FloatArray, weight: FloatArray, seconds: FloatArray) -> Priced:
    """Buys the prefix with the best rate.

    ``f`` [m]: probability that a node is accepted, falling along every path; ``weight`` [n]; ``seconds``
    [most + 1]: of an iteration in which 0 to ``most`` nodes are verified. Of nodes worth the same the first
    are taken.
    """
    most, value = len(seconds) - 1, f * weight[trees.row]
    falling = np.sort(value)[::-1]
    worth = np.empty(most + 1)
    worth[0] = roots = weight.sum()
    worth[1:] = roots + falling[:most].cumsum()
    rate = worth / seconds
    best = int(rate.argmax())
    if best and falling[best - 1] <= 0:  # only where the latency falls with tokens
        best = int(rate[: np.count_nonzero(falling) + 1].argmax())
    selection, best_rate = best_nodes(trees, f, value, falling, best), float(rate[best])
    return Priced(selection, value, best_rate, _token_price(best_rate, seconds, best, trees, falling))


def best_nodes(
    trees: CandidateTrees, f: FloatArray, value: FloatArray, falling: FloatArray, count: int
) -> Selection:
    """The ``count`` nodes that are worth most; of equals the first, so parents before children. ``falling``
    [m]: ``value`` [m], sorted."""
    n, row = trees.n_rows, trees.row
    least = falling[count - 1] if count else np.inf
    keep: BoolArray = value >= least
    if surplus := np.count_nonzero(keep) - count:
        keep[np.flatnonzero(value == least)[-surplus:]] = False
    expected = np.ones(n)
    expected += np.bincount(row, f * keep, n)
    counts = np.bincount(row[keep], minlength=n)
    return Selection(keep, counts, np.zeros(n, np.int64), expected)


def _token_price(
    rate: float, seconds: FloatArray, best: int, trees: CandidateTrees, falling: FloatArray
) -> float:
    """What the seconds of one verify token more or less are worth if ``best`` nodes are bought."""
    most = len(seconds) - 1
    low, high = max(0, best - trees.n_rows), min(most, best + trees.n_rows)
    price = rate * float(seconds[high] - seconds[low]) / max(1, high - low)
    # If B limits the selection, a place costs as much as the last chosen node is worth.
    return max(price, float(falling[best - 1])) if 0 < best == most < trees.n_nodes else price


def uncovered(offered: CandidateTrees | None, n: int, levels: int) -> FloatArray:
    """Probability that a row's text leaves the offered candidates before each of its next ``levels`` tokens
    or at it: what is left there for draft steps; [n, levels]."""
    left = np.ones((n, levels))
    if offered is not None:
        near = offered.depth <= levels
        place = offered.row[near], offered.depth[near] - 1
        np.subtract.at(left, place, path_probability(offered)[near])
    return np.maximum(left, 0.0)
