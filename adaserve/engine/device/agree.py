"""What tensor-parallel ranks must decide alike: the first rank decides, the others follow.

Every rank drafts and verifies the same tokens, so that all ranks' forwards fit together. Logits are the same
on all ranks, and so is what follows from them and from the plan alone; plans follow from measured times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Protocol

import numpy as np
import torch

from adaserve.engine.device.choose import Choice
from adaserve.engine.device.selection import Kept
from adaserve.scheduler.interface import IterationPlan, RunningBatch


class Group(Protocol):
    """SGLang's ``GroupCoordinator``, as far as it is needed here."""

    world_size: int
    rank_in_group: int

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any: ...

    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor: ...


class Agreement:
    """Plans and selections of rank 0 on every rank. With one rank it is free."""

    def __init__(self, group: Group) -> None:
        self._group = group

    @property
    def alone(self) -> bool:
        return self._group.world_size == 1

    @property
    def decides(self) -> bool:
        """Whether this rank's policy is the one that counts."""
        return self._group.rank_in_group == 0

    def plan(self, make: Callable[[], IterationPlan], running: RunningBatch) -> IterationPlan:
        """Rank 0's plan, about this rank's ``running`` (the same requests, with its own clock)."""
        if self.alone:
            return make()
        values = None
        if self.decides:
            plan = make()
            values = {f.name: getattr(plan, f.name) for f in fields(plan) if f.name != "running"}
        return IterationPlan(running=running, **self._group.broadcast_object(values, src=0))

    def choice(self, make: Callable[[], Choice], empty: Callable[[], Kept]) -> Choice:
        """Rank 0's selection; ``empty`` gives tensors of its shapes to the other ranks."""
        if self.alone:
            return make()
        choice = make() if self.decides else Choice(empty(), np.zeros(0, np.int64))
        kept = choice.kept
        packed = torch.cat([kept.keep.long(), kept.slo_counts[:, None]], dim=1)
        packed = self._group.broadcast(packed.contiguous(), src=0)
        expected = self._group.broadcast(kept.expected.contiguous(), src=0)
        keep = packed[:, :-1].bool()
        kept = Kept(keep, keep.sum(dim=1), packed[:, -1], expected)
        return replace(choice, kept=kept, counts=kept.counts.cpu().numpy())
