"""What sources propose for the requests of an iteration, and how several proposals become one tree each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from adaserve.scheduler.interface import MODEL, CandidateTrees


@dataclass(frozen=True, slots=True)
class Proposal:
    """Candidate trees of all rows, and where the KV of their nodes goes.

    A request's window is the ``width`` KV slots from place ``L`` on, L its cached tokens: column 0 holds the
    root. When the likeliest path stands at columns 1, 2, 3, ... and is accepted, nothing has to move.
    """

    trees: CandidateTrees
    column: np.ndarray  # int64 [m]: window column of each node, 1 or more, unique within its row
    width: int  # columns of the window
    drafted: Mapping[int, np.ndarray] = field(default_factory=dict)
    """By number of the draft model, int64 [m]: the column at which its own KV pool has the node; 0 = it did
    not make it."""

    @staticmethod
    def nothing(n: int) -> Proposal:
        return Proposal(CandidateTrees.empty(n), np.zeros(0, np.int64), 1)


def merge(proposals: Sequence[Proposal], n: int) -> Proposal:
    """One tree per row: nodes with the same path are one, with the larger of their probabilities and the
    bits of all their sources.

    A node keeps the column of the first proposal that has a tree for its row. The nodes that later proposals
    add get the columns after it. What a draft model has of a node stays where that model put it.
    """
    some = [p for p in proposals if p.trees.n_nodes]
    if not some:
        return Proposal.nothing(n)
    if len(some) == 1:
        return some[0]
    merged = _Nodes([], [], [], [])
    lists = [(p.trees.row_start.tolist(), _Nodes.of(p), p.width) for p in some]
    places: list[list[int]] = [[] for _ in some]  # merged node of each of a proposal's nodes
    starts = [0]
    for r in range(n):
        at = [k for k, (start, _, _) in enumerate(lists) if start[r] < start[r + 1]]
        trees = [lists[k][1].part(*lists[k][0][r : r + 2]) for k in at]
        if trees:
            nodes, row_places = _merge_row(trees, lists[at[0]][2])
            for k, row_place in zip(at, row_places, strict=True):
                places[k].extend(starts[-1] + i for i in row_place)
            merged.extend(nodes)
        starts.append(len(merged.token))
    return _joined(some, [np.array(p) for p in places], merged, starts)


def _joined(
    proposals: Sequence[Proposal], places: Sequence[np.ndarray], nodes: _Nodes, starts: list[int]
) -> Proposal:
    m = len(nodes.token)
    logprob, source = np.full(m, -np.inf), np.zeros(m, np.int64)
    drafted: dict[int, np.ndarray] = {}
    for proposal, at in zip(proposals, places, strict=True):
        trees = proposal.trees
        logprob[at] = np.maximum(logprob[at], trees.logprob)
        source[at] |= MODEL if trees.source is None else trees.source
        for model, column in proposal.drafted.items():
            there = drafted.setdefault(model, np.zeros(m, np.int64))
            there[at] = column
    token, parent, depth, column = (np.array(values, np.int64) for values in nodes.lists())
    joined = CandidateTrees(np.array(starts), token, parent, depth, logprob, source)
    return Proposal(joined, column, 1 + int(column.max()), drafted)


@dataclass(slots=True)
class _Nodes:
    """Nodes in lists: a row has too few of them for arrays."""

    token: list[int]
    parent: list[int]
    depth: list[int]
    column: list[int]

    @staticmethod
    def of(proposal: Proposal) -> _Nodes:
        t = proposal.trees
        return _Nodes(t.token.tolist(), t.parent.tolist(), t.depth.tolist(), proposal.column.tolist())

    def part(self, start: int, end: int) -> _Nodes:
        return _Nodes(*(values[start:end] for values in self.lists()))

    def lists(self) -> tuple[list[int], ...]:
        return self.token, self.parent, self.depth, self.column

    def extend(self, other: _Nodes) -> None:
        for mine, more in zip(self.lists(), other.lists(), strict=True):
            mine.extend(more)


def _merge_row(trees: Sequence[_Nodes], free: int) -> tuple[_Nodes, list[list[int]]]:
    """The row's nodes by depth, parents first; within a depth those of the first tree come first. Also where
    each tree's nodes have gone. ``free``: the first column that the first tree leaves."""
    nodes, *later = trees
    places = [list(range(len(nodes.token)))]
    if not later:
        return nodes, places
    at = {key: i for i, key in enumerate(zip(nodes.parent, nodes.token, strict=True))}
    for tree in later:
        merged: list[int] = []
        for token, parent, depth in zip(tree.token, tree.parent, tree.depth, strict=True):
            above = merged[parent] if parent >= 0 else -1
            i = at.get((above, token))
            if i is None:
                i = at[above, token] = len(nodes.token)
                nodes.extend(_Nodes([token], [above], [depth], [free]))
                free += 1
            merged.append(i)
        places.append(merged)
    order = sorted(range(len(nodes.depth)), key=nodes.depth.__getitem__)
    place = {old: new for new, old in enumerate(order)} | {-1: -1}
    sorted_nodes = _Nodes(*([values[i] for i in order] for values in nodes.lists()))
    sorted_nodes.parent = [place[parent] for parent in sorted_nodes.parent]
    return sorted_nodes, [[place[i] for i in into] for into in places]
