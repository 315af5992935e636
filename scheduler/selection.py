"""Vectorised selection over flat candidate trees: AdaServe's Algorithm 2 lines 9-23, and its relatives.

Everything rests on one fact: a path probability never rises from parent to child. So the best m nodes
of a row are always a tree, and a selection is fully described by how long a prefix of each row's ranking
is kept. Ranking costs one integer sort: the bits of a positive float compare like the float, and the
node's position in the low bits breaks ties parent-first (traps 2 and 8 of the published pseudocode).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from adaserve.scheduler.interface import BoolArray, CandidateTrees, FloatArray, IntArray, Selection

Values = TypeVar("Values", FloatArray, IntArray, BoolArray)

INDEX_BITS = 20
INDEX_MASK = (1 << INDEX_BITS) - 1
"""32 bits of mantissa stay: probabilities closer than 2.3e-10 (relative) are ties."""

ENOUGH = 1.0 + 1e-9
"""A need that the root alone meets, up to rounding."""


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
    n, m = trees.n_rows, trees.n_nodes
    assert m <= INDEX_MASK, f"{m} candidates exceed {INDEX_MASK}; lower the width"
    f = never_rising(trees, within_cap(trees, f, cap))
    node, row = np.arange(m), trees.row
    sizes = trees.row_start[1:] - trees.row_start[:-1]
    grid = np.zeros((n, int(sizes.max(initial=0))), np.int64)
    grid[row, node - trees.first] = (f.view(np.int64) & ~INDEX_MASK) | (INDEX_MASK - node)
    grid = np.sort(grid, axis=1)[:, ::-1]
    value = (grid & ~INDEX_MASK).view(np.float64)
    return Ranked(grid, value, np.count_nonzero(value, axis=1))


def take_prefix(ranked: Ranked, counts: IntArray, slo_counts: IntArray, m: int) -> Selection:
    """Keeps the first ``counts[r]`` ranked nodes of every row."""
    chosen = np.arange(ranked.value.shape[1]) < counts[:, None]
    keep = np.zeros(m, np.bool_)
    keep[INDEX_MASK - (ranked.key[chosen] & INDEX_MASK)] = True
    expected = 1.0 + (ranked.value * chosen).sum(axis=1)
    return Selection(keep, counts, slo_counts, expected)


def slo_counts(ranked: Ranked, need: FloatArray, reach: float, n_max: int | None, budget: int) -> IntArray:
    """SLO phase (Algorithm 2 lines 9-17): nodes per row, neediest row first, ``budget`` nodes in all; [n].

    A row takes its best nodes until 1 + sum f >= A_cap = min(A, reach); ``reach`` = d + 1. The count is
    the smallest that gets there, cut by ``n_max`` (added nodes) and by what is left when it is its turn.

    Who is neediest is sorted out here, and only when the budget is short: A(r) of every running request
    changes in every iteration, so a list kept in order between them would be sorted anew as well.
    """
    n, k = ranked.value.shape
    granted = np.zeros(n, np.int64)
    behind = (np.minimum(need, reach) > ENOUGH).nonzero()[0]  # only these rows take part: often few
    most = k if n_max is None else min(n_max, k)
    if not behind.size:
        return granted
    need = need[behind]
    short = ranked.value[behind, :most].cumsum(axis=1) < (np.minimum(need, reach) - ENOUGH)[:, None]
    available = np.minimum(ranked.available[behind], most)
    wanted = np.minimum(np.count_nonzero(short, axis=1) + 1, available)
    if int(wanted.sum()) > budget:
        order = np.argsort(-need, kind="stable")
        mine = wanted[order]
        wanted[order] = np.minimum(mine, np.maximum(0, budget - (mine.cumsum() - mine)))
    granted[behind] = wanted
    return granted


def best_counts(ranked: Ranked, first: IntArray, budget: int) -> IntArray:
    """Throughput phase (Algorithm 2 lines 18-23): ``first`` [n] plus the ``budget`` best leftovers anywhere.

    Returns kept nodes per row, [n].
    """
    if budget <= 0:
        return first
    if int((ranked.available - first).sum()) <= budget:
        return ranked.available
    # More possible nodes are left than fit, so the threshold lies above all impossible ones.
    key = ranked.key * (np.arange(ranked.key.shape[1]) >= first[:, None])
    threshold = np.partition(key, key.size - budget, axis=None)[key.size - budget]
    return first + np.count_nonzero(key >= threshold, axis=1)


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
    """The throughput phase alone: what ``two_phase`` selects where nobody is behind."""
    if not trees.n_nodes:
        return Selection.nothing(trees.n_rows)
    ranked = rank(trees, f, cap)
    nobody = np.zeros(trees.n_rows, np.int64)
    counts = best_counts(ranked, nobody, budget - trees.n_rows)
    return take_prefix(ranked, counts, nobody, trees.n_nodes)


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
