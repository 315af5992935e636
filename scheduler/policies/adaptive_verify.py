"""Adaptive verification as in vLLM: one token budget over all requests, without SLOs.

Source: vLLM's documentation, ``features/speculative_decoding/adaptive_verification``, and its pull requests
47808 and 52228. Every request drafts the same chain. Each drafted token is scored by its probability to
survive, a running product of estimates per position; the best ones of all requests are verified, as many as
promise the most accepted tokens per second by the profiled costs. vLLM sizes the budget by the iteration
before, since it must not wait for its GPU; here it is sized by the chains themselves, and the costs are the
learned ones, so this is the rule at its best.
"""

from __future__ import annotations

import numpy as np

from adaserve.scheduler.acceptance import find_tested
from adaserve.scheduler.acceptance_calibration import claimed_probability, path_product
from adaserve.scheduler.averages import MovingAverage
from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.interface import (
    BoolArray,
    CandidateTrees,
    DraftPlan,
    FloatArray,
    IntArray,
    IterationOutcome,
    IterationPlan,
    RunningBatch,
    Selection,
)
from adaserve.scheduler.node_pricing import explore, price_nodes
from adaserve.scheduler.policies.base import BasePolicy, Shape
from adaserve.scheduler.selection import everything, within_cap

RATE = 0.05
"""Step of the stochastic gradient."""
TRY_EVERY = 16
"""Iterations of which one verifies some tokens even where none pays."""
SURE = 1e-4
"""Draft probabilities are kept this far from 0 and 1."""


class AcceptanceModel:
    """p = sigmoid(a + b logit(q) + c (depth - 1)), learned online; it starts as p = q.

    vLLM's has an a and a b for each depth, goes by how much the draft prefers its best token, and verifies
    whole chains until it has been fitted a few times.
    """

    def __init__(self) -> None:
        self.weights = np.array([0.0, 1.0, 0.0])

    @staticmethod
    def _features(q: FloatArray, depth: IntArray) -> FloatArray:
        q = np.clip(q, SURE, 1.0 - SURE)
        return np.stack([np.ones_like(q), np.log(q / (1.0 - q)), depth - 1.0], axis=1)

    def predict(self, q: FloatArray, depth: IntArray) -> FloatArray:
        """Probability that a token is accepted if its parent is, [m]."""
        p: FloatArray = 1.0 / (1.0 + np.exp(-self._features(q, depth) @ self.weights))
        return p

    def learn(self, q: FloatArray, depth: IntArray, accepted: BoolArray) -> None:
        """One gradient step on the log-loss of the tested tokens, [t]."""
        if len(q):
            x = self._features(q, depth)
            self.weights -= RATE * (x * (self.predict(q, depth) - accepted)[:, None]).mean(axis=0)


class AdaptiveVerifyPolicy(BasePolicy):
    """Chains of ``k``, of which the tokens with the best rate are verified."""

    def __init__(self, name: str, config: PolicyConfig, k: int) -> None:
        super().__init__(name, config)
        self._k = k
        self.acceptance = AcceptanceModel()
        self._bought = MovingAverage(0.1, start=1.0)  # share of the candidates

    def shape(self, running: RunningBatch, cap: IntArray, now_s: float) -> Shape:
        """The same chain for all."""
        return Shape(DraftPlan(self._k))

    def wants_all(self, running: RunningBatch, tokens: int) -> bool:
        """Yes if verifying all of them takes less extra time than waiting for a selection would."""
        return self._is_quicker(running, tokens, self._bought.value)

    def select(self, plan: IterationPlan, trees: CandidateTrees) -> Selection:
        """Also learns how many of the candidates pay."""
        chosen = self.choose(plan, trees)
        if trees.n_nodes:
            self._bought.add(chosen.keep.mean())
        return everything(trees, plan.cap, self.values(plan, trees)) if plan.takes_all else chosen

    def values(self, plan: IterationPlan, trees: CandidateTrees) -> FloatArray:
        """As the acceptance model has learned, [m]; 0 for those that may not be kept."""
        q = claimed_probability(trees)
        p = np.where(q > 0, self.acceptance.predict(q, trees.depth), 0.0)  # impossible ones stay so
        return within_cap(trees, path_product(p, trees.above), plan.cap)

    def choose(self, plan: IterationPlan, trees: CandidateTrees) -> Selection:
        """The prefix of all chains' tokens that promises the most tokens per second."""
        if not trees.n_nodes:
            return Selection.nothing(trees.n_rows)
        n, f = trees.n_rows, self.values(plan, trees)
        seconds = self.seconds(plan, trees, max(0, min(plan.budget - n, trees.n_nodes)))
        priced = price_nodes(trees, f, np.ones(n), seconds)
        if not priced.selection.keep.any() and plan.iteration % TRY_EVERY == TRY_EVERY - 1:
            return explore(trees, f, priced.value, min(n, len(seconds) - 1))
        return priced.selection

    def observe(self, outcome: IterationOutcome) -> None:
        """Recalibrates the acceptance model as well."""
        super().observe(outcome)
        if outcome.trees.n_nodes:
            tested = find_tested(outcome)
            q = claimed_probability(outcome.trees)[tested.node]
            self.acceptance.learn(q, outcome.trees.depth[tested.node], tested.accepted)
