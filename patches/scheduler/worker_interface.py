"""What hooks in the scheduler process may call on our worker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from adaserve.scheduler.admission.prefill import PrefillPlan
from adaserve.scheduler.interface import Policy
from adaserve.slo.forecast_types import Forecast
from adaserve.slo.ledger import SLOLedger


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of a scheduler; all of them are SGLang's ``Req``."""

    running: Sequence[Any]  # those that decode
    started: Any | None  # whose prompt is partly in the cache
    waiting: Sequence[Any]  # the queue
    slots: int  # requests that may run at the same time
    most_tokens: int  # of a prefill
    paced: bool  # whether prefills are paced
    most_beside: int = 0  # tokens of a prefill that shares a forward with running requests; 0 = none does
    first: int | None = None
    """How many of the queue, from its beginning on, may start before all others; None = nobody goes first."""

    @property
    def joining(self) -> int:
        """Requests that will decode beside the running ones before one that arrives now."""
        return int(self.started is not None) + len(self.waiting)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request gets 429 in place of an answer."""

    reason: str  # as llm-d's header x-llm-d-request-dropped-reason says it
    message: str
    retry_after_s: int


class Policies(Protocol):
    """The policies that a server can switch between."""

    current: Policy

    def get(self, name: str) -> Policy:
        """Raises ValueError for a name that cannot be chosen here."""
        ...

    def choose(self, name: str) -> None:
        """From the next iteration on. Raises as ``get``."""
        ...


class Pacer(Protocol):
    """Decides when prefills run."""

    def set_mode(self, mode: str | None) -> None:
        """One of adaserve.config.PREFILLS, from the next prefill on; None = by the policy."""
        ...

    def paces(self, policy: str) -> bool:
        """Whether prefills are paced under this policy."""
        ...

    def most_beside(self, policy: str) -> int:
        """Prompt tokens that may share a forward with running requests under this policy."""
        ...

    def plan(self, load: Load, now_s: float) -> PrefillPlan:
        """Prompt tokens to prefill before the next decode iteration."""
        ...


class Forecasts(Protocol):
    """Says what one more request would get."""

    latest: Forecast | None

    def is_due(self, idle: bool, now_s: float) -> bool:
        """Whether the latest forecast is too old."""
        ...

    def renew(self, load: Load, now_s: float) -> Forecast:
        """Makes a forecast and publishes it."""
        ...

    def arrived(self, req: Any, load: Load) -> None:
        """Predicts the TPOT of a request that is about to be queued."""
        ...


class Sheds(Protocol):
    """Decides which waiting requests are refused."""

    enabled: bool

    def refusals(self, load: Load, now_s: float) -> list[tuple[Any, Refusal]]:
        """Requests of the queue that must not wait any longer, each with the reason."""
        ...


class Learning(Protocol):
    """A draft that learns."""

    def serve(self, name: str) -> None:
        """The "first" draft, the "present" one, or that one "held" as it is."""
        ...

    def look(self, states: Iterable[Any], now_s: float) -> None:
        """Takes in what the trainer says. ``states``: requests that run, so that it may have to wait."""
        ...


class WorkerInterface(Protocol):
    """The speculative worker of one scheduler process."""

    ledger: SLOLedger

    @property
    def policies(self) -> Policies: ...

    @property
    def prefill(self) -> Pacer: ...

    @property
    def forecaster(self) -> Forecasts: ...

    @property
    def shedder(self) -> Sheds: ...

    @property
    def learner(self) -> Learning | None:
        """None where no draft learns."""
        ...

    def read_beside(self, batch: Any) -> None:
        """The next decode iteration reads the prompts of SGLang's ``batch`` in its forward."""
        ...

    def fix_baseline(self, baseline_s: float) -> None:
        """SLOs that are multiples of the baseline follow this one, whatever is learned."""
        ...

    def number_requests(self, number: int) -> None:
        """The next request to be prefilled has this number."""
        ...

    def ended_early(self, rid: str, holds_row: bool) -> None:
        """A request ended before it decoded, if the worker knows it; ``holds_row``: its row of the request
        pool and the KV slots there are still its own, or were until a moment ago."""
        ...

    def report(self) -> dict[str, Any]:
        """State for ``/server_info`` and the live page; JSON values."""
        ...


def worker_of(scheduler: Any) -> WorkerInterface:
    """The worker of an SGLang scheduler."""
    worker: WorkerInterface = scheduler.draft_worker
    return worker


def is_paced(worker: WorkerInterface) -> bool:
    """Whether prefills are paced under the policy that serves now."""
    return worker.prefill.paces(worker.policies.current.name)


def most_beside(worker: WorkerInterface) -> int:
    """Prompt tokens that may share a forward with running requests now."""
    return worker.prefill.most_beside(worker.policies.current.name)


def load_of(scheduler: Any) -> Load:
    """What runs and waits in an SGLang scheduler now."""
    started = scheduler.chunked_req
    return Load(
        running=[r for r in scheduler.running_batch.reqs if r is not started and not r.finished()],
        started=started,
        waiting=scheduler.waiting_queue,
        slots=scheduler.max_running_requests,
        most_tokens=scheduler.chunked_prefill_size or scheduler.max_prefill_tokens,
        paced=is_paced(worker_of(scheduler)),
        most_beside=most_beside(worker_of(scheduler)),
    )
