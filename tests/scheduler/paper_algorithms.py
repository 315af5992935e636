"""The paper's algorithms, literally and slowly: what the fast code is tested against.

Corrections made to the published pseudocode of AdaServe (both versions; lines are those of the EuroSys
version, here and elsewhere), each needed for the text and Figure 5 to hold:

1. Algorithm 2 line 15 adds the one-step probability q(v | parent path) to n_acc. The path
   probability f(v) (product along the path) is added here.
2. ``while B >= 0`` (Algorithm 1 phase 2, Algorithm 2 both phases) spends B + 1 tokens: ``B > 0`` here.
3. Algorithm 1 never charges the n roots although sum |T_i| <= B counts them; both charge them here
   (Algorithm 2 line 7).
4. The sort has no direction: neediest first, by the uncapped A(r); allocation stops at A_cap.
5. n_max is tested against |T| (root included) in the pseudocode; here it bounds added nodes.
6. GetTop on a used-up candidate tree ends the row's loop.
7. Ties are broken by depth, so that a child of probability 1 never precedes its parent.
8. Figure 5 counts accepted tokens from 0: its targets 0.6 and 0.8 are needs beyond the guaranteed
   token. Here n_acc starts at 1 (the root), so they read A = 1.6 and 1.8.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from adaserve.scheduler.interface import CandidateTrees


@dataclass(frozen=True, slots=True)
class Node:
    """A candidate of one row: ``path`` probability f, and where it hangs."""

    index: int  # inside the row; parents first
    parent: int  # -1 = child of the root
    depth: int
    f: float


Row = list[Node]


def rows_of(trees: CandidateTrees, f: Sequence[float] | np.ndarray | None = None) -> list[Row]:
    """Flat trees as lists of nodes. ``f`` [m] defaults to exp(logprob)."""
    values = np.exp(trees.logprob) if f is None else np.asarray(f)
    rows = []
    for r in range(trees.n_rows):
        lo, hi = int(trees.row_start[r]), int(trees.row_start[r + 1])
        rows.append(
            [Node(i - lo, int(trees.parent[i]), int(trees.depth[i]), float(values[i])) for i in range(lo, hi)]
        )
    return rows


def _best_first(row: Row) -> list[Node]:
    # f never rises along a path, so this order takes parents before children (correction 7).
    return sorted(row, key=lambda v: (-v.f, v.depth, v.index))


@dataclass(frozen=True, slots=True)
class Tree:
    """A chosen set: node indices per row; ``value`` = expected accepted tokens, roots included."""

    kept: tuple[frozenset[int], ...]
    value: float


def algorithm_1(rows: list[Row], need: Sequence[float], B: int) -> Tree | None:
    """Oracle construction (AdaServe section 4.1, Algorithm 1); None is the paper's INVALID.

    ``need`` is A(r), counted with n_acc = 1 for the root. Every request is brought to its need with its
    best nodes, then the rest of B goes to the globally best nodes. Optimal among all selections that
    meet every need (section 4.1), as long as f never rises along a path.
    """
    left = B - len(rows)
    if left < 0:
        return None
    queues = [_best_first(row) for row in rows]
    kept: list[set[int]] = [set() for _ in rows]
    n_acc = [1.0] * len(rows)
    for r, queue in enumerate(queues):
        while n_acc[r] < need[r] - 1e-12:
            if left == 0 or not queue:
                return None
            node = queue.pop(0)
            kept[r].add(node.index)
            n_acc[r] += node.f
            left -= 1
    _throughput_phase(queues, kept, left)
    return Tree(tuple(frozenset(k) for k in kept), expected_tokens(rows, kept))


def algorithm_2(
    rows: list[Row], need: Sequence[float], B: int, d: int, n_max: int | None = None, slo_phase: bool = True
) -> Tree:
    """Deployable selection (AdaServe section 4.3, Algorithm 2 lines 4-7 and 9-23) over candidate trees."""
    left = B - len(rows)
    queues = [_best_first(row) for row in rows]
    kept: list[set[int]] = [set() for _ in rows]
    if slo_phase:
        for r in sorted(range(len(rows)), key=lambda r: -need[r]):
            cap = min(need[r], d + 1)
            n_acc, added = 1.0, 0
            while n_acc < cap - 1e-9 and left > 0 and queues[r] and (n_max is None or added < n_max):
                node = queues[r].pop(0)
                kept[r].add(node.index)
                n_acc, added, left = n_acc + node.f, added + 1, left - 1
    _throughput_phase(queues, kept, left)
    return Tree(tuple(frozenset(k) for k in kept), expected_tokens(rows, kept))


def _throughput_phase(queues: list[list[Node]], kept: list[set[int]], left: int) -> None:
    while left > 0:
        heads = [(-q[0].f, r) for r, q in enumerate(queues) if q]
        if not heads:
            return
        r = min(heads)[1]
        kept[r].add(queues[r].pop(0).index)
        left -= 1


def expected_tokens(rows: list[Row], kept: Sequence[set[int] | frozenset[int]]) -> float:
    """E[accepted] = sum of f over kept nodes; each root counts 1 (section 3)."""
    return len(rows) + sum(
        node.f for row, chosen in zip(rows, kept, strict=True) for node in row if node.index in chosen
    )


def subtrees(row: Row) -> Iterator[frozenset[int]]:
    """All sets of nodes of one row that form a tree with its root."""
    for bits in itertools.product((False, True), repeat=len(row)):
        chosen = frozenset(i for i, b in enumerate(bits) if b)
        if all(row[i].parent < 0 or row[i].parent in chosen for i in chosen):
            yield chosen


def brute_force(rows: list[Row], need: Sequence[float], B: int) -> Tree | None:
    """Best value over every combination of trees within B that meets every need; None if there is none."""
    best: Tree | None = None
    for combination in itertools.product(*(list(subtrees(row)) for row in rows)):
        if len(rows) + sum(map(len, combination)) > B:
            continue
        own = [expected_tokens([row], [chosen]) for row, chosen in zip(rows, combination, strict=True)]
        if any(got < want - 1e-12 for got, want in zip(own, need, strict=True)):
            continue
        if best is None or sum(own) > best.value:
            best = Tree(tuple(combination), sum(own))
    return best


Children = Callable[[tuple[int, ...]], Sequence[float]]
"""One-step probabilities of the tokens after a path: the oracle's infinite token tree."""


def beam(children: Children, width: int, depth: int) -> Row:
    """Beam search (Algorithm 2 line 8): the ``width`` best of each level by path probability."""
    row: Row = []
    frontier: list[tuple[tuple[int, ...], int, float]] = [((), -1, 1.0)]
    for level in range(1, depth + 1):
        grown = [
            ((*path, token), parent, f * p)
            for path, parent, f in frontier
            for token, p in enumerate(children(path))
            if p > 0
        ]
        grown.sort(key=lambda g: -g[2])
        frontier = []
        for path, parent, f in grown[:width]:
            row.append(Node(len(row), parent, level, f))
            frontier.append((path, row[-1].index, f))
    return row


def full_tree(children: Children, depth: int) -> Row:
    """Every path of up to ``depth`` tokens."""
    return beam(children, 1 << 30, depth)


def optimal_value(row: Row, nodes: int) -> float:
    """Value of the best tree of ``nodes`` nodes besides the root: the top f (never rising along paths)."""
    return 1.0 + math.fsum(sorted((v.f for v in row), reverse=True)[:nodes])


def beam_contains_optimum(children: Children, B: int, depth: int) -> bool:
    """Theorem 4.1, executable: a beam of width B and depth D_opt holds an optimal tree of B tokens.

    The B - 1 best nodes of the full tree have at most B - 1 on any level and the beam keeps the B best
    of each level, so the best tree inside the beam is worth as much as the best of the full tree.
    """
    inside = optimal_value(beam(children, B, depth), B - 1)
    return abs(inside - optimal_value(full_tree(children, depth), B - 1)) < 1e-12
