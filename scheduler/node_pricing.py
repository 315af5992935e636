"""Marginal pricing of candidate nodes: which prefix of the most valuable nodes has the most value per second.

V(m) / T(m) is compared at every m: V the value of the roots and the m best nodes, T the seconds of an
iteration that verifies them. This works for a latency table with steps as well as for a line. A row's part
of any such prefix is a tree: weight x f never rises along a path.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from adaserve.scheduler.compiled import FLOAT, FLOATS, INT, INTS, compiled
from adaserve.scheduler.interface import BoolArray, CandidateTrees, FloatArray, IntArray, Selection
from adaserve.scheduler.selection import path_probability


@dataclass(frozen=True, slots=True)
class Priced:
    """The nodes that are bought, and their price."""

    selection: Selection
    value: FloatArray  # [m]: probability that a node is accepted times the weight of its row
    rate: float  # value per second of the iteration
    price: float  # value that the time of one verify token is worth


@compiled(INTS, FLOATS, FLOATS, FLOATS, INT)
def _best_nodes(
    row_start: IntArray, f: FloatArray, value: FloatArray, falling: FloatArray, count: int
) -> tuple[BoolArray, IntArray, FloatArray]:
    n = len(row_start) - 1
    keep, counts, expected = np.zeros(len(value), np.bool_), np.zeros(n, np.int64), np.ones(n)
    if count <= 0:
        return keep, counts, expected
    least, equals = falling[count - 1], 0  # how many of those that are worth the least are kept
    for place in range(count):
        equals += falling[place] == least
    for r in range(n):
        for i in range(row_start[r], row_start[r + 1]):
            if value[i] > least or (value[i] == least and equals > 0):
                equals -= value[i] == least
                keep[i] = True
                counts[r] += 1
                expected[r] += f[i]
    return keep, counts, expected


def price_nodes(trees: CandidateTrees, f: FloatArray, weight: FloatArray, seconds: FloatArray) -> Priced:
    """Buys the prefix with the best rate.

    ``f`` [m]: probability that a node is accepted, falling along every path; ``weight`` [n]; ``seconds``
    [most + 1]: of an iteration in which 0 to ``most`` nodes are verified. Of nodes worth the same the first
    are taken.
    """
    value = f * weight[trees.row]
    falling = np.sort(value)[::-1]
    roots = float(weight.sum())
    keep, counts, expected, rate, price = _price(trees.row_start, f, value, falling, roots, seconds)
    return Priced(_selection(keep, counts, expected), value, rate, price)


def explore(trees: CandidateTrees, f: FloatArray, value: FloatArray, most: int) -> Selection:
    """Up to ``most`` nodes with the highest ``value`` [m], whatever they cost: if nothing were verified,
    nothing could be learned about candidates. Of equal nodes the first are taken, so parents before
    children."""
    count = min(most, int(np.count_nonzero(value)))
    return _selection(*_best_nodes(trees.row_start, f, value, np.sort(value)[::-1], count))


def _selection(keep: BoolArray, counts: IntArray, expected: FloatArray) -> Selection:
    return Selection(keep, counts, np.zeros_like(counts), expected)


@compiled(INTS, FLOATS, FLOATS, FLOATS, FLOAT, FLOATS)
def _price(
    row_start: IntArray,
    f: FloatArray,
    value: FloatArray,
    falling: FloatArray,
    worth: float,
    seconds: FloatArray,
) -> tuple[BoolArray, IntArray, FloatArray, float, float]:
    """``falling``: ``value``, sorted; ``worth``: of the roots."""
    n, m, most = len(row_start) - 1, len(f), len(seconds) - 1
    best, rate = 0, worth / seconds[0]
    for count in range(1, most + 1):
        worth += falling[count - 1]
        # Nothing is bought that is worth nothing, even where the latency falls with tokens.
        if worth / seconds[count] > rate and falling[count - 1] > 0.0:
            best, rate = count, worth / seconds[count]
    # What the seconds of one verify token more or less are worth.
    low, high = max(0, best - n), min(most, best + n)
    price = rate * (seconds[high] - seconds[low]) / max(1, high - low)
    if 0 < best == most < m:  # if B limits the selection, a place costs as much as the last node is worth
        price = max(price, falling[best - 1])
    keep, counts, expected = _best_nodes(row_start, f, value, falling, best)
    return keep, counts, expected, rate, price


def uncovered(offered: CandidateTrees | None, n: int, levels: int) -> FloatArray:
    """Probability that a row's text leaves the offered candidates before or at each of its next ``levels``
    tokens, so that draft steps are useful there; [n, levels]."""
    left = np.ones((n, levels))
    if offered is not None:
        near = offered.depth <= levels
        place = offered.row[near], offered.depth[near] - 1
        np.subtract.at(left, place, path_probability(offered)[near])
    return np.maximum(left, 0.0)
