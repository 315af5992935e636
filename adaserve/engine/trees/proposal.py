"""What sources propose for the requests of an iteration, and how several proposals become one tree each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adaserve.scheduler.interface import DRAFTED, CandidateTrees


@dataclass(frozen=True, slots=True)
class Proposal:
    """Candidate trees of all rows, and where the KV of their nodes goes.

    A request's window is the ``width`` KV slots from place ``L`` on, L its cached tokens: column 0 holds the
    root. When the likeliest path stands at columns 1, 2, 3, ... and is accepted, nothing has to move.
    """

    trees: CandidateTrees
    column: np.ndarray  # int64 [m]: window column of each node, 1 or more, unique within its row
    width: int  # columns of the window

    @staticmethod
    def nothing(n: int) -> Proposal:
        return Proposal(CandidateTrees.empty(n), np.zeros(0, np.int64), 1)


def merge(proposals: Sequence[Proposal], n: int) -> Proposal:
    """One tree per row: nodes with the same path are one, with the larger of their probabilities and the
    bits of all their sources.

    A node keeps the column of the first proposal that has a tree for its row, since that source's KV lies
    there. The nodes that later proposals add get columns behind it.
    """
    some = [p for p in proposals if p.trees.n_nodes]
    if not some:
        return Proposal.nothing(n)
    if len(some) == 1:
        return some[0]
    lists = [(p.trees.row_start.tolist(), _Nodes.of(p), p.width) for p in some]
    merged, starts = _Nodes([], [], [], [], [], []), [0]
    for r in range(n):
        trees = [(nodes.part(at[r], at[r + 1]), width) for at, nodes, width in lists if at[r] < at[r + 1]]
        if trees:
            merged.extend(trees[0][0] if len(trees) == 1 else _merge_row(trees))
        starts.append(len(merged.token))
    joined = CandidateTrees(
        row_start=np.array(starts),
        token=np.array(merged.token, np.int64),
        parent=np.array(merged.parent, np.int64),
        depth=np.array(merged.depth, np.int64),
        logprob=np.array(merged.logprob),
        source=np.array(merged.source, np.int64),
    )
    return Proposal(joined, np.array(merged.column, np.int64), 1 + max(merged.column))


@dataclass(slots=True)
class _Nodes:
    """Nodes in lists: a row has too few of them for arrays."""

    token: list[int]
    parent: list[int]
    depth: list[int]
    logprob: list[float]
    column: list[int]
    source: list[int]

    @staticmethod
    def of(proposal: Proposal) -> _Nodes:
        t = proposal.trees
        source = [DRAFTED] * t.n_nodes if t.source is None else t.source.tolist()
        values = (t.token, t.parent, t.depth, t.logprob, proposal.column)
        token, parent, depth, logprob, column = (v.tolist() for v in values)
        return _Nodes(token, parent, depth, logprob, column, source)

    def part(self, start: int, end: int) -> _Nodes:
        return _Nodes(*(values[start:end] for values in self.columns()))

    def columns(self) -> tuple[list[Any], ...]:
        return self.token, self.parent, self.depth, self.logprob, self.column, self.source

    def extend(self, other: _Nodes) -> None:
        for mine, more in zip(self.columns(), other.columns(), strict=True):
            mine.extend(more)


def _merge_row(trees: Sequence[tuple[_Nodes, int]]) -> _Nodes:
    """The row's nodes by depth, parents first; within a depth those of the first tree come first."""
    (nodes, free), *later = trees
    at = {key: i for i, key in enumerate(zip(nodes.parent, nodes.token, strict=True))}
    for tree, _ in later:
        merged: list[int] = []  # merged node of each of this tree's nodes
        for token, parent, depth, logprob, _, source in zip(*tree.columns(), strict=True):
            above = merged[parent] if parent >= 0 else -1
            i = at.get((above, token))
            if i is None:
                i = at[above, token] = len(nodes.token)
                nodes.extend(_Nodes([token], [above], [depth], [logprob], [free], [source]))
                free += 1
            else:
                nodes.logprob[i] = max(nodes.logprob[i], logprob)
                nodes.source[i] |= source
            merged.append(i)
    order = sorted(range(len(nodes.depth)), key=nodes.depth.__getitem__)
    place = {old: new for new, old in enumerate(order)} | {-1: -1}
    sorted_nodes = _Nodes(*([values[i] for i in order] for values in nodes.columns()))
    sorted_nodes.parent = [place[parent] for parent in sorted_nodes.parent]
    return sorted_nodes
