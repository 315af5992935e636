"""Urgency order as in xLLM: SLOs decide who gets the time of an iteration, not how much is speculated.

Source: xLLM's mix scheduler (``xllm/core/scheduler/mix_scheduler.cpp``). An iteration may take as long as the
most urgent request that can still be in time has left, and at least 0.65 of the tightest TPOT; if there is
none, there is no limit. Requests are taken in the order of the time they have left, each with its whole
chain, as long as the iteration stays within that. This is xLLM's strategy ``deadline``. Under its
``urgency_density`` those that cannot wait for all the others come first, the cheapest of them before the
rest. xLLM lets the others wait; in SGLang every running request decodes, so here they get their root.
"""

from __future__ import annotations

import numpy as np

from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.interface import (
    CandidateTrees,
    DraftPlan,
    FloatArray,
    IntArray,
    IterationPlan,
    RunningBatch,
    Selection,
)
from adaserve.scheduler.policies.base import BasePolicy, Shape
from adaserve.scheduler.selection import path_probability, rank, take_prefix

MIN_SHARE = 0.65
"""Share of the tightest TPOT that an iteration may always take."""


def time_left(running: RunningBatch, now_s: float) -> FloatArray:
    """Seconds until each request's next token is due by its TPOT SLO, [n]; negative when it is late."""
    due = running.decode_start_s + (running.decoded_tokens + 1) * running.tpot_slo_s
    left: FloatArray = due - now_s
    return left


class UrgencyPolicy(BasePolicy):
    """Chains of ``k`` for the most urgent requests, as many as the latency budget holds."""

    slo_aware = True

    def __init__(self, name: str, config: PolicyConfig, k: int) -> None:
        super().__init__(name, config)
        self._k = k

    def shape(self, running: RunningBatch, cap: IntArray, now_s: float) -> Shape:
        """The same chain for all."""
        return Shape(DraftPlan(self._k))

    def latency_budget(self, running: RunningBatch, now_s: float, least_s: float) -> float:
        """Seconds that the iteration may take; ``least_s``: without speculation, so who has less is late."""
        left = time_left(running, now_s)
        most_urgent = float(left[left >= least_s].min(initial=np.inf))
        return max(most_urgent, MIN_SHARE * float(running.tpot_slo_s.min()))

    def choose(self, plan: IterationPlan, trees: CandidateTrees) -> Selection:
        """Whole chains in the order of urgency, while the iteration's predicted time is within the budget."""
        running, n = plan.running, trees.n_rows
        ranked = rank(trees, path_probability(trees), plan.cap)
        seconds = self.seconds(plan, trees, trees.n_nodes)
        within = seconds <= self.latency_budget(running, plan.now_s, float(seconds[0]))
        most = int(np.flatnonzero(within)[-1]) if within.any() else 0
        most = min(most, max(0, plan.budget - n))
        order = np.argsort(time_left(running, plan.now_s), kind="stable")
        fits = ranked.available[order].cumsum() <= most
        counts = np.zeros(n, np.int64)
        counts[order] = np.where(fits, ranked.available[order], 0)
        return take_prefix(ranked, counts, np.zeros(n, np.int64), trees.n_nodes)
