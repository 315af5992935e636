"""AdaServe's published rules (v1 and EuroSys) and the ablations that differ in one ingredient."""

from __future__ import annotations

import math
from dataclasses import replace

from adaserve.scheduler.interface import (
    CandidateTrees,
    DraftPlan,
    IntArray,
    IterationPlan,
    RunningBatch,
    Selection,
)
from adaserve.scheduler.policies.base import BasePolicy, Shape
from adaserve.scheduler.selection import equal_share, path_probability, two_phase


def eurosys_shape(
    n: int, *, B1: float, B2: float, c1: float, c2: int, d: tuple[int, int], w_max: int
) -> tuple[int, int]:
    """(d, w) of AdaServe (EuroSys) section 5.2: d = clamp(floor(B1/(n + c1)) - 1, D_min, D_max) (Eq. 8),
    w = clamp(floor(B2/n) + c2, 1, W_max) (Eq. 9). The paper writes clip(upper, lower, x)."""
    depth = min(max(math.floor(B1 / (n + c1)) - 1, d[0]), d[1])
    width = min(max(math.floor(B2 / n) + c2, 1), w_max)
    return depth, width


def v1_shape(n: int, B: int, d_max: int, w_max: int) -> tuple[int, int]:
    """(d, w) of arXiv v1: d = max(1, min(D_max, ceil(B/n))), w = max(1, min(W_max, floor(B/n)))."""
    return max(1, min(d_max, math.ceil(B / n))), max(1, min(w_max, B // n))


class AdaServePolicy(BasePolicy):
    """The EuroSys rules: Algorithm 2 with the corrections listed in ``tests/scheduler/paper_algorithms.py``.

    The ablations below are those of v1, section 6.4. The EuroSys version calls EqualGreedy Equal Scheduling
    (section 6.3).
    """

    slo_aware = True

    def shape(self, running: RunningBatch, cap: IntArray, now_s: float) -> Shape:
        """Depth and width from n alone; nothing is drafted when only roots fit (base class)."""
        n, c = len(running), self.config
        B = self.budget
        B1 = B if c.B1 is None else c.B1
        B2 = 0.75 * B if c.B2 is None else c.B2
        d, w_max = (c.d_min, c.d_max), c.widest(n)
        depth, width = eurosys_shape(n, B1=B1, B2=B2, c1=c.c1, c2=c.c2, d=d, w_max=w_max)
        return Shape(DraftPlan(depth, width), B, self._n_max(n, B))

    def _n_max(self, n: int, B: int) -> int:
        # The authors' public code: int(1.2 B / n) added nodes; at least 1 or the phase does nothing.
        return max(1, int(self.config.n_max_factor * B / n))

    def wants_all(self, running: RunningBatch, tokens: int) -> bool:
        """Yes: within the budget the rules take all candidates anyway."""
        return True

    def choose(self, plan: IterationPlan, trees: CandidateTrees) -> Selection:
        """SLO phase, then throughput phase (Algorithm 2 lines 9-23)."""
        f = path_probability(trees)
        # Candidates that cost no step are deeper.
        deepest = max(plan.draft.depth, int(trees.depth.max(initial=0)))
        return two_phase(trees, f, plan.need, deepest, plan.budget, plan.n_max, plan.cap)


class AdaServeV1Policy(AdaServePolicy):
    """The arXiv v1 shape rule with the same selection."""

    def shape(self, running: RunningBatch, cap: IntArray, now_s: float) -> Shape:
        """d and w of v1; n > B drafts nothing instead of v1's wasted max(1, ...)."""
        n, B = len(running), self.budget
        depth, width = v1_shape(n, B, self.config.d_max, self.config.widest(n))
        return Shape(DraftPlan(depth, width), B, self._n_max(n, B))


class GlobalGreedyPolicy(AdaServePolicy):
    """Throughput phase only."""

    slo_aware = False

    choose = BasePolicy.choose


class EqualGreedyPolicy(AdaServePolicy):
    """The same number of nodes for every request, its best ones."""

    slo_aware = False

    def shape(self, running: RunningBatch, cap: IntArray, now_s: float) -> Shape:
        """Nothing is drafted if a share has room only for the root."""
        shape = super().shape(running, cap, now_s)
        return shape if shape.n_max else replace(shape, draft=DraftPlan(0))

    def _n_max(self, n: int, B: int) -> int:
        return max(0, B // n - 1)

    def choose(self, plan: IterationPlan, trees: CandidateTrees) -> Selection:
        """An equal share of B for each."""
        assert plan.n_max is not None
        n, budget = trees.n_rows, plan.budget
        if budget >= n + trees.n_nodes:  # it was cut to what all candidates need, and one may have them all
            budget = max(budget, n * (1 + plan.n_max))
        return equal_share(trees, path_probability(trees), budget, plan.cap)
