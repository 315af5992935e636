"""Response headers for routers: ORCA's ``endpoint-load-metrics``, and ``Retry-After`` of a shed request.

Why: SGLang's routes make their responses from a status and a message alone. What a header is made of is noted
while the request is handled, and added when its response starts. A stream's status is sent with its first
output, so a stream that is shed must fail there, and not by an event in a good answer.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from functools import partial
from typing import Any

from fastapi import HTTPException
from sglang.srt.plugins.hook_registry import HookType
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adaserve.asgi import put_around
from adaserve.config import AdaServeConfig
from adaserve.patches import hook, tokenizer_manager
from adaserve.patches.scheduler.shedding import REASON, RETRY_AFTER

ORCA = b"endpoint-load-metrics"
ORCA_FORMAT = b"endpoint-load-metrics-format"

STRANGERS = (401, 403)
"""Statuses of answers to clients without a key, which learn nothing about the server."""

RATE_OVER_S = 10.0
NAMED = "named_metrics"

_noted: ContextVar[dict[str, Any] | None] = ContextVar("adaserve_noted", default=None)
"""The request at hand, and why it was shed; one object for all tasks that serve it."""

_REQUEST = "request"


def register() -> None:
    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    hook(f"{manager}.generate_request", _remember, HookType.BEFORE)
    hook(f"{manager}._handle_abort_finish_reason", _ended, HookType.AROUND)


def mount(app: Any) -> None:
    """Puts the headers around SGLang's app."""
    put_around(app, partial(LoadHeaders, orca=AdaServeConfig.load().orca))


def _remember(self: Any, obj: Any, request: Any = None) -> None:
    if (noted := _noted.get()) is not None:
        noted[_REQUEST] = obj


async def _ended(
    original: Callable[..., Awaitable[Any]], self: Any, out: dict[str, Any], state: Any, is_stream: bool
) -> Any:
    """Also raises for a stream that was shed; of a batch, other parts may have been answered already."""
    reason, noted = out["meta_info"]["finish_reason"], _noted.get()
    if noted is None or REASON not in reason:
        return await original(self, out, state, is_stream)
    noted.update({name: reason[name] for name in (REASON, RETRY_AFTER)})
    handled = await original(self, out, state, is_stream)
    if is_stream and getattr(noted.get(_REQUEST), "is_single", False):
        raise HTTPException(reason["status_code"], reason["message"])
    return handled


class LoadHeaders:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, orca: bool) -> None:
        self._app, self._orca = app, orca
        self._answered_s: deque[float] = deque()  # of the last RATE_OVER_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        noted: dict[str, Any] = {}
        _noted.set(noted)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [*_of_shed(message["status"], noted)]
                if self._orca and scope["method"] == "POST" and message["status"] not in STRANGERS:
                    more += _of_load(scope["headers"], self._requests_per_s(time.monotonic()))
                message = {**message, "headers": [*message.get("headers", []), *more]}
            await send(message)

        await self._app(scope, receive, with_headers)

    def _requests_per_s(self, now_s: float) -> float:
        """Answers that this HTTP process gave lately, the present one included."""
        self._answered_s.append(now_s)
        while self._answered_s[0] < now_s - RATE_OVER_S:
            self._answered_s.popleft()
        return len(self._answered_s) / RATE_OVER_S


def _of_shed(status: int, noted: dict[str, Any]) -> Iterable[tuple[bytes, bytes]]:
    if status == 429 and REASON in noted:
        yield b"retry-after", str(noted[RETRY_AFTER]).encode()
        yield b"x-llm-d-request-dropped-reason", noted[REASON].encode()


def _of_load(headers: Iterable[tuple[bytes, bytes]], requests_per_s: float) -> Iterable[tuple[bytes, bytes]]:
    """The latest load of the scheduler, as Envoy's ORCA writes it in text or, when asked for, in JSON."""
    loads = tokenizer_manager().load_snapshot_reader.read_all()
    metrics = orca_metrics([load.to_dict({"core", "slo"}) for load in loads], requests_per_s)
    if metrics:
        wanted = dict(headers).get(ORCA_FORMAT, b"").strip().lower()
        yield ORCA, (as_json(metrics) if wanted == b"json" else as_text(metrics)).encode()


def orca_metrics(loads: list[dict[str, Any]], requests_per_s: float) -> dict[str, float]:
    """A report on the least loaded data-parallel rank, which would get one more request.

    Envoy's client-side weighted round robin weighs an endpoint by ``rps_fractional`` over
    ``application_utilization``, and needs both: here predicted TPOT / SLO of the class that fares worst."""
    if not loads:
        return {}
    best = min(loads, key=lambda load: load["num_running_reqs"] + load["num_waiting_reqs"])
    named = {
        "kv_cache_usage": float(best["token_usage"]),
        "running_requests": float(best["num_running_reqs"]),
        "waiting_requests": float(best["num_waiting_reqs"]),
    }
    report = {"rps_fractional": requests_per_s}
    if (forecast := best.get("slo")) is not None:
        headroom = {name: told["headroom"] for name, told in forecast["classes"].items() if told["headroom"]}
        if headroom:
            report["application_utilization"] = 1.0 / min(headroom.values())
        named["admission_open"] = forecast["admission_open"]
        named |= {f"headroom_{name}": value for name, value in headroom.items()}
    return report | {f"{NAMED}.{name}": value for name, value in named.items()}


def as_text(report: dict[str, float]) -> str:
    """``TEXT rps_fractional=1, named_metrics.a=2``."""
    return "TEXT " + ", ".join(f"{name}={value:.6g}" for name, value in report.items())


def as_json(report: dict[str, float]) -> str:
    """``JSON {"rps_fractional": 1, "named_metrics": {"a": 2}}``."""
    nested: dict[str, Any] = {}
    for name, value in report.items():
        group, dot, inner = name.partition(".")  # the first dot: a class may have others in its name
        (nested.setdefault(group, {}) if dot else nested)[inner if dot else name] = float(f"{value:.6g}")
    return "JSON " + json.dumps(nested)
