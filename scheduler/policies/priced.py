"""Marginal pricing: draft steps, width and verify tokens are bought while they pay."""

from __future__ import annotations

import numpy as np

from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.interface import (
    CandidateTrees,
    FloatArray,
    IntArray,
    IterationOutcome,
    IterationPlan,
    RunningBatch,
    Selection,
)
from adaserve.scheduler.policies.base import BasePolicy, Shape
from adaserve.scheduler.selection import (
    INDEX_MASK,
    count_true,
    path_probability,
    rank,
    take_prefix,
    weighted_keys,
)
from adaserve.scheduler.worth import attainment_weight


class PricedPolicy(BasePolicy):
    """Goodput per second decides: an iteration's value is the weighted tokens it is expected to yield.

    Weights (``scheduler/worth.py``) favour requests whose SLO hangs in the balance; there is no
    separate SLO phase and no constant B.
    """

    calibrate_every = 1

    def __init__(self, name: str, config: PolicyConfig) -> None:
        super().__init__(name, config)
        self._period_s = 0.0  # moving average of the time between verifications, prefill included
        self._pace = 2.0  # moving average of tokens per request and iteration
        self._rate = 0.0  # moving average of value per second of the iterations chosen
        levels = 0.7 ** np.arange(1, config.d_max + 1)[:, None]
        self._surplus: FloatArray = levels * 0.3 ** np.arange(config.w_max)[None, :]
        self._depth = 1
        self._first_level = 0.7  # acceptance of a level, moving average
        self._weight: FloatArray = np.ones(0)
        self._potential: dict[str, float] = {}  # moving average of 1 + sum f on the best chain, per request

    def shape(self, running: RunningBatch, cap: IntArray, now_s: float) -> Shape:
        """The depth with the best expected value per second, given learned acceptance."""
        acc = self.rates.of_rows(running.rids, running.slo_class)
        self._weight = self._weigh(running, acc, now_s)
        deepest = min(self.config.d_max, int(cap.max()))
        depth, width = self._best_shape(running, deepest)
        if self.config.early_stop and depth > 0:  # the frontier itself will say when to stop
            depth = min(deepest, depth + 2)
        n = len(running)
        budget = n * (1 + depth * width)
        if self.config.budget is not None:
            budget = min(budget, self.config.budget)
        return Shape(depth, width, budget)

    def weights(self, running: RunningBatch, now_s: float, t_spec_s: float) -> FloatArray | None:
        """Weights of this plan, computed by ``shape``."""
        return self._weight

    def _weigh(self, running: RunningBatch, acc: FloatArray, now_s: float) -> FloatArray:
        n = len(running)
        context = float(running.context_tokens.sum())
        period = self._period_s or self.latency.iteration_s(n, 2, 1, 3 * n, context)
        usual = 1.0 + (self._pace - 1.0) * acc / max(float(acc.mean()), 0.05)
        own = [self._potential.get(rid) for rid in running.rids]
        pace = np.array([u if p is None else p for u, p in zip(usual.tolist(), own, strict=True)])
        weight, hopeless = attainment_weight(running, now_s, period, pace, self.config)
        if self.config.triage_every > 1 and self._iterations % self.config.triage_every:
            weight = np.where(hopeless, 0.25, weight)
        return weight

    def _best_shape(self, running: RunningBatch, deepest: int) -> tuple[int, int]:
        """(d, w): levels and beams whose learned surplus pays for their draft forwards.

        ``self._surplus[l, b]`` is what beam b of level l + 1 has been worth per row beyond the price of
        its verify token. Now and then one level or beam more is drafted, or it could never be learned.
        """
        c, n, context = self.config, len(running), float(running.context_tokens.sum())
        if deepest <= 0:
            return 0, 1
        if self._rate <= 0:  # before the first selection: as if nothing were drafted
            self._rate = float(self._weight.sum()) / self.latency.iteration_s(n, 0, 1, n, context)
        first_s = self.latency.draft_step_s(n, context)
        row_s = max(0.0, self.latency.draft_step_s(2 * n, context) - first_s)
        per_beam = n * self._surplus[:deepest].sum(axis=0) - self._rate * row_s * max(0, self._depth - 1)
        width = max(1, int(np.count_nonzero(np.cumprod(per_beam[1:] > 0))) + 1)
        if self._iterations % c.width_probe_every == c.width_probe_every - 1:
            width = min(c.w_max, width + 1)
        step_s = first_s + row_s * (width - 1)
        per_level = n * self._surplus[:deepest, :width].sum(axis=1) - self._rate * step_s
        depth = int(np.count_nonzero(np.cumprod(per_level > 0)))
        if self._iterations % c.depth_probe_every == c.depth_probe_every - 1:
            depth = min(deepest, depth + 1)
        self._depth = depth
        return depth, width

    def _learn_surplus(self, plan: IterationPlan, f: FloatArray, price: float) -> None:
        """Moves the surplus table towards this iteration's trees; [n * d * w] nodes in beam order only."""
        n, w = len(plan.running), plan.width
        if plan.weight is None or f.size == 0 or f.size % (n * w):
            return
        worth = np.maximum(0.0, f.reshape(n, -1, w) * plan.weight[:, None, None] - price).mean(axis=0)
        seen = self._surplus[: worth.shape[0], :w]
        seen += self.config.surplus_rate * (worth - seen)
        reach = 1.0 + f.reshape(n, -1, w).max(axis=2).sum(axis=1)
        known = self._potential
        for rid, value in zip(plan.running.rids, reach.tolist(), strict=True):
            known[rid] = value if rid not in known else 0.9 * known[rid] + 0.1 * value

    def keep_drafting(self, plan: IterationPlan, step: int, frontier_logprob: FloatArray) -> bool:
        """Another step only while the frontier's expected value beats what its time is worth.

        Worth of a second: the value per second of recent iterations; of a verify token: that times
        the slope of the verify latency.
        """
        if not self.config.early_stop or self._rate <= 0 or plan.weight is None:
            return True
        running, n = plan.running, len(plan.running)
        context = float(running.context_tokens.sum())
        tokens = float(n * (1 + step))
        slope = self.latency.verify_s(tokens + n, context) - self.latency.verify_s(tokens, context)
        token_price = self._rate * slope / n
        f = np.exp(frontier_logprob)
        surplus = plan.weight[:, None] * f * self._first_level - token_price
        step_s = self.latency.draft_step_s(n * frontier_logprob.shape[1], context)
        return bool(np.maximum(surplus, 0.0).sum() > self._rate * step_s)

    def values(self, plan: IterationPlan, trees: CandidateTrees) -> FloatArray:
        """f of every node, calibrated if configured; [m]."""
        if not self.config.calibrate:
            return path_probability(trees)
        return self.calibrator.path_values(trees, plan.running.rids, plan.running.slo_class)

    def select(self, plan: IterationPlan, trees: CandidateTrees) -> Selection:
        """The prefix of the ranking by weight x f with the best value per second.

        Candidates in falling order of value; V(m) / T(m) is compared at every m, so a latency table
        with steps is handled as well as a line.
        """
        n = len(plan.running)
        zero = np.zeros(n, np.int64)
        f = self.values(plan, trees)
        ranked = rank(trees, f, plan.cap)
        weight = np.ones(n) if plan.weight is None else plan.weight
        most = min(plan.budget - n, int(ranked.available.sum()))
        key = weighted_keys(ranked, weight)
        falling = np.sort(key.ravel())[::-1][: max(0, most)]
        gain = (falling & ~INDEX_MASK).view(np.float64)
        value = weight.sum() + np.concatenate([[0.0], np.cumsum(gain)])
        seconds = self._seconds(plan, trees, len(falling))
        rate = value / seconds
        best = int(np.argmax(rate))
        if trees.n_nodes:
            slope = (seconds[-1] - seconds[0]) / max(1, len(falling))
            self._learn_surplus(plan, f, float(rate[best]) * slope)
        self._rate = float(rate[best]) if not self._rate else 0.9 * self._rate + 0.1 * float(rate[best])
        if best == 0:
            return take_prefix(ranked, zero, zero, trees.n_nodes)
        counts = count_true(key >= falling[best - 1])
        return take_prefix(ranked, counts, zero, trees.n_nodes)

    def _seconds(self, plan: IterationPlan, trees: CandidateTrees, most: int) -> FloatArray:
        """Predicted seconds of the iteration when 0..most nodes are verified, [most + 1]."""
        running, n = plan.running, len(plan.running)
        context = float(running.context_tokens.sum())
        draft = self.latency.draft_s(n, int(trees.depth.max(initial=0)), plan.width, context)
        verify = self._verify_s(running, np.arange(most + 1, dtype=np.float64))
        return draft + verify + self.config.latency.overhead_s

    def _verify_s(self, running: RunningBatch, nodes: FloatArray) -> FloatArray:
        """Predicted seconds of verifying ``nodes`` [k] besides the roots; the prefill's own share left out.

        A chunk that rides along has to be paid whatever is drafted, so its time must not make more
        speculation look worthwhile; but it may have used up the free compute, so the slope is taken
        behind it.
        """
        n, context = len(running), float(running.context_tokens.sum())
        seconds = self.latency.verify_many(n + running.prefill_tokens + nodes, context)
        if not running.prefill_tokens or self.config.price_prefill:
            return seconds
        both = self.latency.verify_many(np.array([n + running.prefill_tokens, n], np.float64), context)
        alone: FloatArray = seconds - (both[0] - both[1])
        return alone

    def observe(self, outcome: IterationOutcome) -> None:
        """Also learns the rhythm: period, tokens per request, kept nodes per level."""
        super().observe(outcome)
        period = outcome.since_last_s or outcome.total_s
        if period > 0:
            self._period_s = period if self._period_s == 0 else 0.9 * self._period_s + 0.1 * period
        self._pace = 0.95 * self._pace + 0.05 * float(outcome.new_tokens.mean())
        self._first_level = 0.9 * self._first_level + 0.1 * self.rates.overall

    def forget(self, rid: str) -> None:
        """Also drops the request's pace."""
        super().forget(rid)
        self._potential.pop(rid, None)
