"""A replica that plays every iteration: the policy plans and selects, trees are drawn, a latency model tells
the time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from adaserve.scheduler.interface import (
    BoolArray,
    CandidateTrees,
    Context,
    FloatArray,
    IntArray,
    IterationOutcome,
    IterationPlan,
    Policy,
    Selection,
)
from adaserve.scheduler.policies.turbospec import TurboSpecPolicy
from adaserve.scheduler.simulator.order import RowOrder
from adaserve.scheduler.simulator.replica import Replica, ReplicaConfig
from adaserve.scheduler.simulator.trees import TreeSampler
from adaserve.scheduler.simulator.workload import SimRequest


class Iteration(NamedTuple):
    """A line of a replica's log."""

    now_s: float  # when it had ended
    rows: int
    depth: int  # of the deepest candidate
    verify: int  # tokens of the verification, roots included
    prefill: int  # prompt tokens beside them
    seconds: float


class PlayedReplica(Replica):
    """Runs iterations as the engine does."""

    def __init__(
        self,
        policy: Policy,
        config: ReplicaConfig,
        sampler: TreeSampler,
        rng: np.random.Generator,
        order: RowOrder | None,
    ) -> None:
        super().__init__(config, rng, drafts=policy.name != "none")
        self.policy, self.sampler, self._order = policy, sampler, order
        self.log: list[Iteration] = []
        self.outcomes: list[IterationOutcome] | None = None  # set to [] to record iterations
        self._unobserved: IterationOutcome | None = None
        self._leaving: list[str] = []  # requests of ``_unobserved`` that have ended

    def _prefill(self, tokens: int) -> None:
        self._settle()
        super()._prefill(tokens)

    def _drafts_for_next(self) -> bool:
        policy = self.policy
        return not isinstance(policy, TurboSpecPolicy) or policy.wants_draft_prefill(len(self.rows))

    def _decode(self, prefill_tokens: int) -> None:
        at = None if self._order is None else self._order(self.rows, self.now_s)
        running = self.rows.batch(at, prefill_tokens)
        plan = self.policy.plan(running, self.now_s)
        pick = slice(None) if at is None else at
        trees, selection, accepted, draft_s = self._speculate(plan, pick)
        counts = np.bincount(trees.row[accepted], minlength=len(running))
        left = (self.rows.length - self.rows.decoded)[pick]
        new = np.minimum(1 + counts, left)
        context = Context(float(running.context_tokens.sum()), len(running))
        verify_s = self._noisy(self._verify_s(selection.verify_tokens, prefill_tokens, context))
        if prefill_tokens:
            self._read_beside(prefill_tokens, verify_s, self._verify_s(selection.verify_tokens, 0, context))
        around_s = self.config.latency.overhead_s + self.config.row_overhead_s * len(running)
        total = draft_s + verify_s + self._slowed(around_s + self._draft_prefill_s())
        self.now_s += total
        outcome = IterationOutcome(
            plan,
            trees,
            selection,
            accepted,
            new,
            end_s=self.now_s,
            draft_s=draft_s,
            select_s=0.0,
            verify_s=verify_s,
            total_s=total,
            since_last_s=self.now_s - self._last_end_s if self._last_end_s else total,
            prefilled=self._recent.spent_s > 0 or prefill_tokens > 0,
            prefill_tokens=prefill_tokens,
        )
        self._observe(outcome)
        self._decoded(pick, new, float(selection.verify_tokens), prefill_tokens, outcome.cycle_s)

    def _speculate(
        self, plan: IterationPlan, pick: slice | IntArray
    ) -> tuple[CandidateTrees, Selection, BoolArray, float]:
        n = plan.drafting_rows
        if plan.draft.depth == 0:
            trees = CandidateTrees.empty(len(plan.running))
            self._settle()
            return trees, self.policy.select(plan, trees), np.zeros(0, np.bool_), 0.0
        drafted = self.sampler.draft(
            plan.draft,
            self.rows.difficulty[pick],
            self.rows.bias[pick],
            lambda step, frontier: self.policy.keep_drafting(plan, step, frontier),
        )
        self._settle()
        selection = self.policy.select(plan, drafted.trees)
        accepted = drafted.fate(selection.keep)
        fed = [n, *(n * (s.stop - s.start) for s in drafted.levels[:-1])]  # rows of each draft forward
        latency, read = self.config.latency, plan.draft_context
        seconds = latency.draft_start_s(n) + sum(latency.draft_step_s(rows, read) for rows in fed)
        return drafted.trees, selection, accepted, self._noisy(seconds)

    def _observe(self, outcome: IterationOutcome) -> None:
        """The policy learns, under the overlap schedule after the next plan; the log gets a line."""
        if self.outcomes is not None:
            self.outcomes.append(outcome)
        self._unobserved = outcome
        if not self.config.lag:
            self._settle()
        rows, depth = len(outcome.new_tokens), int(outcome.trees.depth.max(initial=0))
        tokens = outcome.selection.verify_tokens, outcome.prefill_tokens
        self.log.append(Iteration(self.now_s, rows, depth, *tokens, outcome.total_s))

    def _settle(self) -> None:
        """The policy learns from the last iteration, if that is still to be done."""
        outcome, self._unobserved = self._unobserved, None
        if outcome is not None:
            self.policy.observe(outcome)
        leaving, self._leaving = self._leaving, []
        for rid in leaving:
            self.policy.forget(rid)

    def _end(self, request: SimRequest) -> None:
        super()._end(request)
        if self._unobserved is None:
            self.policy.forget(request.rid)
        else:  # an outcome that is not observed yet would bring it back
            self._leaving.append(request.rid)


def iteration_log(replica: PlayedReplica) -> dict[str, FloatArray]:
    """The replica's log by field name."""
    table = np.asarray(replica.log, np.float64).reshape(-1, len(Iteration._fields))
    return dict(zip(Iteration._fields, table.T, strict=True))
