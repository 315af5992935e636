"""Changing policy and prefills of a running server: what the scheduler accepts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang.srt.managers.io_struct import SetInternalStateReq
from sglang.srt.managers.scheduler_components.internal_state import SchedulerInternalStateController

from adaserve.config import AdaServeConfig
from adaserve.engine.prefill import PrefillPacer
from adaserve.identity import NAME
from adaserve.patches.internal_state import _handlers
from adaserve.scheduler.costs import LearnedCosts
from adaserve.scheduler.latency import ForwardCost, LatencyModel

LATENCY = LatencyModel(ForwardCost(0.0005), ForwardCost(0.010, per_token_s=0.001), 0.001)


class Controller(SchedulerInternalStateController):
    """SGLang's own, with our hook applied."""

    def __init__(self, algorithm: str = NAME, alone: bool = True, learns: bool = False) -> None:
        self.chosen: list[Any] = []
        costs, ledger = LearnedCosts(LATENCY), SimpleNamespace()
        pacer = PrefillPacer(AdaServeConfig(), costs, ledger, {}, alone)  # type: ignore[arg-type]
        learner = SimpleNamespace(serve=self.chosen.append) if learns else None
        worker = SimpleNamespace(
            learner=learner,
            policies=SimpleNamespace(names=("none", "priced"), choose=self.chosen.append),
            prefill=pacer,
            number_requests=self.chosen.append,
        )
        self.pacer = pacer
        super().__init__(SimpleNamespace(spec_algorithm=algorithm, draft_worker=worker), False)  # type: ignore[arg-type]

    def _update_handlers(self) -> Any:
        theirs = super()._update_handlers()
        return _handlers(theirs, self) or theirs

    def change(self, key: str, value: float = 1) -> bool:
        return bool(self.set_internal_state(SetInternalStateReq(server_args={key: value})).updated)


def test_policy_and_prefills_change() -> None:
    c = Controller()
    assert c.change("adaserve_policy=none") and c.chosen == ["none"]
    assert not c.change("adaserve_policy=best")
    assert c.pacer.paces("priced") and c.change("adaserve_prefill=exclusive") and not c.pacer.paces("priced")
    assert c.change("adaserve_prefill=default") and c.pacer.paces("priced") and not c.pacer.paces("none")


def test_the_first_draft_can_be_served_for_comparison_where_one_learns() -> None:
    c = Controller(learns=True)
    assert c.change("adaserve_draft=first") and c.change("adaserve_draft=present")
    assert c.change("adaserve_draft=held") and not c.change("adaserve_draft=last")
    assert c.chosen == ["first", "present", "held"]
    assert not Controller().change("adaserve_draft=first")


def test_requests_can_be_numbered_again() -> None:
    c = Controller()
    assert c.change("adaserve_next_request", 40) and c.chosen == [40]
    assert not c.change("adaserve_next_request", 1.5) and not c.change("adaserve_next_request", -1)


def test_what_tensor_parallelism_needs_stays() -> None:
    """Ranks that prefill at different times would wait for each other for ever."""
    c = Controller(alone=False)
    assert not any(c.change(f"adaserve_prefill={mode}") for mode in ("slack", "default"))
    assert c.change("adaserve_prefill=exclusive") and not c.pacer.paces("priced")
    assert c.change("adaserve_policy=none"), "all ranks are told of that one"


def test_other_algorithms_are_left_alone() -> None:
    assert not Controller("EAGLE").change("adaserve_policy=none")
