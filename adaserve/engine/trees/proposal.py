"""What sources propose for the requests of an iteration, and how several proposals become one tree each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from adaserve.scheduler.compiled import FLOATS, INT_TABLE, INTS, compiled, several
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
    draft_columns: Mapping[int, np.ndarray] = field(default_factory=dict)
    """By number of the draft model, int64 [m]: the column at which its own KV pool has the node; 0 = it did
    not make it."""

    @staticmethod
    def nothing(n: int) -> Proposal:
        return Proposal(CandidateTrees.empty(n), np.zeros(0, np.int64), 1)


@dataclass(frozen=True, slots=True)
class Unread:
    """A proposal that a device has, and the host has not read."""

    outline: Proposal  # what it will be, but for tokens, parents and probabilities
    found: Tensor  # int64 [3, R, nodes], ``Levels.found``
    of: np.ndarray  # int64 [n]: row of each request there; -1 = it has no candidates
    columns: np.ndarray  # int64 [nodes]: of the window, the same in all rows


def merge(proposals: Sequence[Proposal], n: int) -> Proposal:
    """One tree per row: nodes with the same path are one, with the larger of their probabilities and the
    bits of all their sources. They stand by depth, and within a depth those of the first tree come first.

    A node keeps the column of the first proposal that has a tree for its row. The nodes that later proposals
    add get the columns after it. What a draft model has of a node stays where that model put it.
    """
    some = [p for p in proposals if p.trees.n_nodes]
    if not some:
        return Proposal.nothing(n)
    if len(some) == 1:
        return some[0]
    trees = [p.trees for p in some]
    ends = np.cumsum([0, *(t.n_nodes for t in trees)])
    lists = [
        (t.token, t.parent, t.depth, p.column, t.logprob, t.sources) for p, t in zip(some, trees, strict=True)
    ]
    starts, made, logprob, source, place = _merged(
        np.stack([t.row_start for t in trees]) + ends[:-1, None],
        np.array([p.width for p in some]),
        tuple(np.concatenate(values) for values in zip(*lists, strict=True)),
    )
    token, parent, depth, column = made
    draft_columns: dict[int, np.ndarray] = {}
    for p, begin, end in zip(some, ends[:-1], ends[1:], strict=True):
        for model, there in p.draft_columns.items():
            draft_columns.setdefault(model, np.zeros(len(token), np.int64))[place[begin:end]] = there
    joined = CandidateTrees(starts, token, parent, depth, logprob, source)
    return Proposal(joined, column, 1 + int(column.max()), draft_columns)


@compiled(INT_TABLE, INTS, several(INTS, INTS, INTS, INTS, FLOATS, INTS))
def _merged(
    row_start: np.ndarray, width: np.ndarray, nodes: tuple[np.ndarray, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """``nodes``: of all proposals, one behind the other: token, parent, depth, column, log-probability and
    sources. ``row_start`` [k, n + 1]: where the rows of each proposal begin there. ``width`` [k].

    Returns where rows begin; token, parent, depth and column [4, m]; log-probabilities and sources [m]; and
    where each of ``nodes`` has gone."""
    token, parent, depth, column, logprob, source = nodes
    n, most = row_start.shape[1] - 1, len(token)
    starts, place, to = np.zeros(n + 1, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
    raw, made = np.empty((4, most), np.int64), np.empty((4, most), np.int64)  # as they come; by depth
    best, bits = np.full(most, -np.inf), np.zeros(most, np.int64)
    for r in range(n):
        begin, count, free, deepest = starts[r], 0, 0, 0
        for k in range(len(width)):
            first, known = row_start[k, r], count
            free = free if known > 0 else width[k]  # of the first proposal that has a tree here
            for i in range(first, row_start[k, r + 1]):
                above = place[first + parent[i]] if parent[i] >= 0 else -1
                at = 0 if known > 0 else count
                while at < count and (raw[0, at] != token[i] or raw[1, at] != above):
                    at += 1
                if at == count:
                    raw[0, at], raw[1, at], raw[2, at] = token[i], above, depth[i]
                    raw[3, at] = free if known > 0 else column[i]
                    free += int(known > 0)
                    deepest = max(deepest, depth[i])
                    count += 1
                place[i] = at
        end = begin
        for level in range(1, deepest + 1):
            for at in range(count):
                if raw[2, at] == level:
                    to[at] = end
                    end += 1
        for at in range(count):
            j, up = to[at], raw[1, at]
            made[0, j], made[2, j], made[3, j] = raw[0, at], raw[2, at], raw[3, at]
            made[1, j] = to[up] - begin if up >= 0 else -1
        for k in range(len(width)):
            for i in range(row_start[k, r], row_start[k, r + 1]):
                j = to[place[i]]
                place[i] = j
                best[j] = np.maximum(best[j], logprob[i])
                bits[j] |= source[i]
        starts[r + 1] = end
    m = starts[n]
    return starts, made[:, :m], best[:m], bits[:m], place
