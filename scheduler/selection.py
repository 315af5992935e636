"""Vectorised selection over flat candidate trees: AdaServe's Algorithm 2 steps 3-4, and its relatives.

Everything rests on one fact: a path probability never rises from parent to child. So the best m nodes
of a row are always a tree, and a selection is fully described by how long a prefix of each row's ranking
is kept. Ranking costs one integer sort: the bits of a positive float compare like the float, and the
node's position in the low bits breaks ties parent-first (traps 2 and 8 of the published pseudocode).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from adaserve.scheduler.interface import BoolArray, CandidateTrees, FloatArray, IntArray, Selection

INDEX_BITS = 20
INDEX_MASK = (1 << INDEX_BITS) - 1
"""32 bits of mantissa stay: probabilities closer than 2.3e-10 (relative) are ties."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """Candidates of every row, best first, padded with value 0 to the longest row."""

    value: FloatArray  # [n, k]: path probability, never rising along a row
    index: IntArray  # [n, k]: flat node index; meaningless where value is 0
    available: IntArray  # [n]: nodes with value > 0


def path_probability(trees: CandidateTrees) -> FloatArray:
    """exp(logprob), [m]. NaN counts as 0 (such a node is never kept), above 1 as 1."""
    f = np.exp(np.minimum(trees.logprob, 0.0))
    if np.isnan(f.sum()):
        f = np.nan_to_num(f, nan=0.0)
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
    sizes = np.diff(trees.row_start)
    k = int(sizes.max(initial=0))
    if k == 0:
        return Ranked(np.zeros((n, 0)), np.zeros((n, 0), np.int64), np.zeros(n, np.int64))
    uniform = n * k == m
    if cap is not None and (cap < trees.depth.max()).any():
        deepest = np.repeat(cap, k) if uniform else np.repeat(cap, sizes)
        f = np.where(trees.depth > deepest, 0.0, f)
    f = _never_rising(trees, f, sizes)
    position = np.arange(m)
    key = (f.view(np.int64) & ~INDEX_MASK) | (INDEX_MASK - position)
    if uniform:
        grid = key.reshape(n, k)
    else:
        grid = np.zeros((n, k), np.int64)
        grid[np.repeat(np.arange(n), sizes), position - np.repeat(trees.row_start[:-1], sizes)] = key
    grid = np.sort(grid, axis=1)[:, ::-1]
    value = (grid & ~INDEX_MASK).view(np.float64)
    return Ranked(value, INDEX_MASK - (grid & INDEX_MASK), np.count_nonzero(value > 0, axis=1))


def _never_rising(trees: CandidateTrees, f: FloatArray, sizes: IntArray) -> FloatArray:
    start = np.repeat(trees.row_start[:-1], sizes)
    parent = np.where(trees.parent >= 0, trees.parent + start, -1)
    above = np.append(f, 1.0)[parent]  # -1 picks the root's probability
    if not (f > above).any():
        return f
    f = f.copy()
    for node in range(len(f)):  # rare: rounding or a broken drafter; parents come first, one pass is enough
        if parent[node] >= 0:
            f[node] = min(f[node], f[parent[node]])
    return f


def take_prefix(ranked: Ranked, counts: IntArray, slo_counts: IntArray, m: int) -> Selection:
    """Keeps the first ``counts[r]`` ranked nodes of every row."""
    chosen = np.arange(ranked.value.shape[1]) < counts[:, None]
    keep = np.zeros(m, np.bool_)
    keep[ranked.index[chosen]] = True
    expected = 1.0 + (ranked.value * chosen).sum(axis=1)
    return Selection(keep, counts.astype(np.int64), slo_counts.astype(np.int64), expected)


def slo_counts(ranked: Ranked, need: FloatArray, reach: float, n_max: int | None, budget: int) -> IntArray:
    """SLO phase (Algorithm 2 lines 9-17): nodes per row, neediest row first, ``budget`` nodes in all; [n].

    A row takes its best nodes until 1 + sum f >= A_cap = min(A, reach); ``reach`` = d + 1. The count is
    the smallest that gets there, cut by ``n_max`` (added nodes) and by what is left when it is its turn.
    """
    n, k = ranked.value.shape
    target = np.minimum(need, reach) - 1.0
    if k == 0 or budget <= 0 or not (target > 0).any():
        return np.zeros(n, np.int64)
    gathered = np.cumsum(ranked.value, axis=1)
    wanted = np.count_nonzero(gathered < target[:, None] - 1e-9, axis=1) + 1
    wanted = np.where(target > 0, np.minimum(wanted, ranked.available), 0)
    if n_max is not None:
        wanted = np.minimum(wanted, n_max)
    if wanted.sum() <= budget:
        return wanted
    order = np.argsort(-need, kind="stable")
    before = np.cumsum(wanted[order]) - wanted[order]
    granted = np.empty_like(wanted)
    granted[order] = np.clip(budget - before, 0, wanted[order])
    return granted


def best_counts(
    ranked: Ranked, first: IntArray, budget: int, weight: FloatArray | None = None
) -> IntArray:
    """Throughput phase (Algorithm 2 lines 18-22): grows ``first`` [n] by the ``budget`` globally best leftovers.

    ``weight`` [n] multiplies a row's probabilities. Returns kept nodes per row, [n].
    """
    left = int((ranked.available - first).sum())
    if budget <= 0 or left <= 0:
        return first
    if left <= budget:
        return ranked.available.astype(np.int64)
    key = leftover_keys(ranked, first, weight)
    flat = key.ravel()
    threshold = np.partition(flat, flat.size - budget)[flat.size - budget]
    return first + np.count_nonzero(key >= threshold, axis=1)


def leftover_keys(ranked: Ranked, first: IntArray, weight: FloatArray | None) -> IntArray:
    """Sortable unique keys of the nodes after each row's first ``first[r]``; 0 for all others; [n, k]."""
    n, k = ranked.value.shape
    value = ranked.value if weight is None else ranked.value * weight[:, None]
    position = np.arange(n * k).reshape(n, k)
    key = (value.view(np.int64) & ~INDEX_MASK) | (INDEX_MASK - position)
    open_nodes = (np.arange(k) >= first[:, None]) & (ranked.value > 0)
    return np.where(open_nodes, key, 0)


def two_phase(
    trees: CandidateTrees,
    f: FloatArray,
    need: FloatArray,
    depth: int,
    budget: int,
    n_max: int | None,
    cap: IntArray | None = None,
    slo_phase: bool = True,
) -> Selection:
    """AdaServe's selection (Algorithm 2 lines 8-22). ``budget`` is B, roots included (line 1: B - n)."""
    ranked = rank(trees, f, cap)
    nodes = budget - trees.n_rows
    first = np.zeros(trees.n_rows, np.int64)
    if slo_phase:
        first = slo_counts(ranked, need, depth + 1.0, n_max, nodes)
    counts = best_counts(ranked, first, nodes - int(first.sum()))
    return take_prefix(ranked, counts, first, trees.n_nodes)


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
    return np.append(keep, True)[parent]
