"""Selection over flat candidate trees: AdaServe's Algorithm 2 lines 9-23, and its relatives.

Everything rests on one fact: a path probability never rises from parent to child. So the best m nodes of a
row are always a tree, and a selection is fully described by how long a prefix of each row's ranking is kept.
Equals stay in the order of the nodes, parents first, which the published pseudocode leaves open.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from adaserve.scheduler.compiled import FLOAT, FLOAT_TABLE, FLOATS, INT, INT_TABLE, INTS, compiled
from adaserve.scheduler.interface import BoolArray, CandidateTrees, FloatArray, IntArray, Selection

Values = TypeVar("Values", FloatArray, IntArray, BoolArray)

ENOUGH = 1.0 + 1e-9
"""A need that the root alone meets, up to rounding."""

NO_CAP = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Ranked:
    """Candidates of every row, best first, padded to the longest row."""

    index: IntArray  # [n, k]: flat node index; meaningless where there is no node
    value: FloatArray  # [n, k]: path probability, 0 where there is no node; falling along a row
    available: IntArray  # [n]: nodes with value > 0


def path_probability(trees: CandidateTrees) -> FloatArray:
    """exp(logprob), [m]. NaN counts as 0 (such a node is never kept), above 1 as 1."""
    f: FloatArray = np.minimum(np.fmax(np.exp(trees.logprob), 0.0), 1.0)
    return f


def and_root(x: Values, root: float) -> Values:
    """``x`` [m] followed by ``root``, where children of a root look for their parent."""
    out: Values = np.empty(len(x) + 1, x.dtype)
    out[:-1] = x
    out[-1] = root
    return out


def never_rising(trees: CandidateTrees, f: FloatArray) -> FloatArray:
    """``f`` [m] with every child pulled down to its parent: a drafter may round it up."""
    parent = trees.above
    while True:  # at most once per level
        above = and_root(f, np.inf).take(parent)
        if (f <= above).all():
            return f
        f = np.minimum(f, above)


def within_cap(trees: CandidateTrees, f: FloatArray, cap: IntArray | None) -> FloatArray:
    """``f`` [m] with 0 for nodes deeper than their row's ``cap`` [n]; None = no row is limited."""
    return f if cap is None else np.where(trees.depth > cap[trees.row], 0.0, f)


def rank(trees: CandidateTrees, f: FloatArray, cap: IntArray | None = None) -> Ranked:
    """Sorts each row's candidates by ``f`` [m], descending, parents first among equals.

    ``cap`` [n]: nodes deeper than that are left out. A child whose ``f`` exceeds its parent's by
    rounding is pulled down to it.
    """
    cap = NO_CAP if cap is None else cap
    return Ranked(*_rank(trees.row_start, trees.parent, trees.depth, f, cap))


@compiled(INTS, INTS, INTS, FLOATS, INTS)
def _rank(
    row_start: IntArray, parent: IntArray, depth: IntArray, f: FloatArray, cap: IntArray
) -> tuple[IntArray, FloatArray, IntArray]:
    n, longest = len(row_start) - 1, 0
    for r in range(n):
        longest = max(longest, row_start[r + 1] - row_start[r])
    index, value = np.zeros((n, longest), np.int64), np.zeros((n, longest))
    available, falling = np.zeros(n, np.int64), np.empty(len(f))
    for r in range(n):
        start, end = row_start[r], row_start[r + 1]
        for i in range(start, end):
            falling[i] = 0.0 if len(cap) and depth[i] > cap[r] else f[i]
            if parent[i] >= 0:
                falling[i] = min(falling[i], falling[start + parent[i]])
        order = np.argsort(-falling[start:end], kind="mergesort")  # which is stable
        for place in range(end - start):
            node = start + order[place]
            index[r, place], value[r, place] = node, falling[node]
            available[r] += falling[node] > 0.0
    return index, value, available


def take_prefix(ranked: Ranked, counts: IntArray, slo_counts: IntArray, m: int) -> Selection:
    """Keeps the first ``counts[r]`` ranked nodes of every row."""
    keep, expected = _prefix(ranked.index, ranked.value, counts, m)
    return Selection(keep, counts, slo_counts, expected)


@compiled(INT_TABLE, FLOAT_TABLE, INTS, INT)
def _prefix(index: IntArray, value: FloatArray, counts: IntArray, m: int) -> tuple[BoolArray, FloatArray]:
    keep, expected = np.zeros(m, np.bool_), np.ones(len(counts))
    for r in range(len(counts)):
        for place in range(counts[r]):
            keep[index[r, place]] = True
            expected[r] += value[r, place]
    return keep, expected


def slo_counts(ranked: Ranked, need: FloatArray, reach: float, n_max: int | None, budget: int) -> IntArray:
    """SLO phase (Algorithm 2 lines 9-17): nodes per row, neediest row first, ``budget`` nodes in all; [n].

    A row takes its best nodes until 1 + sum f >= A_cap = min(A, reach); ``reach`` = d + 1. The count is
    the smallest that gets there, cut by ``n_max`` (added nodes) and by what is left when it is its turn.

    Rows are sorted by need here, and only when the budget is short: A(r) of every running request changes in
    every iteration, so a list kept in order between iterations would have to be sorted anew as well.
    """
    most = ranked.value.shape[1] if n_max is None else n_max
    counts: IntArray = _slo_counts(ranked.value, ranked.available, need, reach, most, budget)
    return counts


@compiled(FLOAT_TABLE, INTS, FLOATS, FLOAT, INT, INT)
def _slo_counts(
    value: FloatArray, available: IntArray, need: FloatArray, reach: float, n_max: int, budget: int
) -> IntArray:
    n, wanted = len(need), np.zeros(len(need), np.int64)
    for r in range(n):
        missing = min(need[r], reach) - ENOUGH
        if missing <= 0.0:  # the root suffices
            continue
        expected = 0.0
        while wanted[r] < min(n_max, available[r]) and expected < missing:
            expected += value[r, wanted[r]]
            wanted[r] += 1
    if wanted.sum() > budget:
        left = max(0, budget)
        for r in np.argsort(-need, kind="mergesort"):
            wanted[r] = min(wanted[r], left)
            left -= wanted[r]
    return wanted


def best_counts(ranked: Ranked, first: IntArray, budget: int) -> IntArray:
    """Throughput phase (Algorithm 2 lines 18-23): the ``first`` [n] nodes of each row, and the ``budget``
    best of the remaining nodes of all rows.

    Returns kept nodes per row, [n].
    """
    leftovers = _leftovers(ranked.value, ranked.available, first)
    if len(leftovers) <= budget:
        return ranked.available
    if budget <= 0:
        return first
    place = len(leftovers) - budget
    least = float(np.partition(leftovers, place)[place])
    counts: IntArray = _best_counts(ranked.value, ranked.available, first, least, budget)
    return counts


@compiled(FLOAT_TABLE, INTS, INTS)
def _leftovers(value: FloatArray, available: IntArray, first: IntArray) -> FloatArray:
    leftovers, at = np.empty((available - first).sum()), 0
    for r in range(len(first)):
        for place in range(first[r], available[r]):
            leftovers[at] = value[r, place]
            at += 1
    return leftovers


@compiled(FLOAT_TABLE, INTS, INTS, FLOAT, INT)
def _best_counts(
    value: FloatArray, available: IntArray, first: IntArray, least: float, budget: int
) -> IntArray:
    counts = first.copy()
    for r in range(len(first)):
        while counts[r] < available[r] and value[r, counts[r]] > least:
            counts[r] += 1
            budget -= 1
    for r in range(len(first)):  # of equals, those of the first rows
        while budget > 0 and counts[r] < available[r] and value[r, counts[r]] == least:
            counts[r] += 1
            budget -= 1
    return counts


def two_phase(
    trees: CandidateTrees,
    f: FloatArray,
    need: FloatArray,
    depth: int,
    budget: int,
    n_max: int | None,
    cap: IntArray | None = None,
) -> Selection:
    """AdaServe's selection (Algorithm 2 lines 9-23). ``budget`` is B, roots included (line 7)."""
    if not trees.n_nodes:
        return Selection.nothing(trees.n_rows)
    nodes = budget - trees.n_rows
    ranked = rank(trees, f, cap)
    first = slo_counts(ranked, need, depth + 1.0, n_max, nodes)
    counts = best_counts(ranked, first, nodes - int(first.sum()))
    return take_prefix(ranked, counts, first, trees.n_nodes)


def best_anywhere(
    trees: CandidateTrees, f: FloatArray, budget: int, cap: IntArray | None = None
) -> Selection:
    """The throughput phase alone: what ``two_phase`` selects if no request is behind."""
    if not trees.n_nodes:
        return Selection.nothing(trees.n_rows)
    ranked = rank(trees, f, cap)
    nobody = np.zeros(trees.n_rows, np.int64)
    counts = best_counts(ranked, nobody, budget - trees.n_rows)
    return take_prefix(ranked, counts, nobody, trees.n_nodes)


def everything(trees: CandidateTrees, cap: IntArray | None, f: FloatArray | None = None) -> Selection:
    """All candidates that are not deeper than their row's ``cap`` [n], including those with probability 0.
    ``f`` [m]: how probable each is; None = as the draft says."""
    f = path_probability(trees) if f is None else f
    row, n = trees.row, trees.n_rows
    keep = np.ones(trees.n_nodes, np.bool_) if cap is None else trees.depth <= cap[row]
    counts, expected = np.bincount(row[keep], minlength=n), np.ones(n)
    expected += np.bincount(row, within_cap(trees, f, cap), n)
    return Selection(keep, counts, np.zeros_like(counts), expected)


def equal_share(trees: CandidateTrees, f: FloatArray, budget: int, cap: IntArray | None = None) -> Selection:
    """EqualGreedy (AdaServe v1 ablation): every row keeps its best floor(B / n) - 1 nodes."""
    ranked = rank(trees, f, cap)
    n = trees.n_rows
    counts = np.minimum(ranked.available, max(0, budget // n - 1))
    return take_prefix(ranked, counts, np.zeros(n, np.int64), trees.n_nodes)


def parent_kept(trees: CandidateTrees, keep: BoolArray) -> BoolArray:
    """Whether every node's parent is the root or in ``keep``, [m]: what makes a kept set a tree."""
    kept: BoolArray = np.append(keep, True)[trees.above]
    return kept
