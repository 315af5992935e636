"""What all policies share: plan assembly, tracking of latency and acceptance, reliability."""

from __future__ import annotations

import itertools
import math
import operator
from collections import deque
from dataclasses import dataclass, replace
from statistics import median_low

import numpy as np

from adaserve.scheduler.acceptance import AcceptanceRate, Verified, drafted_of, find_tested_in
from adaserve.scheduler.acceptance_calibration import Calibrator, claimed_probability, group_of
from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.costs.learned import LearnedCosts
from adaserve.scheduler.draft_windows import DraftWindows
from adaserve.scheduler.interface import (
    NO_CONTEXT,
    CandidateTrees,
    Context,
    DraftPlan,
    FloatArray,
    IntArray,
    IterationOutcome,
    IterationPlan,
    RunningBatch,
    Selection,
    tokens_read,
)
from adaserve.scheduler.selection import best_anywhere, everything, path_probability

NO_BUDGET = 1 << 30

KNEE_EVERY = 64
"""Iterations after which the knee is computed again."""

READ_EVERY = 64
"""One of this many iterations reads its candidates in any case, if the costs decide."""

KNEES = 256
"""B is the median of this many latest knees. A single knee follows the time of a single token, which is
seldom seen under load and differs by a third between the phases of a shared host."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a policy decides for one iteration. The base class limits it to the configuration."""

    draft: DraftPlan  # its window None = the configured one
    budget: int = NO_BUDGET  # B
    n_max: int | None = None
    weight: FloatArray | None = None  # value of an accepted token per row, [n]; None = all equal
    deepest: int | None = None  # node that is verified; None = no limit but the row's


class BasePolicy:
    """Fixed shape, everything drafted is verified; subclasses override ``shape`` and ``choose``."""

    calibrate_every = 8  # iterations; policies that don't use the calibration only record the curves
    slo_aware = False  # whether the rule looks at SLOs; then prefills may, too

    def __init__(self, name: str, config: PolicyConfig) -> None:
        self.name = name
        self.config = config
        self.costs = config.costs or LearnedCosts(config.latency, config.learn_costs)
        self.level_rate = AcceptanceRate()
        self.calibrator = Calibrator()
        self.windows: DraftWindows | None = None  # of a rule that chooses among several
        self._iterations = 0
        self._unlearned: list[IterationOutcome] = []  # of one batch, with trees
        self._knees: deque[int] = deque(maxlen=KNEES)
        self._knee = 0
        self._context: tuple[RunningBatch | None, Context] = None, NO_CONTEXT

    @property
    def budget(self) -> int:
        """B: the configured one, or where the knee of the learned costs has usually been."""
        if self.config.budget is not None:
            return self.config.budget
        if self._iterations % KNEE_EVERY == 0 or not self._knee:
            self._knees.append(self.costs.knee_tokens(self.config.knee))
            self._knee = median_low(self._knees)
        return self._knee

    def shape(self, running: RunningBatch, cap: IntArray, now_s: float) -> Shape:
        """d, w and B of the iteration; ``cap`` [n] is the deepest useful node per row."""
        raise NotImplementedError

    def plan(self, running: RunningBatch, now_s: float) -> IterationPlan:
        """One plan. Raises ValueError on duplicate rids or NaN times."""
        check_batch(running)
        n = len(running)
        cap = depth_cap(running)
        shape = self.shape(running, cap, now_s)
        limit = shape.budget if self.config.budget is None else min(shape.budget, self.config.budget)
        # A draft step would be wasted where only the roots fit.
        then = self._within(shape.draft, cap) if limit > n else DraftPlan(0)
        draft = then if running.underway is None else running.underway
        offered = 0 if running.offered is None else running.offered.n_nodes
        most = _most_nodes(draft) * self.config.drafts
        budget = max(n, min(limit, n * (1 + most) + offered))
        reaches = _limit(cap, draft.depth, shape.deepest)
        tokens = n + draft.count(n) * most
        takes_all = not offered and tokens <= limit and self._takes_all(running, draft, tokens, reaches)
        plan = IterationPlan(
            iteration=self._iterations,
            now_s=now_s,
            running=running,
            draft=draft,
            budget=budget,
            n_max=shape.n_max,
            weight=shape.weight,
            t_spec_s=self._t_spec(running, draft, budget) + self._wait_s(running, draft.depth, takes_all),
            cap=reaches,
            then=then,
            takes_all=takes_all,
        )
        self._iterations += 1
        return plan

    def _takes_all(self, running: RunningBatch, draft: DraftPlan, tokens: int, cap: IntArray | None) -> bool:
        """Whether all candidates are to be verified: up to ``tokens`` including the roots."""
        if not (running.may_go_unread and draft.depth) or (cap is not None and not cap.any()):
            return False
        return self.wants_all(running, tokens)

    def wants_all(self, running: RunningBatch, tokens: int) -> bool:
        """Whether all candidates should be verified, whatever they are: up to ``tokens`` including the roots,
        which fit into the budget."""
        return False

    def _is_quicker(self, running: RunningBatch, tokens: int, share: float) -> bool:
        """Whether verifying ``tokens`` unread takes less time than reading them and verifying the usual
        ``share`` of them. Now and then they are read, because otherwise the time of reading could not be
        learned."""
        if self._iterations % READ_EVERY == READ_EVERY - 1:
            return False
        n, context = len(running), self.context(running)
        fewer = n + round(share * (tokens - n))
        more_s = self.costs.verify_s(tokens, context) - self.costs.verify_s(fewer, context)
        return more_s < self.costs.select_wait_s

    def _wait_s(self, running: RunningBatch, steps: int, takes_all: bool) -> float:
        """Seconds that a device waits for the selection after ``steps`` draft steps."""
        return self.costs.select_wait_s if running.may_go_unread and steps and not takes_all else 0.0

    def context(self, running: RunningBatch) -> Context:
        """The batch's cached tokens, in the form that the latency model takes."""
        if self._context[0] is not running:  # asked for several times per iteration
            self._context = running, Context(float(running.context_tokens.sum()), len(running))
        return self._context[1]

    def _fixed_window(self, n: int) -> IntArray | None:
        """The configured window of n rows, the first one if there are several; None = no row has one."""
        window = self.config.draft_windows[0]
        return np.full(n, window) if window else None

    def _drafts_at(self, running: RunningBatch) -> int:
        """Number of the iteration that drafts what a plan wants: the next one if a draft is underway."""
        return self._iterations + (running.underway is not None)

    def _within(self, draft: DraftPlan, cap: IntArray) -> DraftPlan:
        """``draft`` within the configuration, for rows that may have nodes as deep as ``cap`` [n]."""
        depth = min(draft.depth, int(cap.max()), self.config.d_max) if self.config.drafts else 0
        if not depth:
            return DraftPlan(0)
        rows, may = draft.rows, cap > 0
        if not may.all():
            rows = may if rows is None else may & rows
        window = self._fixed_window(len(cap)) if draft.window is None else draft.window
        sinks = 0 if window is None else self.config.draft_sinks
        branching = draft.branching and draft.branching[:depth]
        return replace(draft, depth=depth, branching=branching, rows=rows, window=window, sinks=sinks)

    def _draft_context(self, running: RunningBatch, window: IntArray | None) -> Context:
        """What a draft step reads if it is made for all rows."""
        if window is None:
            return self.context(running)
        read = tokens_read(running.context_tokens, window, self.config.draft_sinks)
        return Context(float(read.sum()), len(running))

    def _t_spec(self, running: RunningBatch, draft: DraftPlan, budget: int) -> float:
        """Predicted seconds of the iteration: profile, corrected online (the paper leaves it open)."""
        context, read = self.context(running), self._draft_context(running, draft.window)
        tokens = budget + running.prefill_tokens
        rows = draft.count(len(running))
        return self.costs.iteration_s(rows, draft.depth, draft.width, tokens, context, read)

    def seconds(self, plan: IterationPlan, trees: CandidateTrees, most: int) -> FloatArray:
        """Predicted seconds of the iteration when 0..most nodes are verified, [most + 1]."""
        return self._seconds(plan, trees.draft_steps, most)

    def _seconds(self, plan: IterationPlan, steps: int, most: int) -> FloatArray:
        """The same, for so many draft steps."""
        running = plan.running
        tokens = len(running) + running.prefill_tokens
        seconds = self.costs.verify_curve(tokens, most + 1, self.context(running))
        seconds += self.costs.draft_s(plan.drafting_rows, steps, plan.draft.width, plan.draft_context)
        seconds += self.costs.other_s() + self._wait_s(running, steps, plan.takes_all)
        return seconds

    def select(self, plan: IterationPlan, trees: CandidateTrees) -> Selection:
        """The choice of ``choose``, or all candidates if the plan takes all; ``choose`` is asked in any
        case."""
        chosen = self.choose(plan, trees)
        return everything(trees, plan.cap, self.values(plan, trees)) if plan.takes_all else chosen

    def values(self, plan: IterationPlan, trees: CandidateTrees) -> FloatArray:
        """Best estimate of every candidate's probability, [m]."""
        return path_probability(trees)

    def choose(self, plan: IterationPlan, trees: CandidateTrees) -> Selection:
        """Keeps every usable candidate; the globally best ones if the budget binds."""
        return best_anywhere(trees, path_probability(trees), plan.budget, plan.cap)

    def prepare(self, plan: IterationPlan, like: CandidateTrees | None) -> None:
        """Makes a choice that is dropped."""
        if like is not None:
            self.choose(plan, like)

    def keep_drafting(self, plan: IterationPlan, step: int, frontier_logprob: FloatArray) -> bool:
        """Whether another draft step pays off; the published rules fix the depth beforehand."""
        return True

    def observe(self, outcome: IterationOutcome) -> None:
        """Learns acceptance, calibration and speed."""
        running = outcome.plan.running
        self.costs.observe(outcome, self.context(running))
        if not outcome.trees.n_nodes:
            self.calibrator.pass_over()
            return
        if self._unlearned and self._unlearned[0].plan.running.rids != running.rids:
            self.learn()
        self._unlearned.append(outcome)
        if self.enough_to_learn(len(self._unlearned), len(running)):
            self.learn()

    def enough_to_learn(self, iterations: int, n: int) -> bool:
        """Whether to learn from that many iterations of n requests; few rows at a time cost too much."""
        return iterations * n >= 32

    def learn(self) -> None:
        """Learns from the collected outcomes; several iterations of a small batch at once."""
        outcomes, self._unlearned = self._unlearned, []
        if not outcomes:
            return
        running = outcomes[0].plan.running
        seen = Verified.of(outcomes)
        tests = find_tested_in(seen)
        self.level_rate.observe(tests.tried, tests.passed)
        if self.windows is not None:
            self.windows.observe(outcomes, drafted_of(tests, seen))
        told = [o for o in outcomes if o.plan.iteration % self.calibrate_every == 0]
        if not told:
            return
        if len(told) < len(outcomes):
            seen = Verified.of(told)
            tests = find_tested_in(seen)
        claimed, group = claimed_probability(seen.trees)[tests.node], group_of(seen.trees)
        groups = None if group is None else group[tests.node]
        row = tests.row % len(running)
        self.calibrator.observe(claimed, row, tests.accepted, running.rids, running.slo_class, groups)

    def forget(self, rid: str) -> None:
        """Drops the request's acceptance and calibration state."""
        self.learn()  # what was collected earlier must not bring it back
        if self.windows is not None:
            self.windows.forget(rid)
        self.calibrator.forget(rid)


def check_batch(running: RunningBatch) -> None:
    """Raises ValueError on an empty batch, duplicate rids or NaN; called once per plan."""
    n = len(running)
    if n == 0:
        raise ValueError("plan() needs at least one running request; skip the iteration instead")
    if len(set(running.rids)) != n:
        twice = sorted({rid for rid in running.rids if running.rids.count(rid) > 1})
        raise ValueError(f"duplicate request ids in one batch: {twice[:4]}; every row needs its own rid")
    # A minimum is NaN as soon as one entry is.
    if math.isnan(running.tpot_slo_s.min()) or math.isnan(running.decode_start_s.min()):
        raise ValueError("tpot_slo_s and decode_start_s must not be NaN; use inf for a request without SLO")


def depth_cap(running: RunningBatch) -> IntArray:
    """Deepest node worth keeping per row, [n]: a path of k nodes emits up to k + 1 tokens."""
    cap: IntArray = np.maximum(np.minimum(running.max_depth, running.remaining_tokens - 1), 0)
    return cap


def _limit(cap: IntArray, depth: int, deepest: int | None) -> IntArray | None:
    """Deepest node per row that may be verified, [n]; None = no limit."""
    if deepest is not None:
        return np.minimum(cap, deepest)
    return cap if depth and cap.min() < depth else None


def _most_nodes(draft: DraftPlan) -> int:
    """Largest candidate tree of one row that one draft model makes, root not counted."""
    if draft.branching is None:
        return draft.depth * draft.width
    return sum(itertools.accumulate(draft.branching, operator.mul))
