"""Decisions that all tensor-parallel ranks must share: the first rank decides, the others follow.

Every rank reads, drafts and verifies the same tokens, so that all ranks' forwards fit together. What is read
when, plans and selections follow from measured times, which differ from rank to rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, Protocol, TypeVar

from adaserve.scheduler.interface import IterationPlan, RunningBatch

Decided = TypeVar("Decided")


class Group(Protocol):
    """What is needed here of SGLang's ``GroupCoordinator``."""

    world_size: int
    rank_in_group: int

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any: ...


class RankSync:
    """Rank 0's decisions on every rank. With one rank it is free."""

    def __init__(self, group: Group) -> None:
        self._group = group

    @property
    def alone(self) -> bool:
        return self._group.world_size == 1

    @property
    def decides(self) -> bool:
        """Whether this rank's policy is the one that counts."""
        return self._group.rank_in_group == 0

    def decide(self, make: Callable[[], Decided]) -> Decided:
        """What rank 0 makes; the other ranks' rules are not asked."""
        if self.alone:
            return make()
        decided: Decided = self._group.broadcast_object(make() if self.decides else None, src=0)
        return decided

    def plan(self, make: Callable[[], IterationPlan], running: RunningBatch) -> IterationPlan:
        """Rank 0's plan, about this rank's ``running`` (the same requests, with its own clock)."""
        if self.alone:
            return make()

        def values() -> dict[str, Any]:
            plan = make()
            return {f.name: getattr(plan, f.name) for f in fields(plan) if f.name != "running"}

        return IterationPlan(running=running, **self.decide(values))
