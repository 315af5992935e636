"""Beam search of candidate trees on the draft model (AdaServe, section 4.1, Algorithm 2 lines 2-5).

Each node keeps its own KV slot in its request's window; a node sees the committed prefix, the root
and its ancestors. Re-parented beams therefore never move KV.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch

from adaserve.engine.forwards import BeamForward, FirstForward, TreeForward
from adaserve.engine.host.beam import MAX_WIDTH, BeamArrays
from adaserve.engine.host.gumbel import Reading
from adaserve.engine.state import DecodeRows
from adaserve.engine.trees.attention import PlanTemplate, causal_plan, gather_slots, indptr, tree_plan
from adaserve.engine.trees.plan import TreeAttentionPlan
from adaserve.engine.trees.shape import TreeShape, tree_shape
from adaserve.scheduler.interface import CandidateTrees, IterationPlan

ReadAt = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Scale of the draft's logits and spread of the request's noise at each sampling temperature."""

USUALLY_PENDING = 2
"""Tokens that the draft has not seen after an iteration that drafted: the last accepted node, at most."""

KeepDrafting = Callable[[IterationPlan, int, np.ndarray], bool]


@dataclass(frozen=True, slots=True)
class Draft:
    """Candidate trees and where their nodes live. Node order within a row is the shape's."""

    shape: TreeShape
    rows: np.ndarray  # int64 [a]: rows of the batch that were drafted for
    trees: CandidateTrees
    visible: np.ndarray  # bool [a, nodes, width]: window columns that each node sees, itself included
    window: np.ndarray  # int64 [a, width]: KV slots of the windows
    depth: int  # draft steps that were run
    catch_up_s: float = 0.0  # seconds in which the draft took in tokens it had missed, before the steps

    @property
    def nodes_per_row(self) -> int:
        """Candidates of one drafted row."""
        return self.visible.shape[1]


class Drafter:
    """``read`` maps the requests' temperatures to how the draft's logits are read (`DraftSharpening`).

    ``max_nodes``: KV slots that a request's window has for candidates.
    """

    def __init__(self, forward: TreeForward, read: ReadAt, max_nodes: int) -> None:
        self._forward = forward
        self._read = read
        self._max_nodes = max_nodes

    def draft(
        self, plan: IterationPlan, rows: DecodeRows, keep_drafting: KeepDrafting | None
    ) -> Draft | None:
        """Runs up to plan.depth draft steps; None when no row may have a tree."""
        active = np.flatnonzero(rows.running.max_depth > 0)
        depth = min(plan.depth, int(rows.running.max_depth.max(initial=0)))
        shape = self._shape(depth, plan)
        if shape is None or not len(active):
            return None
        catch_up_s = self._catch_up(rows, active)
        search = _BeamSearch(self._forward, rows, active, shape, self._reading(rows, active))
        steps = search.run(plan, keep_drafting) if search.is_native else search.walk(plan, keep_drafting)
        return replace(search.result(len(rows), steps), catch_up_s=catch_up_s)

    def _catch_up(self, rows: DecodeRows, active: np.ndarray) -> float:
        """Feeds the draft what requests generated while nothing was drafted for them; seconds it took.

        Apart from the first step, so that the policy does not take it for the price of drafting.
        """
        behind = active[[len(rows.states[r].pending) > USUALLY_PENDING for r in active]]
        if not len(behind):
            return 0.0
        start_s = time.perf_counter()
        states = [rows.states[r] for r in behind]
        q_lens = np.array([len(s.pending) for s in states])
        first, kv_lens = np.array([s.draft_len for s in states]), rows.seq_lens[behind]
        pool_indices = rows.pool_indices[torch.from_numpy(behind)]
        slots = gather_slots(rows.req_to_token, pool_indices, first, q_lens)
        kv_slots = gather_slots(rows.req_to_token, pool_indices, np.zeros_like(kv_lens), kv_lens)
        tokens = torch.tensor([t for s in states for t in s.pending])
        positions = torch.from_numpy(
            np.concatenate([np.arange(f, f + q) for f, q in zip(first, q_lens, strict=True)])
        )
        self._forward.hidden(tokens, positions, slots, causal_plan(kv_slots, q_lens, kv_lens))
        for state, length in zip(states, kv_lens.tolist(), strict=True):
            state.draft_len, state.pending = length, []
        return time.perf_counter() - start_s

    def _shape(self, depth: int, plan: IterationPlan) -> TreeShape | None:
        """The planned shape, cut to the window: a fixed tree knows nothing of this server's limits."""
        while depth:
            branching = None if plan.branching is None else plan.branching[:depth]
            shape = tree_shape(depth, plan.width, branching)
            if shape.nodes <= self._max_nodes:
                return shape
            depth -= 1
        return None

    def _reading(self, rows: DecodeRows, active: np.ndarray) -> Reading:
        """How the draft's logits below the roots are read."""
        scale, spread = self._read(rows.running.temperature[active])
        return Reading(
            scale.astype(np.float32), spread.astype(np.float32), rows.keys[active], rows.seq_lens[active]
        )


class _BeamSearch:
    """State of one beam search over ``a`` rows; tensors are [a, beams, ...]."""

    def __init__(
        self,
        forward: TreeForward,
        rows: DecodeRows,
        active: np.ndarray,
        shape: TreeShape,
        reading: Reading,
    ) -> None:
        self.forward, self.rows, self.active, self.shape, self.reading = forward, rows, active, shape, reading
        a = len(active)
        self.base = rows.seq_lens[active]
        self.pool_indices = rows.pool_indices[torch.from_numpy(active)]
        # One kv list serves every step: prefix, then the whole window (columns not yet written are masked).
        self.kv_lens = self.base + shape.width
        self.kv_slots = gather_slots(
            rows.req_to_token, self.pool_indices, np.zeros(a, np.int64), self.kv_lens
        )
        ends = np.cumsum(self.kv_lens)
        self.window = self.kv_slots.numpy()[(ends - shape.width)[:, None] + np.arange(shape.width)]
        self.visible = np.zeros((a, shape.nodes, shape.width), np.bool_)
        self.tokens = np.zeros((a, shape.nodes), np.int64)
        self.parents = np.full((a, shape.nodes), -1, np.int64)
        self.logprobs = np.zeros((a, shape.nodes))
        self.level = torch.empty(0)
        self._template: PlanTemplate | None = None

    @property
    def is_native(self) -> bool:
        """Whether the forward makes all levels in one call."""
        fits = not self.shape.is_branching and self.shape.beams[0] <= MAX_WIDTH
        return fits and getattr(self.forward, "searches_beams", False)

    def run(self, plan: IterationPlan, keep_drafting: KeepDrafting | None) -> int:
        """All steps in one call; returns how many were run."""
        first, last = self._first_forward()
        width, depth = self.shape.beams[0], len(self.shape.beams)
        beams = BeamArrays(
            width=width,
            depth=depth,
            last=last.astype(np.int32),
            base=self.base,
            kv_indptr=indptr(self.kv_lens).astype(np.int32),
            kv_indices=self.kv_slots.to(torch.int32).numpy(),
            columns=self.shape.columns.astype(np.int32),
            scale=self.reading.scale,
            spread=self.reading.spread,
            keys=self.reading.keys,
            tokens=self.tokens,
            parents=self.parents,
            logprobs=self.logprobs,
            visible=self.visible,
        )

        def keep(step: int) -> bool:
            assert keep_drafting is not None
            out = np.full((len(self.rows), width), -np.inf)
            out[self.active] = self.logprobs[:, (step - 1) * width : step * width]
            return keep_drafting(plan, step, out)

        forward = cast("BeamForward", self.forward)
        steps = forward.beam_search(first, beams, None if keep_drafting is None else keep)
        self._saw_roots()
        return steps

    def walk(self, plan: IterationPlan, keep_drafting: KeepDrafting | None) -> int:
        """The same step by step."""
        self.first_step()
        for step in range(2, len(self.shape.beams) + 1):
            if keep_drafting is not None and not keep_drafting(plan, step - 1, self.frontier(len(self.rows))):
                return step - 1
            self.next_step(step)
        return len(self.shape.beams)

    def _saw_roots(self) -> None:
        for r, length in zip(self.active.tolist(), self.base.tolist(), strict=True):
            state = self.rows.states[r]
            state.draft_len, state.pending = length + 1, []

    def _first_forward(self) -> tuple[FirstForward, np.ndarray]:
        """What the draft has not seen yet, usually just the root; and where the roots are in it."""
        states = [self.rows.states[r] for r in self.active]
        roots = self.rows.roots[self.active]
        tokens = np.concatenate([[*s.pending, root] for s, root in zip(states, roots, strict=True)]).astype(
            np.int64
        )
        starts = np.array([s.draft_len for s in states], np.int64)
        q_lens = self.base + 1 - starts
        slots = gather_slots(self.rows.req_to_token, self.pool_indices, starts, q_lens)
        if int(q_lens.max()) == 1:
            kv_lens, kv_slots = self.kv_lens, self.kv_slots
            seen = np.zeros((len(roots), self.shape.width), np.bool_)
            seen[:, 0] = True
            plan = tree_plan(kv_slots, q_lens, kv_lens, seen)
        else:
            kv_lens = self.base + 1
            kv_slots = gather_slots(
                self.rows.req_to_token, self.pool_indices, np.zeros_like(kv_lens), kv_lens
            )
            plan = causal_plan(kv_slots, q_lens, kv_lens)
        last = np.cumsum(q_lens) - 1
        positions = np.arange(len(tokens)) - np.repeat(last - self.base, q_lens)
        return (torch.from_numpy(tokens), torch.from_numpy(positions), slots, plan), last

    def first_step(self) -> None:
        """Feeds what the draft has not seen yet and keeps the best children of the roots."""
        first, last = self._first_forward()
        hidden = self.forward.hidden(*first)
        self._saw_roots()
        beams = self.shape.beams[0]
        logprob, token = self.forward.topk_logprobs(hidden[torch.from_numpy(last)], self.reading, beams)
        self.level = logprob.double()
        self._store(1, token.numpy(), np.zeros((len(last), beams), np.int64))

    def next_step(self, step: int) -> None:
        """Expands the beams of depth step - 1 into those of depth ``step``."""
        before = slice(self.shape.start[step - 2], self.shape.start[step - 1])
        a, m = len(self.active), before.stop - before.start
        tokens = torch.from_numpy(self.tokens[:, before].reshape(-1))
        positions = torch.from_numpy(np.repeat(self.base + step - 1, m))
        slots = torch.from_numpy(self.window[:, self.shape.columns[before]].reshape(-1))
        seen = self.visible[:, before].reshape(a * m, -1)
        hidden = self.forward.hidden(tokens, positions, slots, self._level_plan(m, seen))
        beams = self.shape.beams[step - 1]
        # A fixed branching gives every beam the same number of children; a beam search lets them compete.
        children = beams // m if self.shape.is_branching else min(beams, self.shape.beams[0])
        logprob, token = self.forward.topk_logprobs(hidden, self._level_reading(m, step), children)
        paths = (self.level.unsqueeze(-1) + logprob.double().view(a, m, children)).view(a, m * children)
        if self.shape.is_branching:
            best = torch.arange(m * children).expand(a, -1)
        else:
            paths, best = paths.topk(beams, dim=1)
        self.level = paths
        chosen = token.view(a, m * children).gather(1, best).numpy()
        self._store(step, chosen, (best // children).numpy())

    def _level_plan(self, m: int, seen: np.ndarray) -> TreeAttentionPlan:
        """Attention of m beams per row; all but what they see is the same in every step."""
        if self._template is None or self._template.beams != m:
            self._template = PlanTemplate(self.kv_slots, m, self.kv_lens, self.shape.width)
        return self._template.plan(seen)

    def _level_reading(self, m: int, step: int) -> Reading:
        """Of m beams per row at depth ``step`` - 1: those of a row share its noise."""
        r = self.reading
        columns = (np.repeat(values, m) for values in (r.scale, r.spread, r.keys, r.positions + step - 1))
        return Reading(*columns)

    def _store(self, step: int, token: np.ndarray, parent: np.ndarray) -> None:
        nodes = slice(self.shape.start[step - 1], self.shape.start[step])
        self.tokens[:, nodes] = token
        self.logprobs[:, nodes] = self.level.numpy()
        if step == 1:
            self.visible[:, nodes, 0] = True
        else:
            parents = parent + self.shape.start[step - 2]
            self.parents[:, nodes] = parents
            self.visible[:, nodes] = np.take_along_axis(self.visible, parents[:, :, None], axis=1)
        inside = np.arange(nodes.start, nodes.stop)
        self.visible[:, inside, self.shape.columns[inside]] = True

    def frontier(self, n: int) -> np.ndarray:
        """Path log-probabilities of the newest level, [n, beams], -inf for rows without a tree."""
        out = np.full((n, self.level.shape[1]), -np.inf)
        out[self.active] = self.level.numpy()
        return out

    def result(self, n: int, depth: int) -> Draft:
        nodes = self.shape.start[depth]
        counts = np.zeros(n, np.int64)
        counts[self.active] = nodes
        trees = CandidateTrees(
            row_start=np.concatenate([[0], np.cumsum(counts)]),
            token=self.tokens[:, :nodes].reshape(-1),
            parent=self.parents[:, :nodes].reshape(-1),
            depth=np.tile(self.shape.depth[:nodes], len(self.active)),
            logprob=self.logprobs[:, :nodes].reshape(-1),
        )
        return Draft(self.shape, self.active, trees, self.visible[:, :nodes], self.window, depth)
