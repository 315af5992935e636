"""Changing policy and prefills of a running server: what the scheduler accepts, and what a client is told."""

from __future__ import annotations

import asyncio
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import SetInternalStateReq, msgpack_decode, msgpack_encode
from sglang.srt.managers.scheduler_components.internal_state import SchedulerInternalStateController
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from adaserve.boundary import RequestError
from adaserve.config import AdaServeConfig
from adaserve.engine.admission.prefill import PrefillPacer
from adaserve.engine.policies import ServedPolicies
from adaserve.patches.scheduler.internal_state import _change, _told
from adaserve.scheduler.costs.latency import ForwardCost, LatencyModel
from adaserve.scheduler.costs.learned import LearnedCosts
from tests.engine.ranks import ALONE

LATENCY = LatencyModel(ForwardCost(0.0005), ForwardCost(0.010, per_token_s=0.001), 0.001)


class Server:
    """SGLang's own classes, with our hooks applied; the scheduler's answer goes over its wire."""

    def __init__(self, learns: bool = False) -> None:
        self.chosen: list[Any] = []
        config, costs, device = AdaServeConfig(), LearnedCosts(LATENCY), SimpleNamespace()
        device.stops_early, device.least_gain, device.most_beams = True, 0.05, None
        self.policies = ServedPolicies(config, costs, device)  # type: ignore[arg-type]
        self.pacer = PrefillPacer(config, costs, SimpleNamespace(), {}, ALONE)  # type: ignore[arg-type]
        worker = SimpleNamespace(
            learner=SimpleNamespace(serve=self.chosen.append) if learns else None,
            policies=self.policies,
            prefill=self.pacer,
            number_requests=self.chosen.append,
            fix_baseline=self.chosen.append,
        )
        scheduler: Any = SimpleNamespace(draft_worker=worker)
        controller = SchedulerInternalStateController(scheduler, False)

        async def ask(request: Any) -> list[Any]:
            output = _change(SchedulerInternalStateController.set_internal_state, controller, request)
            return [msgpack_decode(msgpack_encode(output))]

        self._manager = SimpleNamespace(
            auto_create_handle_loop=lambda: None, set_internal_state_communicator=ask
        )

    def change(self, key: str, value: float = 1, **more: float) -> list[bool]:
        request = SetInternalStateReq(server_args={**more, key: value})
        return asyncio.run(_told(TokenizerManager.set_internal_state, self._manager, request))

    def refuses(self, key: str, value: float, why: str, **more: float) -> bool:
        with pytest.raises(RequestError, match=why):
            self.change(key, value, **more)
        return True


def test_policy_and_prefills_change() -> None:
    s = Server()
    assert s.change("adaserve_policy=none") == [True] and s.policies.current.name == "none"
    assert s.pacer.paces("priced") and s.change("adaserve_prefill=exclusive") and not s.pacer.paces("priced")
    assert s.change("adaserve_prefill=default") and s.pacer.paces("priced") and not s.pacer.paces("none")


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("adaserve_policy=best", 1, "unknown policy 'best': known are adaserve, .*priced"),
        ("adaserve_policy=priced@7", 1, "cannot read a window of '7' here"),
        ("adaserve_policy", 1, "unknown policy ''"),
        ("adaserve_prefill=fast", 1, "'adaserve_prefill=fast' is not .*slack|exclusive|default"),
        ("adaserve_mode=slack", 1, "'adaserve_mode=slack' is not a setting"),
        ("adaserve_mode=first", 1, "'adaserve_mode=first' is not a setting"),
        ("adaserve_draft=last", 1, re.escape("adaserve_draft=first|held|present")),
        ("adaserve_draft=first", 1, "start the server with --learn"),
        ("adaserve_baseline_ms", 0, "is 0: it should be above 0 and below 1000000"),
        ("adaserve_baseline_ms", 1e6, "below 1000000"),
        ("adaserve_baseline_ms", math.nan, "is nan"),
        ("adaserve_next_request", 1.5, "is 1.5: it should be a whole number from 0"),
        ("adaserve_next_request", -1, "whole number"),
        ("adaserve_next_request", math.nan, "is nan: it should be a whole number"),
        ("adaserve_next_request", math.inf, "is inf"),
        ("pp_max_micro_batch_size", 1, "'pp_max_micro_batch_size' is not a setting .*adaserve_policy=NAME"),
    ],
)
def test_a_client_is_told_what_is_wrong_and_nothing_changes(key: str, value: float, why: str) -> None:
    s = Server()
    assert s.refuses(key, value, why, **{"adaserve_policy=none": 1})
    assert s.policies.current.name == "priced"


def test_the_first_draft_can_be_served_for_comparison_where_one_learns() -> None:
    s = Server(learns=True)
    assert s.change("adaserve_draft=first") and s.change("adaserve_draft=present")
    assert s.change("adaserve_draft=held") and s.chosen == ["first", "present", "held"]


def test_requests_can_be_numbered_again() -> None:
    s = Server()
    assert s.change("adaserve_next_request", 40) and s.change("adaserve_next_request", 0)
    assert s.chosen == [40, 0]


def test_the_baseline_can_be_fixed() -> None:
    s = Server()
    assert s.change("adaserve_baseline_ms", 12.5) and s.chosen == [0.0125]
