"""Baselines of fixed shape: no speculation, chains (vLLM-Spec), SpecInfer's static tree."""

from __future__ import annotations

from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.interface import DraftPlan, IntArray, RunningBatch
from adaserve.scheduler.policies.base import BasePolicy, Shape


class FixedPolicy(BasePolicy):
    """The same tree for every request, verified whole."""

    def __init__(self, name: str, config: PolicyConfig, branching: tuple[int, ...]) -> None:
        super().__init__(name, config)
        self._branching = branching

    def shape(self, running: RunningBatch, cap: IntArray, now_s: float) -> Shape:
        """Always the same."""
        width = max(self._branching, default=1)
        return Shape(DraftPlan(len(self._branching), width, self._branching if width > 1 else None))

    def wants_all(self, running: RunningBatch, tokens: int) -> bool:
        """Always."""
        return True
