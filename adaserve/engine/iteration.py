"""One decode iteration, from plan to outcome: the values that its steps hand on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from adaserve.engine.sources.beam import Draft
from adaserve.engine.state import DecodeRows, RequestState
from adaserve.engine.trees.verify import Acceptance, VerifyBatch
from adaserve.scheduler.interface import CandidateTrees, IterationOutcome, IterationPlan, Selection
from adaserve.slo.stats import IterationSample


@dataclass(frozen=True, slots=True)
class StepTimes:
    """``time.perf_counter`` at the ends of the steps."""

    start_s: float
    drafted_s: float
    selected_s: float


@dataclass(frozen=True, slots=True)
class Iteration:
    """What was planned, drafted, selected, verified and accepted for n requests."""

    rows: DecodeRows
    plan: IterationPlan
    draft: Draft | None  # None when nothing was drafted
    selection: Selection
    verified: VerifyBatch
    draws: np.ndarray  # int64 [T]: the target's draw at each verified token
    acceptance: Acceptance
    times: StepTimes

    @property
    def trees(self) -> CandidateTrees:
        return self.draft.trees if self.draft is not None else CandidateTrees.empty(len(self.rows))

    @property
    def bonus(self) -> np.ndarray:
        """int64 [n]: the draw at the deepest accepted token, root of the next tree."""
        return self.draws[self.acceptance.last]

    def emitted(self, stride: int) -> np.ndarray:
        """int64 [n, stride]: accepted tokens and the bonus of each row, zeros behind."""
        v, accepted = self.verified, self.acceptance.accepted & ~self.verified.is_root
        out = np.zeros((len(self.rows), stride), np.int64)
        out[v.row[accepted], v.depth[accepted] - 1] = v.tokens[accepted]
        out[np.arange(len(self.rows)), self.acceptance.count] = self.bonus
        return out

    def moves(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(target, source) slots that make the accepted paths contiguous; None when they are already."""
        v = self.verified
        moved = np.flatnonzero(self.acceptance.accepted & (v.column != v.depth))
        if not len(moved):
            return None
        row = self.rows.pool_indices[torch.from_numpy(v.row[moved])]
        target = self.rows.req_to_token[row, torch.from_numpy(v.positions[moved])].long()
        return target, v.slots[torch.from_numpy(moved)]

    def path_index(self, stride: int) -> np.ndarray:
        """int64 [n, stride]: verified token behind each emitted one; the root's index where there is none."""
        v = self.verified
        index = np.repeat(v.root[:, None], stride, axis=1)
        path = np.flatnonzero(self.acceptance.accepted)
        index[v.row[path], v.depth[path]] = path
        return index

    def advance(self, emitted: np.ndarray) -> None:
        """Brings the requests' states up to date with the emitted tokens."""
        for r, state in enumerate(self.rows.states):
            self._advance(state, r, emitted[r, : self.acceptance.count[r] + 1].tolist())

    def _advance(self, state: RequestState, r: int, new_tokens: list[int]) -> None:
        before = int(self.rows.seq_lens[r])
        cached = [int(self.rows.roots[r]), *new_tokens[:-1]]  # the root and the accepted nodes
        if self.draft is None or self.rows.running.max_depth[r] == 0:
            state.pending.extend(cached)
        else:
            # The draft has the KV of the root and of every node it expanded: all but the last level.
            state.draft_len = before + min(len(cached), self.draft.depth)
            state.pending = cached[state.draft_len - before :]
        state.generated.extend(new_tokens)
        state.decoded += len(new_tokens)

    def outcome(self, end_s: float, last_end_s: float) -> IterationOutcome:
        """What the policy learns; ``last_end_s`` is 0 before the first iteration."""
        times, trees = self.times, self.trees
        catch_up_s = 0.0 if self.draft is None else self.draft.catch_up_s
        accepted = np.zeros(trees.n_nodes, np.bool_)
        accepted[self.verified.node] = self.acceptance.accepted[~self.verified.is_root]
        return IterationOutcome(
            plan=self.plan,
            trees=trees,
            selection=self.selection,
            accepted=accepted,
            new_tokens=self.acceptance.count + 1,
            end_s=end_s,
            draft_s=times.drafted_s - times.start_s - catch_up_s,
            select_s=times.selected_s - times.drafted_s,
            verify_s=end_s - times.selected_s,
            total_s=end_s - times.start_s,
            since_last_s=end_s - last_end_s if last_end_s else 0.0,
        )


def sample_of(outcome: IterationOutcome) -> IterationSample:
    """What the books keep of an iteration."""
    plan, selection = outcome.plan, outcome.selection
    return IterationSample(
        running=len(plan.running),
        depth=plan.depth,
        width=plan.width if plan.depth else 0,
        budget=plan.budget,
        verify_tokens=selection.verify_tokens,
        drafted_tokens=outcome.trees.n_nodes,
        new_tokens=int(outcome.new_tokens.sum()),
        expected_tokens=float(selection.expected_tokens.sum()),
        draft_s=outcome.draft_s,
        select_s=outcome.select_s,
        verify_s=outcome.verify_s,
        total_s=outcome.total_s,
    )
