"""Who is refused, with what reason; and how that becomes headers. No server."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException

from adaserve.engine.admission import shedding
from adaserve.engine.admission.shedding import MAX_JUDGED, Shedder
from adaserve.patches.http import load_headers
from adaserve.patches.http.load_headers import LoadHeaders, as_json, as_text, orca_metrics
from adaserve.patches.scheduler.shedding import _with_refusals
from adaserve.patches.scheduler.worker_interface import Load
from adaserve.slo.classes import SLO, SLOClass, SLOConfig

NOW = 100.0
CLASSES = SLOConfig(classes={"bulk": SLOClass(name="bulk", running_share=0.5), "chat": SLOClass(name="chat")})


class Request:
    """What is read of SGLang's Req."""

    def __init__(self, name: str = "chat", ttft_s: float = math.inf, waited_s: float = 0.0) -> None:
        self.rid, self.slo, self.arrival_s = f"{name}-{id(self)}", SLO(name, ttft_s=ttft_s), NOW - waited_s
        self.output_ids: list[int] = []


class Books:
    """A ledger, and the counts that it was told."""

    def __init__(self) -> None:
        self.counted: list[tuple[str, str]] = []
        self.stats = SimpleNamespace(shed=lambda *told: self.counted.append(told))

    def slo(self, req: Request) -> SLO:
        return req.slo

    def arrival_s(self, req: Request) -> float:
        return req.arrival_s


def shedder(wait_s: float | list[float], books: Books | None = None) -> Shedder:
    """Predicts these waits, one after the other; the last one from then on."""
    waits = list(wait_s) if isinstance(wait_s, list) else [wait_s]
    forecaster: Any = SimpleNamespace(wait_s=lambda *_: waits.pop(0) if len(waits) > 1 else waits[0])
    known: Any = books or Books()
    return Shedder(True, forecaster, known, CLASSES)


def load(waiting: list[Request], running: list[Request] | None = None) -> Load:
    return Load(running or [], None, waiting, slots=4, most_tokens=256, paced=True)


def refused(judge: Shedder, state: Load, now_s: float = NOW) -> list[tuple[str, int]]:
    return [(r.reason, r.retry_after_s) for _, r in judge.refusals(state, now_s)]


def test_nobody_without_a_ttft_slo_is_refused_for_waiting() -> None:
    assert refused(shedder(50.0), load([Request(waited_s=1e4), Request("bulk")])) == []


def test_a_ttft_slo_that_cannot_be_met() -> None:
    books = Books()
    assert refused(shedder(3.2, books), load([Request(ttft_s=1.0)])) == [("rejected-saturated", 3)]
    assert books.counted == [("chat", "rejected-saturated")]
    assert refused(shedder(0.9), load([Request(ttft_s=1.0)])) == []
    assert refused(shedder(0.9), load([Request(ttft_s=1.0, waited_s=0.2)])) == [("rejected-saturated", 1)]
    assert refused(shedder(1e9), load([Request(ttft_s=1.0)])) == [("rejected-saturated", 60)]


def test_a_prediction_is_made_once_but_time_passes() -> None:
    judge, waiting = shedder([0.5, 99.0]), load([Request(ttft_s=1.0)])
    assert refused(judge, waiting) == [] and refused(judge, waiting) == []
    assert refused(judge, waiting, NOW + 1.1) == [("rejected-ttl-expired", 60)]


def test_nothing_is_predicted_where_nothing_could_be_refused() -> None:
    """Neither late nor over a share: such requests leave the predictions of an iteration to others."""
    judge = shedder(2.5)
    others = [Request() for _ in range(MAX_JUDGED)]
    assert refused(judge, load([*others, Request(ttft_s=1.0)])) == [("rejected-saturated", 2)]


def test_the_queue_is_gone_through_until_nobody_can_be_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the load is taken once, however many wait."""
    books, taken = Books(), []
    monkeypatch.setattr(shedding, "replace", lambda *a, **k: taken.append(a) or replace(*a, **k))
    asked: list[Request] = []
    books.slo = lambda req: asked.append(req) or req.slo  # type: ignore[method-assign]
    waiting = [Request(ttft_s=9.0) for _ in range(1000)]
    assert refused(shedder(0.5, books), load(waiting)) == []
    assert asked == waiting[:MAX_JUDGED] and len(taken) == 1


def test_a_retracted_request_is_kept() -> None:
    had_its_first_token = Request(ttft_s=1.0, waited_s=9.0)
    had_its_first_token.output_ids = [1]
    assert refused(shedder(99.0), load([had_its_first_token])) == []


def test_a_class_over_its_share_while_others_wait() -> None:
    two = [Request("bulk"), Request("bulk")]
    assert refused(shedder(2.5), load([Request("bulk")], two)) == [("rejected-saturated", 3)]
    assert refused(shedder(0.0), load([Request("bulk")], two)) == [], "there is room for it"
    assert refused(shedder(2.5), load([Request("chat")], two)) == [], "its class has no limit"
    assert refused(shedder(2.5), load([Request("bulk")], two[:1])) == []


def test_those_refused_no_longer_count_for_those_behind() -> None:
    judge, waiting = shedder(2.5), [Request("bulk") for _ in range(4)]
    gone = [req for req, _ in judge.refusals(load(waiting), NOW)]
    assert gone == waiting[2:]


@pytest.mark.parametrize("waited_s", [0.0, 2.0])
def test_a_burst_is_judged_a_few_at_a_time(waited_s: float) -> None:
    """Each prediction holds up all that run."""
    judge, waiting, calls = shedder(2.5), [Request(ttft_s=1.0, waited_s=waited_s) for _ in range(40)], 0
    while waiting:
        gone = [req for req, _ in judge.refusals(load(waiting), NOW)]
        assert gone == waiting[:MAX_JUDGED]
        waiting, calls = waiting[len(gone) :], calls + 1
    assert calls == -(-40 // MAX_JUDGED)


def test_an_abort_says_why() -> None:
    request = Request(ttft_s=1.0, waited_s=1e9)
    worker: Any = SimpleNamespace(
        shedder=shedder(2.0),
        policies=SimpleNamespace(current=SimpleNamespace(name="x")),
        prefill=SimpleNamespace(paces=lambda _: True, most_beside=lambda _: 0),
    )
    scheduler = SimpleNamespace(
        draft_worker=worker, chunked_req=None,
        running_batch=SimpleNamespace(reqs=[]), waiting_queue=[request], max_running_requests=4,
        chunked_prefill_size=256,
    )  # fmt: skip
    (abort,) = _with_refusals([], scheduler) or []
    assert abort.rid == request.rid and abort.finished_reason["status_code"] == 429
    assert abort.finished_reason["dropped_reason"] == "rejected-ttl-expired"
    assert "the TTFT SLO of 1000 ms has passed" in abort.finished_reason["message"]
    worker.shedder.enabled = False
    assert _with_refusals([], scheduler) is None


# -- headers --------------------------------------------------------------------------------

REASON = {
    "type": "abort",
    "status_code": 429,
    "message": "late",
    "dropped_reason": "rejected-saturated",
    "retry_after_s": 7,
}


def answer(status: int, reason: dict[str, Any], orca: bool = False) -> dict[bytes, bytes]:
    """The response headers of a request that SGLang ended with ``reason``, in a task of its own."""

    async def ended(*_: Any) -> None:
        return None

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def ends() -> None:
            await load_headers._ended(ended, None, {"meta_info": {"finish_reason": reason}}, None, False)

        await asyncio.create_task(ends())
        await send({"type": "http.response.start", "status": status, "headers": [(b"a", b"b")]})

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "headers": []}
    asyncio.run(LoadHeaders(app, orca)(scope, None, send))  # type: ignore[arg-type]
    return dict(sent[0]["headers"])


def test_headers_of_a_request_that_was_shed() -> None:
    got = answer(429, REASON)
    assert got == {b"a": b"b", b"retry-after": b"7", b"x-llm-d-request-dropped-reason": b"rejected-saturated"}
    assert answer(429, {"type": "abort", "status_code": 429}) == {b"a": b"b"}, "somebody else's 429"
    assert answer(200, REASON) == {b"a": b"b"}


def test_the_load_is_not_told_to_who_has_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_headers, "_of_load", lambda *_: [(load_headers.ORCA, b"TEXT a=1")])
    told = {status: load_headers.ORCA in answer(status, {}, orca=True) for status in (200, 401, 403, 429)}
    assert told == {200: True, 401: False, 403: False, 429: True}


@pytest.mark.parametrize("is_single", [True, False])
def test_a_stream_fails_before_its_status_is_sent(is_single: bool) -> None:
    """A batch may have been answered in part; its stream goes on, and an event says what was refused."""
    out = {"meta_info": {"finish_reason": REASON}}

    async def ended(*_: Any) -> Any:
        return out

    async def stream() -> Any:
        load_headers._noted.set({})
        load_headers._remember(None, SimpleNamespace(is_single=is_single))
        return await load_headers._ended(ended, None, out, None, True)

    if not is_single:
        assert asyncio.run(stream()) is out
        return
    with pytest.raises(HTTPException) as caught:
        asyncio.run(stream())
    assert (caught.value.status_code, caught.value.detail) == (429, "late")


def test_orca_in_text_and_in_json() -> None:
    forecast = {
        "admission_open": 0.5,
        "classes": {
            "chat": {"tpot_ms": 10.0, "headroom": 1.25, "wait_ms": 0.0},
            "tier.1": {"headroom": 1.5},
            "default": {"headroom": None},
        },
    }
    idle = {"num_running_reqs": 1, "num_waiting_reqs": 0, "token_usage": 0.25, "slo": forecast}
    busy = {**idle, "num_running_reqs": 9}
    metrics = orca_metrics([busy, idle], 2.5)
    assert as_text(metrics) == (
        "TEXT rps_fractional=2.5, application_utilization=0.8, named_metrics.kv_cache_usage=0.25, "
        "named_metrics.running_requests=1, named_metrics.waiting_requests=0, "
        "named_metrics.admission_open=0.5, named_metrics.headroom_chat=1.25, "
        "named_metrics.headroom_tier.1=1.5"
    )
    nested = json.loads(as_json(metrics).removeprefix("JSON "))
    named = nested.pop("named_metrics")
    assert named["headroom_chat"] == 1.25 and named["headroom_tier.1"] == 1.5
    assert nested == {"rps_fractional": 2.5, "application_utilization": 0.8}
    assert orca_metrics([], 2.5) == {}
    forecast["classes"]["chat"]["headroom"] = forecast["classes"]["tier.1"]["headroom"] = None
    assert "application_utilization" not in orca_metrics([idle], 2.5)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, math.nan])
def test_a_share_that_is_none(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        SLOClass(name="bulk", running_share=share)
