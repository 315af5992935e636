"""What sources propose for the requests of an iteration, and how several proposals become one tree each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adaserve.scheduler.interface import CandidateTrees


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
    """One tree per row: nodes with the same path are one, with the larger of their probabilities.

    A node keeps the column of the first proposal that has it, since that source's KV lies there. The nodes
    that later proposals add get columns behind it.
    """
    some = [p for p in proposals if p.trees.n_nodes]
    if not some:
        return Proposal.nothing(n)
    if len(some) == 1:
        return some[0]
    rows = [_merge_row(some, r) for r in range(n)]
    counts = np.array([len(row) for row in rows])
    flat = [node for row in rows for node in row]
    trees = CandidateTrees(
        row_start=np.concatenate([[0], np.cumsum(counts)]),
        token=np.array([node.token for node in flat], np.int64),
        parent=np.array([node.parent for node in flat], np.int64),
        depth=np.array([node.depth for node in flat], np.int64),
        logprob=np.array([node.logprob for node in flat]),
    )
    column = np.array([node.column for node in flat], np.int64)
    return Proposal(trees, column, 1 + int(column.max()))


@dataclass(slots=True)
class _Node:
    token: int
    parent: int
    depth: int
    logprob: float
    column: int


def _merge_row(proposals: Sequence[Proposal], r: int) -> list[_Node]:
    """The row's nodes by depth, parents first."""
    free = proposals[0].width
    nodes: list[_Node] = []
    at: dict[tuple[int, int], int] = {}  # (merged parent, token) -> merged node
    for k, proposal in enumerate(proposals):
        trees, start = proposal.trees, int(proposal.trees.row_start[r])
        merged: list[int] = []  # merged node of each of this proposal's nodes
        for i in range(start, int(trees.row_start[r + 1])):
            parent = int(trees.parent[i])
            above = merged[parent] if parent >= 0 else -1
            key = (above, int(trees.token[i]))
            if key in at:
                node = nodes[at[key]]
                node.logprob = max(node.logprob, float(trees.logprob[i]))
            else:
                column = int(proposal.column[i])
                if k > 0:
                    column, free = free, free + 1
                at[key] = len(nodes)
                nodes.append(_Node(key[1], above, int(trees.depth[i]), float(trees.logprob[i]), column))
            merged.append(at[key])
    order = sorted(range(len(nodes)), key=lambda i: nodes[i].depth)
    place = {old: new for new, old in enumerate(order)} | {-1: -1}
    for node in nodes:
        node.parent = place[node.parent]
    return [nodes[i] for i in order]
