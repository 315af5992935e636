"""Marginal pricing: draft steps, width and verify tokens are bought while they pay."""

from __future__ import annotations

import numpy as np

from adaserve.scheduler.acceptance import level_tests
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
from adaserve.scheduler.need import depth_cap
from adaserve.scheduler.policies.base import BasePolicy, Shape
from adaserve.scheduler.selection import leftover_keys, path_probability, rank, take_prefix
from adaserve.scheduler.worth import attainment_weight


class PricedPolicy(BasePolicy):
    """Goodput per second decides: an iteration's value is the weighted tokens it is expected to yield.

    Weights (``scheduler/worth.py``) favour requests whose SLO hangs in the balance; there is no
    separate SLO phase and no constant B.
    """

    def __init__(self, name: str, config: PolicyConfig) -> None:
        super().__init__(name, config)
        self._period_s = 0.0  # moving average of the time between verifications, prefill included
        self._pace = 2.0  # moving average of tokens per request and iteration
        self._weight: FloatArray = np.ones(0)
        self._kept_per_level = 1.0  # verify nodes per row and drafted level

    def shape(self, running: RunningBatch, cap: IntArray, now_s: float) -> Shape:
        """The depth with the best expected value per second, given learned acceptance."""
        self._weight = self._weigh(running, now_s)
        depth = self._best_depth(running, cap, self._weight)
        n = len(running)
        width = max(1, min(self.config.w_max, round(self.config.w_max * 128 / max(n, 1))))
        budget = n * (1 + depth * width)
        if self.config.budget is not None:
            budget = min(budget, self.config.budget)
        return Shape(depth, width, budget)

    def weights(self, running: RunningBatch, now_s: float, t_spec_s: float) -> FloatArray | None:
        """Weights of this plan, computed by ``shape``."""
        return self._weight

    def _weigh(self, running: RunningBatch, now_s: float) -> FloatArray:
        n = len(running)
        context = float(running.context_tokens.sum())
        period = self._period_s or self.latency.iteration_s(n, 2, 1, 3 * n, context)
        acc = self.rates.of_rows(running.rids, running.slo_class)
        pace = 1.0 + (self._pace - 1.0) * acc / max(self.rates.overall, 0.05)
        weight, hopeless = attainment_weight(running, now_s, period, pace, self.config)
        if self.config.triage_every > 1 and self._iterations % self.config.triage_every:
            weight = np.where(hopeless, 1e-3, weight)
        return weight

    def _best_depth(self, running: RunningBatch, cap: IntArray, weight: FloatArray) -> int:
        """argmax over d of (weights x expected tokens) / seconds."""
        n, context = len(running), float(running.context_tokens.sum())
        deepest = min(self.config.d_max, int(cap.max()))
        acc = self.rates.of_rows(running.rids, running.slo_class)
        levels = np.arange(1, deepest + 1)
        gain = np.where(levels <= cap[:, None], acc[:, None] ** levels, 0.0)
        value = np.concatenate([[0.0], np.cumsum(weight @ gain)]) + weight.sum()
        nodes = n * self._kept_per_level * np.arange(deepest + 1)
        verify = self.latency.verify_many(n + running.prefill_tokens + nodes, context)
        width = self.config.w_max
        draft = np.array([self.latency.draft_s(n, d, width, context) for d in range(deepest + 1)])
        return int(np.argmax(value / (draft + verify + self.config.latency.overhead_s)))

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
        running, n = plan.running, len(plan.running)
        zero = np.zeros(n, np.int64)
        ranked = rank(trees, self.values(plan, trees), depth_cap(running))
        if trees.n_nodes == 0 or not ranked.available.any():
            return take_prefix(ranked, zero, zero, trees.n_nodes)
        weight = np.ones(n) if plan.weight is None else plan.weight
        key = leftover_keys(ranked, zero, weight)
        most = min(plan.budget - n, int(ranked.available.sum()))
        falling = np.sort(key.ravel())[::-1][:most]
        gain = (falling & ~np.int64((1 << 20) - 1)).view(np.float64)
        value = weight.sum() + np.concatenate([[0.0], np.cumsum(gain)])
        best = int(np.argmax(value / self._seconds(plan, trees, most)))
        if best == 0:
            return take_prefix(ranked, zero, zero, trees.n_nodes)
        counts = np.count_nonzero(key >= falling[best - 1], axis=1)
        return take_prefix(ranked, counts, zero, trees.n_nodes)

    def _seconds(self, plan: IterationPlan, trees: CandidateTrees, most: int) -> FloatArray:
        """Predicted seconds of the iteration when 0..most nodes are verified, [most + 1]."""
        running, n = plan.running, len(plan.running)
        context = float(running.context_tokens.sum())
        draft = self.latency.draft_s(n, int(trees.depth.max(initial=0)), plan.width, context)
        tokens = n + running.prefill_tokens + np.arange(most + 1, dtype=np.float64)
        return draft + self.latency.verify_many(tokens, context) + self.config.latency.overhead_s

    def observe(self, outcome: IterationOutcome) -> None:
        """Also learns the rhythm: period, tokens per request, kept nodes per level."""
        super().observe(outcome)
        period = outcome.since_last_s or outcome.total_s
        if period > 0:
            self._period_s = period if self._period_s == 0 else 0.9 * self._period_s + 0.1 * period
        self._pace = 0.95 * self._pace + 0.05 * float(outcome.new_tokens.mean())
        depth = int(outcome.trees.depth.max(initial=0))
        if depth:
            kept = float(outcome.selection.counts.mean()) / depth
            self._kept_per_level = 0.95 * self._kept_per_level + 0.05 * kept
            level_tests(outcome)
