"""The current policy's decisions about an iteration: the same on all ranks, and recorded if asked for."""

from __future__ import annotations

from dataclasses import dataclass

from adaserve.engine.policies import ServedPolicies
from adaserve.engine.rank_sync import RankSync
from adaserve.scheduler.interface import (
    CandidateTrees,
    IterationOutcome,
    IterationPlan,
    Policy,
    RunningBatch,
    Selection,
)
from adaserve.scheduler.iteration_recording import RecordedPrefill, Recorder
from adaserve.scheduler.selection import everything


@dataclass(eq=False)
class Decisions:
    """Calls the policy as the simulator does: plan, select, observe."""

    policies: ServedPolicies
    rank_sync: RankSync
    recorder: Recorder | None

    @property
    def policy(self) -> Policy:
        """The one that decides now."""
        return self.policies.current

    @property
    def speculates(self) -> bool:
        return self.policies.speculates

    def plan(self, running: RunningBatch, now_s: float) -> IterationPlan:
        plan = self.rank_sync.plan(lambda: self.policy.plan(running, now_s), running)
        if self.recorder is not None:
            self.recorder.planned(plan)
        return plan

    def select(self, plan: IterationPlan, trees: CandidateTrees) -> Selection:
        selection = self.rank_sync.decide(lambda: self.policy.select(plan, trees))
        if self.recorder is not None:
            self.recorder.selected(plan)
        return selection

    def take_all(self, policy: Policy, plan: IterationPlan, trees: CandidateTrees) -> Selection:
        """All candidates, of which ``policy`` learns: that of the plan; another one may decide by now."""
        selection = policy.select(plan, trees) if self.rank_sync.decides else everything(trees, plan.cap)
        if self.recorder is not None:
            self.recorder.selected(plan)
        return selection

    def observe(self, policy: Policy, outcome: IterationOutcome) -> None:
        """``policy``: that of the outcome's plan; another one may decide by now."""
        policy.observe(outcome)
        if self.recorder is not None:
            self.recorder.observed(outcome)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """A forward that read so many prompt tokens: nothing to decide, but a recording tells of it."""
        if self.recorder is not None:
            self.recorder.prefilled(RecordedPrefill(tokens, seconds))

    def forget(self, rid: str) -> None:
        """A request will not decode again, or not as it was."""
        self.policies.forget(rid)
        if self.recorder is not None:
            self.recorder.forget(rid)
