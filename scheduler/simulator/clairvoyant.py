"""Upper bounds: ``priced`` that knows what no policy can, to see how far the others are from the limit."""

from __future__ import annotations

import numpy as np

from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.interface import CandidateTrees, DraftPlan, FloatArray, IterationPlan
from adaserve.scheduler.policies.priced import PricedPolicy
from adaserve.scheduler.selection import within_cap
from adaserve.scheduler.simulator.trees import ChildSource, Drafted, KeepDrafting, TreeSampler

CLAIRVOYANT = ("clairvoyant", "true-probabilities")


class ClairvoyantPolicy(PricedPolicy):
    """Selects by the true path probabilities, or (``outcomes``) by which nodes will be accepted.

    Depth and width are still chosen before anything is drafted, so with outcomes it verifies no node in vain
    but may still draft some.
    """

    def __init__(self, name: str, config: PolicyConfig) -> None:
        super().__init__(name, config)
        self.outcomes = name == "clairvoyant"
        self._truth: FloatArray = np.zeros(0)

    def reveal(self, drafted: Drafted) -> None:
        """Called by the sampler right after drafting."""
        self._truth = drafted.fate().astype(np.float64) if self.outcomes else drafted.path_acceptance()

    def values(self, plan: IterationPlan, trees: CandidateTrees) -> FloatArray:
        """The truth instead of an estimate, [m]."""
        if not trees.n_nodes:  # nothing was drafted, so nothing was revealed
            return np.zeros(0)
        return within_cap(trees, self._truth, plan.cap)


class RevealingSampler(TreeSampler):
    """Tells the policy which of the trees that it has just drawn will be accepted."""

    def __init__(self, source: ChildSource, rng: np.random.Generator, policy: ClairvoyantPolicy) -> None:
        super().__init__(source, rng)
        self._policy = policy

    def draft(
        self, draft: DraftPlan, difficulty: FloatArray, bias: FloatArray, keep_drafting: KeepDrafting
    ) -> Drafted:
        """See TreeSampler."""
        drafted = super().draft(draft, difficulty, bias, keep_drafting)
        self._policy.reveal(drafted)
        return drafted
