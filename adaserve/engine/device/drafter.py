"""Beam search of candidate trees on the device: no step waits for the host, and the host waits for none.

The same trees as ``adaserve.engine.sources.beam``. What differs: every tensor stays on the device; the first
step always feeds the last cached token besides the root, so that its size does not depend on what the last
verification accepted (writing a key twice writes the same); attention is one masked list of slots per
request that serves all steps and the verification.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from adaserve.engine.device.attention import Extent
from adaserve.engine.device.forward import DeviceForward, Head, Key
from adaserve.engine.device.graphs import Tiers
from adaserve.engine.device.layout import MaskLayout, Ragged, gather_slots, to_device
from adaserve.engine.device.rows import DeviceRows
from adaserve.engine.device.selection import TreeGrid
from adaserve.engine.sources.beam import ReadAt
from adaserve.engine.trees.shape import TreeShape, tree_shape
from adaserve.scheduler.interface import IterationPlan

FIRST = 2
"""Tokens per request in the first step: the last cached one and the root."""


@dataclass(frozen=True, slots=True)
class DeviceDraft:
    """Candidate trees of the rows that were drafted for; nodes stand in the shape's order."""

    shape: TreeShape
    active: np.ndarray  # int64 [a]: rows of the batch
    tokens: Tensor  # int64 [a, nodes]
    parents: Tensor  # int64 [a, nodes], -1 = child of the root
    logprobs: Tensor  # float64 [a, nodes]: of the path
    visible: Tensor  # bool [a, nodes, width]: window columns that a node sees, itself included
    columns: Tensor  # int64 [nodes]: window column of each node
    depths: Tensor  # int64 [nodes]

    @property
    def depth(self) -> int:
        return len(self.shape.beams)

    def grid(self, n: int) -> TreeGrid:
        """The trees of all n rows; rows that were not drafted for have none."""
        device, a, k = self.tokens.device, len(self.active), self.shape.nodes
        depth = self.depths.expand(n, k)
        if a == n:
            return TreeGrid(self.parents, depth, self.logprobs, self._sizes(n), self.depth)
        at = to_device(self.active, device)
        parent = torch.full((n, k), -1, device=device).index_copy(0, at, self.parents)
        logprob = torch.full((n, k), -torch.inf, dtype=torch.float64, device=device)
        return TreeGrid(parent, depth, logprob.index_copy(0, at, self.logprobs), self._sizes(n), self.depth)

    def _sizes(self, n: int) -> Tensor:
        sizes = np.zeros(n, np.int64)
        sizes[self.active] = self.shape.nodes
        return to_device(sizes, self.tokens.device)


def fit_shape(plan: IterationPlan, deepest: int, max_nodes: int) -> TreeShape | None:
    """The planned shape, cut to what rows and windows can hold; None when nothing can be drafted."""
    depth = min(plan.depth, deepest)
    while depth:
        branching = None if plan.branching is None else plan.branching[:depth]
        shape = tree_shape(depth, plan.width, branching)
        if shape.nodes <= max_nodes:
            return shape
        depth -= 1
    return None


class DeviceDrafter:
    """``read`` maps temperatures [a] to how the draft's logits are read (``DraftSharpening.reading``).

    ``max_nodes``: KV slots that a window has for candidates. ``most_tokens``: largest forward.
    """

    def __init__(
        self,
        forward: DeviceForward,
        read: ReadAt,
        max_nodes: int,
        tiers: Tiers,
        most_tokens: int,
    ) -> None:
        self.forward = forward
        self._read = read
        self._max_nodes = max_nodes
        self._tiers = tiers
        self._most_tokens = most_tokens

    def draft(self, plan: IterationPlan, rows: DeviceRows) -> DeviceDraft | None:
        """Queues all draft steps; None when no row may have a tree."""
        allowed = rows.running.max_depth
        active = np.flatnonzero(allowed > 0)
        shape = fit_shape(plan, int(allowed.max(initial=0)), self._max_nodes)
        if shape is None or not len(active):
            return None
        catch_up(self.forward, rows, active, self._tiers, self._most_tokens)
        reading = self._read(rows.running.temperature[active])
        search = _BeamSearch(self.forward, rows, active, shape, reading, self._tiers)
        search.first_step()
        for step in range(2, len(shape.beams) + 1):
            search.next_step(step)
        return search.result()


class _BeamSearch:
    """One beam search over a rows, padded to R; tensors are [a, beams, ...]."""

    def __init__(
        self,
        forward: DeviceForward,
        rows: DeviceRows,
        active: np.ndarray,
        shape: TreeShape,
        reading: tuple[np.ndarray, np.ndarray],
        tiers: Tiers,
    ) -> None:
        self.forward, self.shape, self.active = forward, shape, active
        self.device = device = forward.device
        self.a, self.padded = len(active), tiers.fit(len(active))
        self.captured = tiers.captured(self.padded)
        at = to_device(active, device)
        self.lens, self.roots, self.pool_rows = rows.lens[at], rows.roots[at], rows.pool_rows[at]
        self.rows = rows
        scale, spread = (v.astype(np.float32) for v in reading)
        self.noisy = bool((spread > 0).any())
        self.scale, self.spread = to_device(scale, device), to_device(spread, device)
        self.keys = to_device(rows.keys[active].view(np.int64), device)
        kv_lens = rows.seq_lens[active] + shape.width
        spare = self.padded - self.a
        self.kv_lens = np.concatenate([kv_lens, np.ones(spare, np.int64)])
        forward.buffers.set_slots(gather_slots(rows.req_to_token, self.pool_rows, kv_lens), spare)
        width = torch.arange(shape.width, device=device)
        self.window = rows.req_to_token[self.pool_rows[:, None], self.lens[:, None] + width].long()
        self.columns, self.depths = to_device(shape.columns, device), to_device(shape.depth, device)
        nodes = shape.nodes
        self.visible = torch.zeros(self.a, nodes, shape.width, dtype=torch.bool, device=device)
        self.tokens = torch.zeros(self.a, nodes, dtype=torch.int64, device=device)
        self.parents = torch.full((self.a, nodes), -1, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(self.a, nodes, dtype=torch.float64, device=device)
        self._layout: tuple[int, MaskLayout, Extent] | None = None

    def first_step(self) -> None:
        """Feeds the last cached token and the root; keeps the root's best children."""
        before = self.rows.history[self.pool_rows, self.lens - 1].long()
        last_slot = self.rows.req_to_token[self.pool_rows, self.lens - 1].long()
        tokens = torch.stack([before, self.roots], dim=1)
        positions = torch.stack([self.lens - 1, self.lens], dim=1)
        slots = torch.stack([last_slot, self.window[:, 0]], dim=1)
        seen = torch.zeros(self.a, FIRST, self.shape.width, dtype=torch.bool, device=self.device)
        seen[:, 1, 0] = True
        logprob, token = self._forward(tokens, positions, slots, seen, "last-candidates")
        beams = self.shape.beams[0]
        self.logprobs[:, :beams] = logprob[:, 0, :beams]
        self.tokens[:, :beams] = token[:, 0, :beams]
        self.visible[:, :beams, 0] = True
        self._see_themselves(slice(0, beams))

    def next_step(self, step: int) -> None:
        """Expands the beams of depth step - 1 into those of depth ``step``."""
        shape = self.shape
        before = slice(shape.start[step - 2], shape.start[step - 1])
        now = slice(shape.start[step - 1], shape.start[step])
        m, beams = before.stop - before.start, shape.beams[step - 1]
        positions = (self.lens + (step - 1))[:, None].expand(-1, m)
        slots = self.window[:, self.columns[before]]
        logprob, token = self._forward(
            self.tokens[:, before], positions, slots, self.visible[:, before], "candidates"
        )
        # A fixed branching gives every beam the same number of children; a beam search lets them compete.
        children = beams // m if shape.is_branching else min(beams, shape.beams[0])
        paths = (self.logprobs[:, before, None] + logprob[..., :children]).flatten(1)
        if shape.is_branching:
            best = torch.arange(m * children, device=self.device).expand(self.a, -1)
        else:
            paths, best = paths.topk(beams, dim=1)
        parent = torch.div(best, children, rounding_mode="floor") + before.start
        self.logprobs[:, now] = paths
        self.tokens[:, now] = token[..., :children].flatten(1).gather(1, best)
        self.parents[:, now] = parent
        width = self.visible.shape[2]
        self.visible[:, now] = self.visible.gather(1, parent[:, :, None].expand(-1, -1, width))
        self._see_themselves(now)

    def _see_themselves(self, nodes: slice) -> None:
        inside = torch.arange(nodes.start, nodes.stop, device=self.device)
        self.visible[:, inside, self.columns[nodes]] = True

    def _forward(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, seen: Tensor, head: Head
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities (float64) and ids of the best tokens, [a, beams (1 after the first step), K].

        Arguments are [a, q] and, for ``seen``, [a, q, width].
        """
        f, q = self.forward, tokens.shape[1]
        padded = self.padded * q
        f.set_tokens(tokens.flatten(), positions.flatten(), slots.flatten(), padded)
        f.inputs.scale[: self.a * q].copy_(self.scale.repeat_interleave(q))
        if self.noisy:
            f.inputs.spread[: self.a * q].copy_(self.spread.repeat_interleave(q))
            f.inputs.keys[: self.a * q].copy_(self.keys.repeat_interleave(q))
        first = self._layout is None or self._layout[0] != q
        if first:
            q_lens = np.full(self.padded, q, np.int64)
            spare = torch.ones((self.padded - self.a) * q, dtype=torch.int64, device=self.device)
            start = torch.cat([self.lens.repeat_interleave(q), spare])
            layout = MaskLayout(q_lens, self.kv_lens, start, self.shape.width)
            self._layout = (q, layout, Extent(q_lens, self.kv_lens))
        assert self._layout is not None
        _, layout, extent = self._layout
        visible = torch.nn.functional.pad(seen.flatten(0, 1), (0, 0, 0, (self.padded - self.a) * q))
        f.buffers.set_mask(layout, visible)
        key = Key(padded, self.padded, head, self.noisy)
        logprob, token = f.run(key, extent, self.captured, planned=not first)
        per_row = q if head == "candidates" else 1
        shape = (self.padded, per_row, -1)
        return logprob.double().view(shape)[: self.a], token.view(shape)[: self.a]

    def result(self) -> DeviceDraft:
        return DeviceDraft(
            self.shape, self.active, self.tokens, self.parents, self.logprobs, self.visible,
            self.columns, self.depths,
        )  # fmt: skip


def catch_up(
    forward: DeviceForward, rows: DeviceRows, active: np.ndarray, tiers: Tiers, most_tokens: int
) -> None:
    """Feeds the draft the cached tokens that it has not seen, all but the last one (the first step's).

    Rare: after iterations without a draft, and for prompts that were prefilled without one.
    """
    late = active[rows.lag[active] > 1]
    if not len(late):
        return
    missing = rows.lag[late] - 1
    row = np.repeat(late, missing)
    position = np.concatenate([np.arange(m) for m in missing]) + np.repeat(
        rows.seq_lens[late] - rows.lag[late], missing
    )
    for begin in range(0, len(row), most_tokens):
        _feed(forward, rows, row[begin : begin + most_tokens], position[begin : begin + most_tokens])


def _feed(forward: DeviceForward, rows: DeviceRows, row: np.ndarray, position: np.ndarray) -> None:
    """One causal forward over cached tokens; ``row`` rising, positions consecutive within a row."""
    device = forward.device
    members, q_lens = np.unique(row, return_counts=True)
    kv_lens = position[np.cumsum(q_lens) - 1] + 1
    pool_rows = rows.pool_rows[to_device(members, device)]
    forward.buffers.set_slots(gather_slots(rows.req_to_token, pool_rows, kv_lens), 0)
    owner = pool_rows[Ragged(q_lens, device).row]
    at = to_device(position, device)
    tokens, slots = rows.history[owner, at].long(), rows.req_to_token[owner, at].long()
    forward.set_tokens(tokens, at, slots, len(row))
    write_causal(forward, q_lens, kv_lens)
    key = Key(len(row), len(members), "logits")
    forward.run(key, Extent(q_lens, kv_lens), captured=False)


def write_causal(forward: DeviceForward, q_lens: np.ndarray, kv_lens: np.ndarray) -> None:
    """The mask of requests whose tokens are the last ones of their keys; padding all sees its one key."""
    widest = int(q_lens.max())
    query = np.concatenate([np.arange(q) for q in q_lens])
    start = to_device(np.repeat(np.maximum(kv_lens - q_lens, 0), q_lens), forward.device)
    visible = to_device(np.arange(widest) <= query[:, None], forward.device)
    forward.buffers.set_mask(MaskLayout(q_lens, kv_lens, start, widest), visible)
