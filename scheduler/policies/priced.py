"""Marginal pricing: draft steps, width and verified tokens are added as long as they pay off."""

from __future__ import annotations

import math

import numpy as np

from adaserve.scheduler.averages import MovingAverage, blend
from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.draft_value import Regime, Regimes
from adaserve.scheduler.draft_windows import DraftWindows
from adaserve.scheduler.interface import (
    DRAFTED,
    BoolArray,
    CandidateTrees,
    Context,
    DraftPlan,
    FloatArray,
    IntArray,
    IterationOutcome,
    IterationPlan,
    RunningBatch,
    Selection,
)
from adaserve.scheduler.keyed_arrays import Table
from adaserve.scheduler.node_pricing import Priced, explore, price_nodes, uncovered
from adaserve.scheduler.policies.base import BasePolicy, Shape
from adaserve.scheduler.selection import never_rising, path_probability, within_cap
from adaserve.scheduler.slo_weight import attainment_weight

SMALL, RELAXED = 16, 4
"""An iteration of a small batch is short, so slowly changing values are computed only every RELAXED
iterations, and after probes.
"""

RAREST_PROBE = 3
"""While drafting does not pay off, it is tried at least every ``probe_every`` << RAREST_PROBE iterations."""

NOTABLE = 1.01
"""A deeper or wider draft must promise this many times the rate of the smaller one. If both promise about the
same, the smaller one is better: it leaves more time for prompts, and the highest of several noisy estimates
is usually too high."""

PROBED_ROWS = 8
"""How many requests such a trial drafts for. The draft must first read what each of them wrote since it last
drafted, so the rarer a trial with all requests is, the more it costs."""

REACH_WEIGHT = 0.1
"""Weight of the newest iteration in a request's moving average of tokens on its best chain."""


class PricedPolicy(BasePolicy):
    """Goodput per second decides: an iteration's value is the weighted tokens it is expected to yield.

    Weights (``scheduler/slo_weight.py``) favor requests that may just meet or just miss their SLO; there is
    no separate SLO phase and no constant B.
    """

    calibrate_every = 1
    slo_aware = True

    def __init__(self, name: str, config: PolicyConfig) -> None:
        super().__init__(name, config)
        if len(config.draft_windows) > 1:
            self.windows = DraftWindows(config.draft_windows, config.draft_sinks)
        self._period_s = MovingAverage(0.1)  # time between verifications, prefill included
        self._pace = MovingAverage(0.05, start=2.0)  # tokens per request and iteration
        self._regimes = Regimes(config.d_max, config.w_max)
        self._latest: tuple[RunningBatch, Regime] | None = None
        self._weight: FloatArray = np.ones(0)
        self._bought: dict[int, tuple[FloatArray, Priced]] = {}  # f, by iteration, until observed
        self._prepared: tuple[IterationPlan, FloatArray] | None = None  # its seconds by verified nodes
        self._weighed: tuple[str, ...] = ()
        self._potential = Table(1)  # moving average of 1 + sum f on the best chain; 0 = not known

    def shape(self, running: RunningBatch, cap: IntArray, now_s: float) -> Shape:
        """The depth with the best expected value per second, given learned acceptance."""
        context = self.context(running)
        if len(running) >= SMALL or self._iterations % RELAXED == 0 or running.rids != self._weighed:
            self._weight, self._weighed = self._weigh(running, context, now_s), running.rids
        deepest = min(self.config.d_max, int(cap.max()))
        left = None
        if running.offered is not None or not cap.all():
            left = uncovered(running.offered, len(running), self.config.d_max)
            left[cap == 0] = 0.0  # nothing is drafted for them
        window = self._best_window(running)
        read = self._draft_context(running, window)
        depth, width = self._best_shape(running, left, read, deepest) if self.config.drafts else (0, 1)
        drafting = self._worth_drafting(running, left, depth, width, read)
        if drafting is not None and not drafting.any():
            depth, drafting = 0, None
        if depth and self._regime(running).in_vain:
            drafting = _some_rows(len(running), drafting)
        if self.config.early_stop and depth > 0:  # the frontier itself will say when to stop
            depth = min(deepest, depth + 2)
        return Shape(DraftPlan(depth, width, rows=drafting, window=window), weight=self._weight)

    def _best_window(self, running: RunningBatch) -> IntArray | None:
        """How much draft steps read of each row, by the learned cost and gain of reading that much, [n]."""
        n = len(running)
        if self.windows is None or not self.config.drafts:
            return self._fixed_window(n)
        regime = self._regime(running)
        rows = n * regime.width
        return self.windows.choose(
            running,
            self._weight,
            max(1, regime.depth),
            self._rate(regime),
            lambda read: self.costs.draft_step_s(rows, Context(read, n)),
        )

    def _regime(self, running: RunningBatch) -> Regime:
        """What is known about batches like this one."""
        if self._latest is not None and self._latest[0] is running:  # asked for several times per iteration
            return self._latest[1]
        n = len(running)
        stretch = self.costs.verify_s(n, self.context(running)) / self.costs.verify_s(n)
        known = self._regimes.of(n, stretch)
        self._latest = running, known
        return known

    def _rate(self, regime: Regime) -> float:
        """What a second is worth now: less while the host is busy."""
        return regime.rate.value / self.costs.slowdown

    def _add_rate(self, regime: Regime, rate: float) -> None:
        regime.rate.add(rate * self.costs.slowdown)

    def _weigh(self, running: RunningBatch, context: Context, now_s: float) -> FloatArray:
        """Weights [n], 1 on average: the learned worth of levels and rates is in units of past weights, and a
        prefill raises the weights of all requests at once."""
        n = len(running)
        if n == 1:  # nobody to compare it with
            return np.ones(n)
        period = self._period_s.value or self.costs.iteration_s(n, 2, 1, 3 * n, context)
        pace = self._potential.of(running.rids)[:, 0]
        pace = np.where(pace > 0, pace, self._pace.value)
        weight = attainment_weight(running, now_s, period, pace, self.config)
        return weight / weight.mean()

    def _best_shape(
        self, running: RunningBatch, left: FloatArray | None, read: Context, deepest: int
    ) -> tuple[int, int]:
        """(d, w) with the most expected value per second, by the worth of levels and beams so far.

        ``left`` [n, d_max]: what ``uncovered`` leaves of ``Regime.surplus``; None = all. ``read``: what a
        step reads of the contexts. The result may be a probe.

        All costs are present ones. If present costs of steps were compared with a rate of past iterations,
        drafting would end when the host becomes busy, although verifications take longer as well.
        """
        n, c = len(running), self.config
        regime = self._regime(running)
        if deepest <= 0:
            return 0, 1
        roots = float(self._weight.sum())
        plain_s = self.costs.iteration_s(n, 0, 1, n, self.context(running))
        if not regime.rate.value:  # before the first selection: as if nothing were drafted
            self._add_rate(regime, roots / plain_s)
        first_s = self.costs.draft_step_s(n, read)
        row_s = max(0.0, self.costs.draft_step_s(2 * n, read) - first_s)
        start_s = plain_s + self.costs.draft_start_s(n) + first_s
        open_rows = [float(n)] * deepest if left is None else left[:, :deepest].sum(axis=0).tolist()
        beams = regime.surplus[:, : c.widest(n)].cumsum(axis=1).T.tolist()
        depth, width, best = 0, 1, (1.0 + c.least_gain) * roots / plain_s
        for w, levels in enumerate(beams):
            value, seconds, least = roots, start_s, math.inf
            for level, rows in enumerate(open_rows):
                # No level is worth more than the one above it: one that seems to be was not drafted of late.
                # But the upper ones may be offered, so that a depth pays whose first levels do not.
                least = min(least, levels[level])
                value += rows * least
                if value > NOTABLE * best * seconds:
                    depth, width, best = level + 1, w + 1, value / seconds
                seconds += first_s + row_s * w
        regime.depth, regime.width = self._probed(running, regime, depth, width, deepest)
        return regime.depth, regime.width

    def _probed(
        self, running: RunningBatch, regime: Regime, depth: int, width: int, deepest: int
    ) -> tuple[int, int]:
        """(d, w), now and then with one more level and beam: otherwise their worth could never be learned.
        While drafting does not pay, probes get rarer."""
        c = self.config
        turn, since = divmod(self._drafts_at(running), c.probe_every)
        if depth:
            regime.in_vain = 0
        if since < c.probe_every - 1:
            return depth, width
        # What a plan wants of the next iteration may not be drafted there, which then asks again: that is the
        # same probe.
        again = turn == regime.probed
        if depth or again or turn % (1 << regime.in_vain) == 0:
            regime.in_vain = min(RAREST_PROBE, regime.in_vain + (depth == 0 and not again))
            regime.probed, depth = turn, min(deepest, depth + 1)
        return depth, min(c.widest(len(running)), width + 1)

    def _worth_drafting(
        self, running: RunningBatch, left: FloatArray | None, depth: int, width: int, read: Context
    ) -> BoolArray | None:
        """Rows [n] for which draft steps gain more than they cost; None = all of them."""
        n = len(running)
        if not depth or left is None or float(left.min()) == 1.0:
            return None
        regime = self._regime(running)
        row_s = self.costs.draft_step_s(2 * n, read) - self.costs.draft_step_s(n, read)
        price = self._rate(regime) * max(0.0, row_s) / n * (1 + width * (depth - 1))
        worth = left[:, :depth] @ regime.surplus[:depth, :width].sum(axis=1)
        drafting: BoolArray = (worth > price) | (left[:, 0] == 1.0)  # nothing is offered: as the whole batch
        return drafting

    def _learn_potential(self, rids: tuple[str, ...], trees: CandidateTrees, f: FloatArray) -> None:
        """A request without candidates, such as one that has just joined, says nothing about its pace."""
        best = np.zeros((len(rids), int(trees.depth.max(initial=0))))
        np.maximum.at(best, (trees.row, trees.depth - 1), f)
        reach = 1.0 + best.sum(axis=1)
        rows = self._potential.rows(rids)
        known = self._potential.values[rows, 0]
        reach = np.where(known > 0, blend(known, reach, REACH_WEIGHT), reach)
        self._potential.values[rows, 0] = np.where(np.diff(trees.row_start) > 0, reach, known)

    def _learn_surplus(self, plan: IterationPlan, trees: CandidateTrees, worth: FloatArray) -> None:
        """Moves the surplus table towards the worth of this iteration's draft steps beyond that of the
        offers. ``worth``: of every node, beyond its price, [m]."""
        n, w, row = len(plan.running), plan.draft.width, trees.row
        steps = min(trees.draft_steps, self.config.d_max)
        # Drafted nodes stand first in their level, in the order of beams; those that only a second draft
        # model made stand behind them.
        node = np.arange(trees.n_nodes)
        beam = node - np.maximum.accumulate(np.where(trees.begins_level, node, 0))
        drafted = trees.sources & DRAFTED > 0
        mine = (trees.sources & ~DRAFTED == 0) & (trees.depth <= steps)
        place = (trees.depth[mine] - 1) * w + beam[mine] % w
        total = np.asarray(np.bincount(place, worth[mine], steps * w), np.float64).reshape(steps, w)
        left = uncovered(plan.running.offered, n, steps)
        left[np.bincount(row[drafted], minlength=n) == 0] = 0.0
        regime, rate = self._regime(plan.running), self.config.surplus_rate
        # Where fewer levels were made than planned, the frontier has told that further ones bring nothing.
        regime.learn(total, left.sum(axis=0), n, rate, may_go_deeper=steps == plan.draft.depth)
        regime.extend(self.level_rate.value)

    def keep_drafting(self, plan: IterationPlan, step: int, frontier_logprob: FloatArray) -> bool:
        """Whether another draft step pays: the frontier's expected value against the worth of its time.

        Worth of a second: the value per second of recent iterations; of a verify token: that times
        the slope of the verify latency.
        """
        running, n = plan.running, len(plan.running)
        rate = self._rate(self._regime(running))
        assert plan.weight is not None
        if not self.config.early_stop or rate <= 0:
            return True
        context, drafted = self.context(running), plan.drafting_rows
        tokens = n + drafted * step
        slope = self.costs.verify_s(tokens + drafted, context) - self.costs.verify_s(tokens, context)
        token_price = rate * slope / drafted
        step_price = rate * self.costs.draft_step_s(drafted * frontier_logprob.shape[1], plan.draft_context)
        gain = plan.weight[:, None] * np.exp(frontier_logprob) * self.level_rate.value - token_price
        return bool(np.fmax(gain, 0.0).sum() > step_price)  # a beam that is NaN is worth nothing

    def values(self, plan: IterationPlan, trees: CandidateTrees) -> FloatArray:
        """f of every node that may be kept, calibrated if configured, never rising along a path; [m]."""
        if not self.config.calibrate:
            return within_cap(trees, never_rising(trees, path_probability(trees)), plan.cap)
        running = plan.running  # calibrated steps are below 1, so f falls
        f = self.calibrator.path_values(trees, running.rids, running.slo_class)
        return within_cap(trees, f, plan.cap)

    def choose(self, plan: IterationPlan, trees: CandidateTrees) -> Selection:
        """The calibrated candidates that ``scheduler/node_pricing.py`` buys."""
        weight, n = plan.weight, len(plan.running)
        assert weight is not None
        seconds, f, priced = self._buy(plan, trees)
        if trees.n_nodes:
            while len(self._bought) > 1:  # under overlap two iterations are not observed yet
                del self._bought[next(iter(self._bought))]
            self._bought[plan.iteration] = f, priced
        regime = self._regime(plan.running)
        if not trees.draft_steps:
            roots_rate = float(weight.sum() / seconds[0])
            if priced.rate <= roots_rate * (1.0 + self.config.least_gain):
                self._add_rate(regime, roots_rate)
                return Selection.nothing(n, trees.n_nodes)
        self._add_rate(regime, priced.rate)
        if regime.in_vain and trees.draft_steps and not priced.selection.keep.any():
            return explore(trees, f, priced.value, min(n, len(seconds) - 1))
        return priced.selection

    def wants_all(self, running: RunningBatch, tokens: int) -> bool:
        """Yes if verifying all of them takes less extra time than waiting for a selection would."""
        return self._is_quicker(running, tokens, self._regime(running).bought.value)

    def _buy(self, plan: IterationPlan, trees: CandidateTrees) -> tuple[FloatArray, FloatArray, Priced]:
        """Seconds by number of verified nodes, the worth of each node [m], and the nodes that are bought."""
        assert plan.weight is not None
        most = max(0, min(plan.budget - len(plan.running), trees.n_nodes))
        seconds, f = self.seconds(plan, trees, most), self.values(plan, trees)
        return seconds, f, price_nodes(trees, f, plan.weight, seconds)

    def prepare(self, plan: IterationPlan, like: CandidateTrees | None) -> None:
        """Also computes what the next ``select`` needs apart from candidates."""
        running = plan.running
        self._prepared = plan, self._seconds(plan, plan.draft.depth, plan.budget - len(running))
        if self.config.calibrate:
            self.calibrator.batch_factors(running.rids, running.slo_class)
        if like is not None:
            self._buy(plan, like)

    def seconds(self, plan: IterationPlan, trees: CandidateTrees, most: int) -> FloatArray:
        """From ``prepare``, if that was for the same plan."""
        if self._prepared is not None and self._prepared[0] is plan and trees.draft_steps == plan.draft.depth:
            return self._prepared[1][: most + 1]
        return super().seconds(plan, trees, most)

    def _seconds(self, plan: IterationPlan, steps: int, most: int) -> FloatArray:
        """A prefill chunk in the same forward has to be paid for whatever is drafted, so its time must not
        make more speculation look worthwhile; but it may have used up the free compute, so the slope is taken
        behind it."""
        seconds = super()._seconds(plan, steps, most)
        n, chunk, context = len(plan.running), plan.running.prefill_tokens, self.context(plan.running)
        if chunk:
            seconds -= self.costs.verify_s(n + chunk, context) - self.costs.verify_s(n, context)
        return seconds

    def observe(self, outcome: IterationOutcome) -> None:
        """Also learns what iterations usually yield and take: period, tokens per request, kept nodes per
        level."""
        super().observe(outcome)
        plan, trees = outcome.plan, outcome.trees
        bought = self._bought.pop(plan.iteration, None)
        turns = (RELAXED, self.config.probe_every)
        due = len(plan.running) >= SMALL or any(plan.iteration % every == every - 1 for every in turns)
        if bought is not None and due:
            f, priced = bought
            self._learn_potential(plan.running.rids, trees, f)
            if trees.draft_steps:
                self._learn_surplus(plan, trees, np.maximum(priced.value - priced.price, 0.0))
                self._regime(plan.running).bought.add(priced.selection.keep.mean())
        if outcome.cycle_s > 0:
            self._period_s.add(outcome.cycle_s)
        self._pace.add(float(outcome.new_tokens.mean()))

    def enough_to_learn(self, iterations: int, n: int) -> bool:
        """Small batches collect more, but a single request may be finished after thirty iterations."""
        if n >= SMALL:
            return super().enough_to_learn(iterations, n)
        return iterations * n >= 64 or iterations >= 16

    def forget(self, rid: str) -> None:
        """Also drops the request's pace."""
        super().forget(rid)
        self._potential.forget(rid)


def _some_rows(n: int, drafting: BoolArray | None) -> BoolArray | None:
    """``PROBED_ROWS`` of the rows that may be drafted for, spread over the batch. None = all."""
    rows = np.arange(n) if drafting is None else np.flatnonzero(drafting)
    if len(rows) <= PROBED_ROWS:
        return drafting
    some = np.zeros(n, np.bool_)
    some[rows[np.arange(PROBED_ROWS) * len(rows) // PROBED_ROWS]] = True
    return some
