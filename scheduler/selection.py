"""Vectorised selection over flat candidate trees: AdaServe's Algorithm 2 steps 3-4, and its relatives.

Everything rests on one fact: a path probability never rises from parent to child. So the best m nodes
of a row are always a tree, and a selection is fully described by how long a prefix of each row's ranking
is kept. Ranking costs one integer sort: the bits of a positive float compare like the float, and the
node's position in the low bits breaks ties parent-first (traps 2 and 8 of the published pseudocode).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from adaserve.scheduler.arrays import all_true, any_true, largest, row_size, smallest
from adaserve.scheduler.interface import BoolArray, CandidateTrees, FloatArray, IntArray, Selection

INDEX_BITS = 20
INDEX_MASK = (1 << INDEX_BITS) - 1
"""32 bits of mantissa stay: probabilities closer than 2.3e-10 (relative) are ties."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """Candidates of every row, best first, padded with key 0 to the longest row."""

    key: IntArray  # [n, k]: bits of the value, node index below; falling along a row
    value: FloatArray  # [n, k]: path probability
    available: IntArray  # [n]: nodes with value > 0

    @property
    def index(self) -> IntArray:
        """Flat node index of every entry, [n, k]; meaningless where key is 0."""
        return INDEX_MASK - (self.key & INDEX_MASK)


@lru_cache(maxsize=256)
def _columns(k: int) -> IntArray:
    return np.arange(k)


@lru_cache(maxsize=256)
def _layout(n: int, k: int) -> tuple[IntArray, IntArray]:
    """For n rows of k nodes: falling low bits of the keys, and each node's row start; [n * k] both."""
    position = np.arange(n * k)
    return INDEX_MASK - position, position - position % k


def path_probability(trees: CandidateTrees) -> FloatArray:
    """exp(logprob), [m]. NaN counts as 0 (such a node is never kept), above 1 as 1."""
    f: FloatArray = np.exp(trees.logprob)
    if f.size and not largest(f) <= 1.0:  # also true for NaN
        f = np.minimum(np.nan_to_num(f, nan=0.0), 1.0)
    return f


def row_of(trees: CandidateTrees) -> IntArray:
    """Row of every node, [m]."""
    return np.repeat(np.arange(trees.n_rows), np.diff(trees.row_start))


def rank(trees: CandidateTrees, f: FloatArray, cap: IntArray | None = None) -> Ranked:
    """Sorts each row's candidates by ``f`` [m], descending, parents first among equals.

    ``cap`` [n]: nodes deeper than that are left out. A child whose ``f`` exceeds its parent's by
    rounding is pulled down to it.
    """
    n, m = trees.n_rows, trees.n_nodes
    assert m <= INDEX_MASK, f"{m} candidates exceed {INDEX_MASK}; lower the width"
    sizes = trees.row_start[1:] - trees.row_start[:-1]
    k = int(largest(sizes)) if n else 0
    if k == 0:
        return Ranked(np.zeros((n, 0), np.int64), np.zeros((n, 0)), np.zeros(n, np.int64))
    uniform = n * k == m
    low, start = (
        _layout(n, k) if uniform else (INDEX_MASK - np.arange(m), np.repeat(trees.row_start[:-1], sizes))
    )
    f = _never_rising(trees.parent, within_cap(trees, f, cap), start)
    key = (f.view(np.int64) & ~INDEX_MASK) | low
    if uniform:
        grid = key.reshape(n, k)
    else:
        grid = np.zeros((n, k), np.int64)
        grid[np.repeat(np.arange(n), sizes), np.arange(m) - start] = key
    grid = np.sort(grid, axis=1)[:, ::-1]
    value = (grid & ~INDEX_MASK).view(np.float64)
    if all_true(value[:, -1] > 0):  # the smallest of every row: nothing is padding or impossible
        return Ranked(grid, value, sizes)
    return Ranked(grid, value, np.count_nonzero(value, axis=1))


def within_cap(trees: CandidateTrees, f: FloatArray, cap: IntArray | None) -> FloatArray:
    """``f`` [m] with 0 for nodes deeper than their row's ``cap`` [n]."""
    if cap is None or smallest(cap) >= largest(trees.depth):
        return f
    deeper = trees.depth > np.repeat(cap, trees.row_start[1:] - trees.row_start[:-1])
    return np.where(deeper, 0.0, f)


def monotone(trees: CandidateTrees, f: FloatArray, per_row: int = 0) -> FloatArray:
    """``f`` [m] with every child pulled down to its parent's value."""
    if per_row:
        start = _layout(trees.n_rows, per_row)[1]
    else:
        start = np.repeat(trees.row_start[:-1], trees.row_start[1:] - trees.row_start[:-1])
    return _never_rising(trees.parent, f, start)


def best_nodes(value: FloatArray, threshold: float, count: int) -> BoolArray:
    """Mask of the ``count`` best of ``value`` [m], the last of them worth ``threshold``; of equals the first,
    so parents before children."""
    keep: BoolArray = value >= threshold
    surplus = np.count_nonzero(keep) - count
    if surplus:
        keep[np.flatnonzero(value == threshold)[-surplus:]] = False
    return keep


def keep_nodes(
    trees: CandidateTrees,
    keep: BoolArray,
    f: FloatArray,
    per_row: int,
    slo_counts: IntArray | None = None,
) -> Selection:
    """The selection of the mask ``keep`` [m]; without ``slo_counts`` chosen by throughput alone.

    ``per_row``: nodes of every row, 0 when they differ.
    """
    n = trees.n_rows
    if per_row:
        one = _ones(per_row)
        counts = keep.reshape(n, per_row).dot(one).astype(np.int64)
        expected = (f * keep).reshape(n, per_row).dot(one)
    else:
        row = row_of(trees)
        counts, expected = np.bincount(row[keep], minlength=n), np.bincount(row, f * keep, n)
    if slo_counts is None:
        slo_counts = np.zeros(n, np.int64)
    return Selection(keep, counts, slo_counts, expected + 1.0)


@lru_cache(maxsize=256)
def _ones(k: int) -> FloatArray:
    return np.ones(k)


def _never_rising(parent: IntArray, f: FloatArray, start: IntArray) -> FloatArray:
    """``f`` with every child at most its parent; ``parent`` inside the row, ``start`` of the row; [m]."""
    above = f.take(parent + start, mode="wrap")  # another row's node for children of a root
    rising = f > above
    rising &= parent >= 0
    if not any_true(rising):
        return f
    f = f.copy()
    for node in range(len(f)):  # rare: rounding or a broken drafter; parents come first, one pass is enough
        if parent[node] >= 0:
            f[node] = min(f[node], f[parent[node] + start[node]])
    return f


def count_true(mask: BoolArray) -> IntArray:
    """True entries per row, [n]; a matrix product is several times faster than a sum along axis 1."""
    counts: IntArray = (mask @ np.ones(mask.shape[1], np.float32)).astype(np.int64)
    return counts


def take_prefix(ranked: Ranked, counts: IntArray, slo_counts: IntArray, m: int) -> Selection:
    """Keeps the first ``counts[r]`` ranked nodes of every row."""
    chosen = _columns(ranked.value.shape[1]) < counts[:, None]
    keep = np.zeros(m, np.bool_)
    keep[INDEX_MASK - (ranked.key[chosen] & INDEX_MASK)] = True
    expected = 1.0 + np.einsum("nk,nk->n", ranked.value, chosen)
    return Selection(keep, counts, slo_counts, expected)


def slo_counts(ranked: Ranked, need: FloatArray, reach: float, n_max: int | None, budget: int) -> IntArray:
    """SLO phase (Algorithm 2 lines 9-17): nodes per row, neediest row first, ``budget`` nodes in all; [n].

    A row takes its best nodes until 1 + sum f >= A_cap = min(A, reach); ``reach`` = d + 1. The count is
    the smallest that gets there, cut by ``n_max`` (added nodes) and by what is left when it is its turn.
    """
    n, k = ranked.value.shape
    behind = (np.minimum(need, reach) > 1.0).nonzero()[0]  # only these rows take part: often few
    granted = np.zeros(n, np.int64)
    if k == 0 or budget <= 0 or not behind.size:
        return granted
    most = k if n_max is None else min(n_max, k)
    available = np.minimum(ranked.available[behind], most)
    granted[behind] = _grants(ranked.value[behind, :most], available, need[behind], reach, budget)
    return granted


def _grants(value: FloatArray, available: IntArray, need: FloatArray, reach: float, budget: int) -> IntArray:
    """``slo_counts`` of rows that are all behind; ``value`` [n, k] cut to n_max columns."""
    short = value.cumsum(axis=1) < (np.minimum(need, reach) - (1.0 + 1e-9))[:, None]
    wanted = short.dot(_ones(value.shape[1])).astype(np.int64)
    wanted += 1
    np.minimum(wanted, available, out=wanted)
    if int(np.add.reduce(wanted)) > budget:
        order = np.argsort(-need, kind="stable")
        mine = wanted[order]
        wanted[order] = np.minimum(mine, np.maximum(0, budget - (mine.cumsum() - mine)))
    return wanted


def best_counts(ranked: Ranked, first: IntArray, budget: int) -> IntArray:
    """Throughput phase (Algorithm 2 lines 18-22): ``first`` [n] plus the ``budget`` best leftovers anywhere.

    Returns kept nodes per row, [n].
    """
    if budget <= 0:
        return first
    if int(np.add.reduce(ranked.available - first)) <= budget:
        return ranked.available
    # More possible nodes are left than fit, so the threshold lies above all impossible ones.
    key = ranked.key * (_columns(ranked.key.shape[1]) >= first[:, None])
    flat = key.reshape(-1)
    threshold = np.partition(flat, flat.size - budget)[flat.size - budget]
    return first + count_true(key >= threshold)


def two_phase(
    trees: CandidateTrees,
    f: FloatArray,
    need: FloatArray,
    depth: int,
    budget: int,
    n_max: int | None,
    cap: IntArray | None = None,
    *,
    slo_phase: bool = True,
) -> Selection:
    """AdaServe's selection (Algorithm 2 lines 8-22). ``budget`` is B, roots included (line 1: B - n)."""
    nodes = budget - trees.n_rows
    k = row_size(trees)
    if k and trees.n_nodes <= INDEX_MASK:
        reach = depth + 1.0 if slo_phase else None
        f = monotone(trees, within_cap(trees, f, cap), k)
        return _two_phase_even(trees, f, need, reach, nodes, n_max, k)
    ranked = rank(trees, f, cap)
    first = np.zeros(trees.n_rows, np.int64)
    if slo_phase:
        first = slo_counts(ranked, need, depth + 1.0, n_max, nodes)
    counts = best_counts(ranked, first, nodes - int(np.add.reduce(first)))
    return take_prefix(ranked, counts, first, trees.n_nodes)


def _two_phase_even(
    trees: CandidateTrees,
    f: FloatArray,
    need: FloatArray,
    reach: float | None,
    nodes: int,
    n_max: int | None,
    k: int,
) -> Selection:
    """``two_phase`` for rows of ``k`` nodes each: nothing is sorted but the rows that are behind.

    ``f`` [m] never rises along a path; ``reach`` None = no SLO phase; ``nodes`` = B - n.
    """
    n, m = trees.n_rows, trees.n_nodes
    first = np.zeros(n, np.int64)
    if nodes <= 0:
        return keep_nodes(trees, np.zeros(m, np.bool_), f, k, first)
    key = (f.view(np.int64) & ~INDEX_MASK) | _layout(n, k)[0]
    keep = np.zeros(m, np.bool_)
    if reach is not None:
        behind = (need > 1.0).nonzero()[0]
        if behind.size:
            rows = key.reshape(n, k).take(behind, axis=0)
            best = np.sort(rows, axis=1)[:, ::-1]
            most = k if n_max is None else min(n_max, k)
            value = (best[:, :most] & ~INDEX_MASK).view(np.float64)
            if smallest(value[:, -1]) > 0:
                available = np.full(len(behind), most)
            else:
                available = np.count_nonzero(value, axis=1)
            granted = _grants(value, available, need.take(behind), reach, nodes)
            first[behind] = granted
            last = best[_columns(len(behind)), granted - 1]
            last[granted == 0] = _NOBODY
            keep.reshape(n, k)[behind] = rows >= last[:, None]
    left = nodes - int(np.add.reduce(first))
    if left > 0:
        possible = np.count_nonzero(f)
        if possible - (nodes - left) <= left:
            keep = f > 0
        else:
            key[keep] = 0
            keep |= key >= np.partition(key, m - left)[m - left]
    return keep_nodes(trees, keep, f, k, first)


_NOBODY = np.iinfo(np.int64).max
"""A key above all others."""


def equal_share(trees: CandidateTrees, f: FloatArray, budget: int, cap: IntArray | None = None) -> Selection:
    """EqualGreedy (AdaServe v1 ablation): every row keeps its best floor(B / n) - 1 nodes."""
    ranked = rank(trees, f, cap)
    n = trees.n_rows
    counts = np.minimum(ranked.available, max(0, budget // n - 1))
    return take_prefix(ranked, counts, np.zeros(n, np.int64), trees.n_nodes)


def parent_kept(trees: CandidateTrees, keep: BoolArray) -> BoolArray:
    """Whether every node's parent is the root or in ``keep``, [m]: what makes a kept set a tree."""
    start = np.repeat(trees.row_start[:-1], np.diff(trees.row_start))
    parent = np.where(trees.parent >= 0, trees.parent + start, -1)
    kept: BoolArray = np.append(keep, True)[parent]
    return kept
