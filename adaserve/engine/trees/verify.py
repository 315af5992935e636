"""Lossless verification of candidate trees of different size in one target forward.

Every kept node and the root get one draw from the target's own distribution (argmax when greedy). The walk
goes down while a kept child equals the draw, and the first draw that equals no child is the bonus token. The
trees are deterministic, so this is exact (SpecInfer's argument with a point mass as proposal); the ratio
rule with soft draft probabilities would be wrong here.

What is verified is built on the host, where the trees were selected. The walk runs on the device of the
draws, without waiting for it (``accept``); where the draws are on the host already, it is a loop (``walk``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from adaserve.engine.state import DecodeRows
from adaserve.engine.trees.batch import TreeBatch
from adaserve.engine.trees.proposal import Proposal
from adaserve.scheduler.interface import Selection

SCRATCH_SLOT = 0
"""SGLang's KV pools keep slot 0 free for what padded tokens write."""


@dataclass(frozen=True, slots=True)
class VerifyBatch:
    """Each row's root, then its kept nodes, parents first: T tokens of n rows, in host arrays."""

    batch: TreeBatch
    row: np.ndarray  # int64 [T]: row of each token
    depth: np.ndarray  # int64 [T]: 0 for roots
    parent: np.ndarray  # int64 [T]: index of the parent in this batch; roots point at themselves
    root: np.ndarray  # int64 [n]: index of each row's root
    node: np.ndarray  # int64 [T - n]: candidate that stands at each non-root token, in token order
    column: np.ndarray  # int64 [T]: window column of each token, 0 for roots
    drafted: Mapping[int, np.ndarray]  # bool [T]: nodes that each draft model made, by its number
    held_at: np.ndarray
    """int64 [1 + models, T]: places of the tokens' KV in the pools of the target and of the models in
    ``drafted``, at ``positions`` or later. What a pool does not have stands where it would be committed, so
    that nothing moves."""

    def __len__(self) -> int:
        return len(self.row)

    @property
    def tokens(self) -> np.ndarray:
        return self.batch.tokens

    @property
    def positions(self) -> np.ndarray:
        return self.batch.positions

    @property
    def deepest(self) -> int:
        return int(self.depth.max())

    @property
    def in_place(self) -> bool:
        """Whether all KV is where it belongs if it is accepted."""
        return bool((self.held_at == self.positions).all())

    @property
    def is_root(self) -> np.ndarray:
        return self.depth == 0

    @property
    def candidate(self) -> np.ndarray:
        """int64 [T]: candidate that stands at each token, -1 for roots."""
        out = np.full(len(self), -1, np.int64)
        out[~self.is_root] = self.node
        return out

    def arrays(self) -> dict[str, np.ndarray]:
        """What the walk needs on the device."""
        b = self.batch
        return {
            "tokens": b.tokens,
            "positions": b.positions,
            "pool_row": b.pool_rows[self.row],
            "row": self.row,
            "depth": self.depth,
            "parent": self.parent,
            "root": self.root,
            "held_at": self.held_at,
        }


def build(rows: DecodeRows, proposal: Proposal, selection: Selection) -> VerifyBatch:
    """What ``selection`` keeps of ``proposal``, with the roots."""
    trees, n = proposal.trees, len(rows)
    node = np.flatnonzero(selection.keep)
    q_lens = selection.counts + 1
    root = q_lens.cumsum() - q_lens
    row = np.arange(n).repeat(q_lens)
    of = trees.row[node]
    at = np.arange(1, 1 + len(node)) + of  # behind the roots of the rows up to its own

    stands_at = np.zeros(trees.n_nodes + 1, np.int64)  # where a candidate stands in this batch
    stands_at[node] = at
    above = trees.above[node]
    parent = np.where(above < trees.n_nodes, stands_at[above], root[of])
    drafted = [there[node] for there in proposal.drafted.values()]
    values = np.zeros((4 + len(drafted), len(row)), np.int64)
    values[0, root], values[1, root] = rows.roots, root
    values[:, at] = trees.token[node], parent, trees.depth[node], proposal.column[node], *drafted
    tokens, parent, depth, column, *own = values
    held = [column, *(np.where(there > 0, there, depth) for there in own)]
    width = proposal.width if len(node) else 1
    limit = rows.seq_lens[row]
    batch = TreeBatch(
        tokens=tokens,
        positions=limit + depth,
        places=limit + column,
        pool_rows=rows.pool_rows,
        q_lens=q_lens,
        kv_lens=rows.seq_lens + width,
        seen=_lineage(int(depth.max()), parent, column, width) if len(node) else None,
    )
    made = {model: there > 0 for model, there in zip(proposal.drafted, own, strict=True)}
    return VerifyBatch(batch, row, depth, parent, root, node, column, made, limit + np.stack(held))


def _lineage(deepest: int, parent: np.ndarray, column: np.ndarray, width: int) -> np.ndarray:
    """bool [T, width]: each token sees its own column and those of its ancestors, the root included."""
    seen = column[:, None] == np.arange(width)
    for _ in range(deepest.bit_length()):  # each round sees twice as many levels
        seen |= seen[parent]
        parent = parent[parent]
    return seen


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
    """Walks every tree down along the target's draws (int64 [T]). ``deepest``: depth of the deepest token."""
    if not deepest:  # plain decoding: there are only roots, and every draw is a bonus
        emitted = torch.nn.functional.pad(draws[:, None], (0, stride - 1))
        one = torch.ones_like(draws)
        return Acceptance(one.bool(), torch.zeros_like(draws), one, draws, emitted)
    depth, parent, row, tokens = t["depth"], t["parent"], t["row"], t["tokens"]
    is_node = depth > 0
    # Every round a token learns of one ancestor more. The last one is the root, which is always accepted.
    accepted = (tokens == draws[parent]) | ~is_node
    for _ in range(deepest - 1):
        accepted = accepted & accepted[parent]
    length = torch.zeros(n, dtype=torch.int64, device=draws.device).index_add_(0, row, accepted.long())
    count = length - 1
    # Accepted tokens of a row stand in depth order, so the deepest is as far after the root as it is deep
    # among the accepted: the largest index of them.
    index = torch.where(accepted, torch.arange(len(tokens), device=draws.device), -1)
    last = torch.full((n,), -1, device=draws.device).scatter_reduce(0, row, index, "amax")
    bonus = draws[last]
    # One column more takes what is not emitted.
    emitted = torch.zeros(n, stride + 1, dtype=torch.int64, device=draws.device)
    emitted[row, torch.where(accepted & is_node, depth - 1, stride)] = tokens
    emitted = emitted[:, :stride].contiguous().scatter_(1, count[:, None], bonus[:, None])
    return Acceptance(accepted, count, length, bonus, emitted)


def walk(t: Tensors, draws: Tensor, n: int, stride: int) -> Acceptance:
    """The same where nothing is launched or waited for. Some twenty operators on a few tokens each would take
    a millisecond on a host, since their code is in no cache after a forward."""
    drawn, tokens, parent, depth, row = (
        x.tolist() for x in (draws, t["tokens"], t["parent"], t["depth"], t["row"])
    )
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
    int64 [1 + models, n, deepest], the target first, then in the order of ``VerifyBatch.drafted``.

    A row is a path from the root on, and no node of it was drafted where an earlier one belongs, since
    columns of the window are never smaller than depths. Entries that no node takes move the scratch slot
    onto itself.
    """
    depth, row = t["depth"], t["row"]
    taken = torch.where(acceptance.accepted & (depth > 0), depth - 1, deepest)
    places = torch.cat([t["positions"][None], t["held_at"]])
    slots = torch.full((len(places), n, deepest + 1), SCRATCH_SLOT, dtype=torch.int64, device=depth.device)
    slots[:, row, taken] = req_to_token[t["pool_row"], places].long()
    return slots[0, :, :deepest], slots[1:, :, :deepest]


def path_index(t: Tensors, acceptance: Acceptance, stride: int) -> Tensor:
    """int64 [n, stride]: the verified token that drew each emitted one; elsewhere the root's index."""
    index = t["root"][:, None].repeat(1, stride + 1)
    column = torch.where(acceptance.accepted, t["depth"], stride)
    index[t["row"], column] = torch.arange(len(column), device=column.device)
    return index[:, :stride].contiguous()
