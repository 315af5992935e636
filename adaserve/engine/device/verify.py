"""Lossless verification on the device: ``adaserve.engine.trees.verify`` without host arrays of tokens.

The host knows how many nodes of each row are verified (the one copy of an iteration), hence every size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from adaserve.engine.device.attention import Extent
from adaserve.engine.device.drafter import DeviceDraft
from adaserve.engine.device.forward import DeviceForward, Key
from adaserve.engine.device.graphs import Tiers
from adaserve.engine.device.layout import SCRATCH_SLOT, MaskLayout, Ragged, gather_slots, to_device
from adaserve.engine.device.rows import DeviceRows


@dataclass(frozen=True, slots=True)
class DeviceVerify:
    """T tokens of n rows: each row's root, then its kept nodes, parents first."""

    tokens: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T]
    row: Tensor  # int64 [T]
    depth: Tensor  # int64 [T], 0 for roots
    parent: Tensor  # int64 [T]: index in this batch; roots point at themselves
    root: Tensor  # int64 [n]: index of each row's root
    node: Tensor  # int64 [T - n]: candidate at each non-root token, index into the flat grid [n * k]
    place: Tensor  # int64 [T - n]: index in this batch of each of them
    seen: Tensor  # bool [T, width]: window columns that a token sees
    limit: Tensor  # int64 [T]: cached tokens of its row
    q_lens: np.ndarray  # int64 [n]
    kv_lens: np.ndarray  # int64 [n]
    deepest: int

    @property
    def is_root(self) -> Tensor:
        return self.depth == 0


@dataclass(frozen=True, slots=True)
class DeviceAcceptance:
    """What a verification accepted, and what follows from it."""

    accepted: Tensor  # bool [T]: roots and the nodes on the accepted path
    count: Tensor  # int64 [n]: accepted nodes, root not counted
    bonus: Tensor  # int64 [n]: the draw at the deepest accepted token
    emitted: Tensor  # int64 [n, stride]: accepted tokens and the bonus, zeros behind


def build(
    rows: DeviceRows, draft: DeviceDraft | None, keep: Tensor | None, counts: np.ndarray
) -> DeviceVerify:
    """``keep`` bool [n, k] (None without a draft), ``counts`` int64 [n] = its row sums, known to the host."""
    n, device = len(rows), rows.lens.device
    kept = int(counts.sum())
    if draft is None or keep is None or not kept:
        return _roots_only(rows)
    q_lens = counts + 1
    pieces = Ragged(q_lens, device)
    row, root = pieces.row, pieces.starts_of
    k, width = keep.shape[1], draft.shape.width
    place_in_grid = torch.arange(n * k, device=device)
    node = torch.where(keep.flatten(), place_in_grid, n * k).sort().values[:kept]
    of, inside = torch.div(node, k, rounding_mode="floor"), node % k
    at = torch.arange(kept, device=device) + of + 1  # each row before has one root more
    drafted = to_device(_position_among(draft.active, n), device)[of]

    def spread(at_root: Tensor, at_node: Tensor) -> Tensor:
        out = torch.empty(n + kept, *at_root.shape[1:], dtype=at_root.dtype, device=device)
        return out.index_copy_(0, root, at_root).index_copy_(0, at, at_node)

    zeros = torch.zeros(n, dtype=torch.int64, device=device)
    depth = spread(zeros, draft.depths[inside])
    column = spread(zeros, draft.columns[inside])
    stands_at = torch.zeros(n * k, dtype=torch.int64, device=device).index_copy_(0, node, at)
    above = draft.parents[drafted, inside]
    parent = spread(root, torch.where(above < 0, root[of], stands_at[of * k + above.clamp(min=0)]))
    see_root = torch.zeros(n, width, dtype=torch.bool, device=device)
    see_root[:, 0] = True
    limit = rows.lens[row]
    return DeviceVerify(
        tokens=spread(rows.roots, draft.tokens[drafted, inside]),
        positions=limit + depth,
        slots=rows.req_to_token[rows.pool_rows[row], limit + column].long(),
        row=row,
        depth=depth,
        parent=parent,
        root=root,
        node=node,
        place=at,
        seen=spread(see_root, draft.visible[drafted, inside]),
        limit=limit,
        q_lens=q_lens,
        kv_lens=rows.seq_lens + width,
        deepest=draft.depth,
    )


def _position_among(active: np.ndarray, n: int) -> np.ndarray:
    """Place of every row among the drafted ones; 0 for the others, which have no kept nodes."""
    out = np.zeros(n, np.int64)
    out[active] = np.arange(len(active))
    return out


def _roots_only(rows: DeviceRows) -> DeviceVerify:
    n, device = len(rows), rows.lens.device
    every = torch.arange(n, device=device)
    return DeviceVerify(
        tokens=rows.roots,
        positions=rows.lens,
        slots=rows.req_to_token[rows.pool_rows, rows.lens].long(),
        row=every,
        depth=torch.zeros_like(every),
        parent=every,
        root=every,
        node=every[:0],
        place=every[:0],
        seen=torch.ones(n, 1, dtype=torch.bool, device=device),
        limit=rows.lens,
        q_lens=np.ones(n, np.int64),
        kv_lens=rows.seq_lens + 1,
        deepest=0,
    )


def verify_key(tokens: int, tiers: Tiers, most_rows: int) -> Key:
    """The padded size for ``tokens``: one request more than can be there holds the padding."""
    padded = tiers.fit(tokens)
    return Key(padded, min(padded, most_rows) + 1, "logits")


def forward(
    target: DeviceForward, rows: DeviceRows, v: DeviceVerify, tiers: Tiers, most_rows: int
) -> tuple[Tensor, Tensor]:
    """Runs the target: logits [T, vocab] and their argmax int64 [T], valid until the next forward."""
    count, n = len(v.tokens), len(rows)
    key = verify_key(count, tiers, most_rows)
    spare_rows, spare = key.rows - n, key.tokens - count
    q_lens = np.concatenate([v.q_lens, [spare], np.zeros(spare_rows - 1, np.int64)])
    kv_lens = np.concatenate([v.kv_lens, np.ones(spare_rows, np.int64)])
    target.set_tokens(v.tokens, v.positions, v.slots, key.tokens)
    target.buffers.set_slots(gather_slots(rows.req_to_token, rows.pool_rows, v.kv_lens), spare_rows)
    start = torch.cat([v.limit, v.limit.new_ones(spare)])
    layout = MaskLayout(q_lens, kv_lens, start, v.seen.shape[1])
    target.buffers.set_mask(layout, torch.nn.functional.pad(v.seen, (0, 0, 0, spare)))
    logits, best = target.run(key, Extent(q_lens, kv_lens), tiers.captured(key.tokens))
    return logits[:count], best[:count]


def accept(v: DeviceVerify, draws: Tensor, stride: int) -> DeviceAcceptance:
    """Walks every tree along the target's draws (int64 [T])."""
    n, count_tokens = len(v.root), len(v.tokens)
    device = draws.device
    accepted = v.is_root
    hit = v.tokens == draws[v.parent]
    for depth in range(1, v.deepest + 1):
        accepted = accepted | ((v.depth == depth) & hit & accepted[v.parent])
    count = torch.zeros(n, dtype=torch.int64, device=device).index_add_(0, v.row, accepted.long()) - 1
    # Accepted tokens of a row stand in depth order, so the deepest is the last of its row.
    index = torch.where(accepted, torch.arange(count_tokens, device=device), -1)
    last = torch.full((n,), -1, device=device).scatter_reduce(0, v.row, index, "amax")
    bonus = draws[last]
    # One column more takes what is not emitted.
    out = torch.zeros(n, stride + 1, dtype=torch.int64, device=device)
    column = torch.where(accepted & ~v.is_root, v.depth - 1, stride)
    out = out.index_put((v.row, column), v.tokens)
    emitted = out[:, :stride].contiguous().scatter_(1, count[:, None], bonus[:, None])
    return DeviceAcceptance(accepted, count, bonus, emitted)


def moves(
    rows: DeviceRows, v: DeviceVerify, acceptance: DeviceAcceptance, deepest: int
) -> tuple[Tensor, Tensor]:
    """(target, source) slots, int64 [n * deepest]: accepted nodes go where committed tokens belong.

    Places of the list that no node takes move the scratch slot onto itself.
    """
    n = len(rows)
    source = torch.full((n, deepest + 1), SCRATCH_SLOT, dtype=torch.int64, device=v.slots.device)
    taken = torch.where(acceptance.accepted & ~v.is_root, v.depth - 1, deepest)
    source = source.index_put((v.row, taken), v.slots)
    own = rows.req_to_token[rows.pool_rows[v.row], v.positions].long()
    target = torch.full_like(source, SCRATCH_SLOT).index_put((v.row, taken), own)
    return target[:, :deepest].flatten(), source[:, :deepest].flatten()


def path_index(v: DeviceVerify, acceptance: DeviceAcceptance, stride: int) -> Tensor:
    """int64 [n, stride]: verified token behind each emitted one; the root's index where there is none."""
    index = v.root[:, None].repeat(1, stride + 1)
    column = torch.where(acceptance.accepted, v.depth, stride)
    every = torch.arange(len(v.tokens), device=v.tokens.device)
    return index.index_put((v.row, column), every)[:, :stride].contiguous()


def remember(rows: DeviceRows, v: DeviceVerify, acceptance: DeviceAcceptance) -> None:
    """Writes the root and the accepted nodes into the history of cached tokens."""
    # Rejected tokens go where the root goes, with the root's token: the same write twice.
    kept = acceptance.accepted
    position = torch.where(kept, v.positions, v.limit)
    token = torch.where(kept, v.tokens, rows.roots[v.row]).int()
    rows.history.index_put_((rows.pool_rows[v.row], position), token)
