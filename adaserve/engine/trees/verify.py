"""Lossless verification of candidate trees of different size in one target forward.

Every kept node and the root get one draw from the target's own distribution (argmax when greedy);
the walk goes down while a kept child equals the draw, and the first draw that no child equals is
the bonus token. The trees are deterministic, so this is exact (SpecInfer's argument with a point
mass as proposal); the ratio rule with soft draft probabilities would be wrong here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from adaserve.engine.sources.beam import Draft
from adaserve.engine.state import DecodeRows
from adaserve.engine.trees.attention import causal_plan, gather_slots, tree_plan
from adaserve.engine.trees.plan import TreeAttentionPlan
from adaserve.scheduler.interface import Selection


@dataclass(frozen=True, slots=True)
class VerifyBatch:
    """Input of the target forward: each row's root, then its kept nodes, parents first."""

    tokens: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T]
    slots: torch.Tensor  # int64 [T]
    plan: TreeAttentionPlan
    row: np.ndarray  # int64 [T]: row of each token
    depth: np.ndarray  # int64 [T]: 0 for roots
    parent: np.ndarray  # int64 [T]: index of the parent in this batch; roots point at themselves
    root: np.ndarray  # int64 [n]: index of each row's root
    node: np.ndarray  # int64 [T - n]: candidate that stands at each non-root token, in token order
    column: np.ndarray  # int64 [T]: window column of each token

    @property
    def is_root(self) -> np.ndarray:
        return self.depth == 0


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What a verification accepted."""

    accepted: np.ndarray  # bool [T]: roots and the nodes on the accepted path
    count: np.ndarray  # int64 [n]: accepted nodes, root not counted
    last: np.ndarray  # int64 [n]: index in the batch of the deepest accepted token; its draw is the bonus


def build(rows: DecodeRows, draft: Draft | None, selection: Selection) -> VerifyBatch:
    if draft is None or not selection.keep.any():
        return _roots_only(rows)
    n, keep = len(rows), selection.keep
    node = np.flatnonzero(keep)
    counts = selection.counts
    q_lens = counts + 1
    root = np.concatenate([[0], np.cumsum(q_lens)[:-1]])
    row = np.repeat(np.arange(n), q_lens)
    is_node = np.ones(len(row), np.bool_)
    is_node[root] = False

    shape_node = node % draft.nodes_per_row  # position inside its row
    drafted = np.searchsorted(draft.rows, row[is_node])  # index of the row among those drafted for
    tokens = np.empty(len(row), np.int64)
    tokens[root], tokens[is_node] = rows.roots, draft.trees.token[node]
    depth = np.zeros(len(row), np.int64)
    depth[is_node] = draft.trees.depth[node]
    column = np.zeros(len(row), np.int64)
    column[is_node] = draft.shape.columns[shape_node]

    place = np.full(draft.trees.n_nodes, -1, np.int64)  # where a candidate stands in this batch
    place[node] = np.flatnonzero(is_node)
    parent = np.arange(len(row))
    parent_node = draft.trees.parent[node]
    base = node - shape_node
    parent[is_node] = np.where(parent_node < 0, root[row[is_node]], place[base + np.maximum(parent_node, 0)])

    kv_lens = rows.seq_lens + draft.shape.width
    kv_slots = gather_slots(rows.req_to_token, rows.pool_indices, np.zeros(n, np.int64), kv_lens)
    seen = np.zeros((len(row), draft.shape.width), np.bool_)
    seen[root, 0] = True
    seen[is_node] = draft.visible[drafted, shape_node]
    ends = np.cumsum(kv_lens)
    window_start = (ends - draft.shape.width)[row]
    slots = kv_slots[torch.from_numpy(window_start + column)]
    return VerifyBatch(
        tokens=tokens,
        positions=rows.seq_lens[row] + depth,
        slots=slots,
        plan=tree_plan(kv_slots, q_lens, kv_lens, seen),
        row=row,
        depth=depth,
        parent=parent,
        root=root,
        node=node,
        column=column,
    )


def _roots_only(rows: DecodeRows) -> VerifyBatch:
    n = len(rows)
    every = np.arange(n)
    zeros = np.zeros(n, np.int64)
    kv_lens = rows.seq_lens + 1
    kv_slots = gather_slots(rows.req_to_token, rows.pool_indices, zeros, kv_lens)
    slots = kv_slots[torch.from_numpy(np.cumsum(kv_lens) - 1)]
    plan = causal_plan(kv_slots, np.ones(n, np.int64), kv_lens)
    return VerifyBatch(rows.roots, rows.seq_lens, slots, plan, every, zeros, every, every, zeros[:0], zeros)


def accept(batch: VerifyBatch, draws: np.ndarray) -> Acceptance:
    """Walks every tree along the target's draws (int64 [T])."""
    accepted = batch.is_root
    hit = batch.tokens == draws[batch.parent]
    for depth in range(1, int(batch.depth.max()) + 1):
        level = np.flatnonzero(batch.depth == depth)
        accepted[level] = hit[level] & accepted[batch.parent[level]]
    count = np.bincount(batch.row[accepted], minlength=len(batch.root)) - 1
    # Accepted tokens of a row stand in depth order, so the deepest is the last of its row.
    last = np.flatnonzero(accepted)[np.cumsum(count + 1) - 1]
    return Acceptance(accepted, count, last)
