"""Lossless verification of candidate trees of different size in one target forward.

Every kept node and the root get one draw from the target's own distribution (argmax when greedy). The walk
goes down while a kept child equals the draw, and the first draw that equals no child is the bonus token. The
trees are deterministic, so this is exact (SpecInfer's argument with a point mass as proposal); the ratio
rule with soft draft probabilities would be wrong here.

The verification is built on the host, where the trees were selected. On a CPU host the walk is a loop
(``accept_paths``). On a GPU one kernel walks after the draws (``gpu/accept_kernel.py``), and nothing waits
for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adaserve.engine.request_state import DecodeRows
from adaserve.engine.trees.batch import TreeBatch
from adaserve.engine.trees.proposal import Proposal
from adaserve.scheduler.compiled import BOOLS, INT, INTS, compiled, several
from adaserve.scheduler.interface import Selection

SCRATCH_SLOT = 0
"""SGLang's KV pools keep slot 0 free for what padded tokens write."""

NOTHING = -1
"""No token: no draw is equal to it."""


@dataclass(frozen=True, slots=True)
class VerifyBatch:
    """Each row's root, then its kept nodes, parents first: T tokens of n rows, in host arrays."""

    batch: TreeBatch
    tree: np.ndarray
    """int64 [4 + deepest, T]: tokens, depths (0 for roots), rows of the request pool, then each token's way
    up: its own index in this batch, its parent's, and so on. Roots are their own parents."""
    row: np.ndarray  # int64 [T]: row of each token
    root: np.ndarray  # int64 [n]: index of each row's root
    node: np.ndarray  # int64 [T - n]: candidate that stands at each non-root token, in token order
    made_by: Mapping[int, np.ndarray]  # bool [T]: nodes that each draft model made, by its number
    places: np.ndarray
    """int64 [2 + models, T]: where the tokens' KV belongs if they are accepted, which is at their positions;
    and where it is in the pools of the target and of the models in ``made_by``, there or later. What a pool
    does not have stands where it would be committed, so that nothing moves."""

    def __len__(self) -> int:
        return len(self.row)

    @property
    def tokens(self) -> np.ndarray:
        return self.tree[0]

    @property
    def depth(self) -> np.ndarray:
        return self.tree[1]

    @property
    def parent(self) -> np.ndarray:
        """int64 [T]: index of each token's parent."""
        return self.tree[min(4, len(self.tree) - 1)]

    @property
    def positions(self) -> np.ndarray:
        return self.places[0]

    @property
    def held_at(self) -> np.ndarray:
        """int64 [1 + models, T]: where the KV is."""
        return self.places[1:]

    @property
    def deepest(self) -> int:
        return len(self.tree) - 4

    @property
    def in_place(self) -> bool:
        """Whether all KV is where it belongs if it is accepted."""
        return bool((self.held_at == self.positions).all())

    @property
    def is_root(self) -> np.ndarray:
        return self.depth == 0

    @property
    def candidate(self) -> np.ndarray:
        """int64 [T]: the candidate at each token, -1 for roots."""
        out = np.full(len(self), -1, np.int64)
        out[~self.is_root] = self.node
        return out

    def arrays(self) -> dict[str, np.ndarray]:
        """What the walk needs on the device."""
        return {"tree": self.tree, "row": self.row, "root": self.root, "places": self.places}


def build(rows: DecodeRows, proposal: Proposal, selection: Selection) -> VerifyBatch:
    """What ``selection`` keeps of ``proposal``, with the roots."""
    trees, counts = proposal.trees, selection.counts
    tree, row, root, node, places, seen = _layout(
        (trees.row_start, trees.token, trees.parent, trees.depth, proposal.column, proposal.width),
        selection.keep,
        counts,
        (rows.root_tokens, rows.pool_rows, rows.seq_lens),
    )
    places, made_by = _with_drafts(proposal, places, rows.seq_lens, row, node, tree[1])
    width = proposal.width if len(node) else 1
    batch = TreeBatch(
        tree[0], places[0], places[1], rows.pool_rows, counts + 1, rows.seq_lens + width,
        seen if len(node) else None,
    )  # fmt: skip
    return VerifyBatch(batch, tree, row, root, node, made_by, places)


@compiled(several(INTS, INTS, INTS, INTS, INTS, INT), BOOLS, INTS, several(INTS, INTS, INTS))
def _layout(
    candidates: tuple[Any, ...], keep: np.ndarray, counts: np.ndarray, rows: tuple[Any, ...]
) -> tuple[np.ndarray, ...]:
    """``tree``, ``row``, ``root``, ``node``, the first two of ``places``, and bool [T, width]: which columns
    of its request's window each token sees."""
    row_start, token, parent, depth, column, width = candidates
    roots, pool_rows, seq_lens = rows
    n, deepest = len(roots), 0
    for i in range(len(keep)):
        if keep[i]:
            deepest = max(deepest, depth[i])
    count = n + counts.sum()
    tree, row = np.zeros((4 + deepest, count), np.int64), np.empty(count, np.int64)
    root, node = np.empty(n, np.int64), np.empty(count - n, np.int64)
    places, seen = np.empty((2, count), np.int64), np.zeros((count, width), np.bool_)
    stands_at = np.empty(len(keep), np.int64)  # where a candidate stands in this batch
    at = 0
    for r in range(n):
        # A root is above itself, and above all that hangs from it.
        root[r], row[at], tree[0, at], tree[2, at], tree[3:, at] = at, r, roots[r], pool_rows[r], at
        places[:, at], seen[at, 0] = seq_lens[r], True
        at += 1
        for i in range(row_start[r], row_start[r + 1]):
            if not keep[i]:
                continue
            up = stands_at[row_start[r] + parent[i]] if parent[i] >= 0 else root[r]
            stands_at[i], node[at - r - 1], row[at] = at, i, r
            tree[0, at], tree[1, at], tree[2, at], tree[3, at] = token[i], depth[i], pool_rows[r], at
            for level in range(4, 4 + deepest):
                tree[level, at] = tree[level - 1, up]
            places[0, at], places[1, at] = seq_lens[r] + depth[i], seq_lens[r] + column[i]
            seen[at] = seen[up]
            seen[at, column[i]] = True
            at += 1
    return tree, row, root, node, places, seen


def _with_drafts(
    proposal: Proposal,
    places: np.ndarray,
    seq_lens: np.ndarray,
    row: np.ndarray,
    node: np.ndarray,
    depth: np.ndarray,
) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """``VerifyBatch.places``, whose first two are ``places``, and ``made_by``."""
    of_models, made_by, is_node = [places], {}, depth > 0
    for number, there in proposal.draft_columns.items():
        if there is proposal.column:  # it made every node, so what the target writes it has at the same place
            of_models.append(places[1:])
            made_by[number] = is_node
            continue
        held, made, column = places[:1].copy(), is_node.copy(), there[node]
        made[is_node] = column > 0
        held[0, made] = (seq_lens[row[is_node]] + column)[column > 0]
        of_models.append(held)
        made_by[number] = made
    return (places if len(of_models) == 1 else np.concatenate(of_models)), made_by


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What a verification accepted, on the device of the draws."""

    accepted: Tensor  # bool [T]: roots and the nodes on the accepted path
    count: Tensor  # int64 [n]: accepted nodes, root not counted
    length: Tensor  # int64 [n]: emitted tokens, one more
    bonus: Tensor  # int64 [n]: the draw at the deepest accepted token, root of the next tree
    emitted: Tensor  # int64 [n, stride]: accepted tokens and the bonus, then zeros


Tensors = Mapping[str, Tensor]
"""``VerifyBatch.arrays`` on the device."""


def accept(t: Tensors, draws: Tensor, n: int, deepest: int, stride: int) -> Acceptance:
    """What the target's draws (int64 [T]) accept. ``deepest``: depth of the deepest token. In plain decoding
    there are only roots, and every draw is a bonus: then nothing is waited for, on any device."""
    if deepest:
        return accept_paths(t, draws, n, stride)
    emitted = torch.nn.functional.pad(draws[:, None], (0, stride - 1))
    one = torch.ones_like(draws)
    return Acceptance(one.bool(), torch.zeros_like(draws), one, draws, emitted)


def _place(t: Tensors, accepted: Tensor, stride: int) -> Tensor:
    """int64 [T]: a token's place, counted from the end, among ``2 * stride`` of its row. Accepted ones stand
    in the second half, by depth, and all others in the first. ``stride``: more than any depth."""
    return torch.add(t["tree"][1], accepted, alpha=-stride)


def accept_paths(t: Tensors, draws: Tensor, n: int, stride: int) -> Acceptance:
    """Walks every tree down along draws that the host has. Some twenty operators on a few tokens each would
    take a millisecond there, since their code is in no cache after a forward."""
    drawn, row = draws.tolist(), t["row"].tolist()
    tokens, depth, _, own, *above = t["tree"].tolist()
    parent = above[0] if above else own
    accepted, count, bonus = [False] * len(drawn), [0] * n, [0] * n
    emitted = np.zeros((n, stride), np.int64)
    for i, draw in enumerate(drawn):  # parents first
        r, deep = row[i], depth[i]
        if deep:
            if not accepted[parent[i]] or tokens[i] != drawn[parent[i]]:
                continue
            emitted[r, deep - 1] = tokens[i]
        accepted[i], count[r], bonus[r] = True, deep, draw
    emitted[np.arange(n), count] = bonus
    counts = np.array(count, np.int64)
    made = (np.array(accepted), counts, counts + 1, np.array(bonus, np.int64), emitted)
    return Acceptance(*map(torch.from_numpy, made))


def moves(
    t: Tensors, acceptance: Acceptance, req_to_token: Tensor, n: int, deepest: int
) -> tuple[Tensor, Tensor]:
    """Slots where committed tokens belong, int64 [n, deepest], and where each pool has the accepted nodes,
    int64 [1 + models, n, deepest], the target first, then in the order of ``VerifyBatch.made_by``.

    A row is a path from the root on, and no node of it was drafted where an earlier one belongs, since
    columns of the window are never smaller than depths. Entries that no node takes move the scratch slot
    onto itself.
    """
    room = deepest + 1
    slots = torch.full(
        (len(t["places"]), n, 2 * room), SCRATCH_SLOT, dtype=torch.int64, device=req_to_token.device
    )
    slots[:, t["row"], _place(t, acceptance.accepted, room)] = req_to_token[t["tree"][2], t["places"]].long()
    return slots[0, :, room + 1 :], slots[1:, :, room + 1 :]


def path_index(t: Tensors, acceptance: Acceptance, stride: int) -> Tensor:
    """int64 [n, stride]: the verified token that drew each emitted one; elsewhere the root's index."""
    index = t["root"][:, None].repeat(1, 2 * stride)
    place = _place(t, acceptance.accepted, stride)
    index[t["row"], place] = torch.arange(len(place), device=place.device)
    return index[:, stride:].contiguous()
