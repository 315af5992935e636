"""What hooks in the scheduler process may call on our worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from adaserve.identity import is_ours
from adaserve.scheduler.interface import Policy
from adaserve.scheduler.prefill import PrefillPlan
from adaserve.slo.ledger import SLOLedger


class Pacer(Protocol):
    """Decides when prefills run."""

    def check_mode(self, mode: str | None) -> None:
        """One of adaserve.config.PREFILLS; None = by the policy. Raises ValueError if not possible."""
        ...

    def set_mode(self, mode: str | None) -> None:
        """As ``check_mode``, from the next prefill on."""
        ...

    def paces(self, policy: str) -> bool:
        """Whether prefills are paced under this policy."""
        ...

    def plan(
        self,
        running: Sequence[Any],
        started: Any | None,
        waiting: Sequence[Any],
        most_tokens: int,
        now_s: float,
    ) -> PrefillPlan:
        """Prompt tokens to prefill before the next decode iteration; requests are SGLang's ``Req``."""
        ...


class ServedWorker(Protocol):
    """The speculative worker of one scheduler process."""

    ledger: SLOLedger
    policy: Policy

    @property
    def prefill(self) -> Pacer: ...

    @property
    def policy_names(self) -> tuple[str, ...]:
        """What ``set_policy`` accepts."""
        ...

    def set_policy(self, name: str) -> None: ...

    def report(self) -> dict[str, Any]:
        """State for ``/server_info`` and the live page; JSON values."""
        ...


def worker_of(scheduler: Any) -> ServedWorker | None:
    """The worker of an SGLang scheduler; None when another algorithm runs."""
    if not is_ours(scheduler.spec_algorithm):
        return None
    worker: ServedWorker = scheduler.draft_worker
    return worker
