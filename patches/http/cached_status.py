"""A client that asks for ``/server_info`` or metrics very often gets a recent answer again.

Why: for ``/server_info`` a scheduler reports its settings and its state between two iterations, and the HTTP
process serializes them in its event loop; nearly all of it is SGLang's settings. Prometheus' metrics are
open to everybody, also where a server has keys, and are collected in that loop from what all processes have
written. Each takes tens of milliseconds, in which nobody gets a token. So answers may take only a share of
the time, and at most a second of it at a stretch, which no scraper notices.

The code that makes an answer sees only the parts of the request that the answer depends on. Otherwise a
client that has gone, or that never sends its body, would decide what others are told.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from sglang.srt.plugins.hook_registry import HookType
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adaserve.host.device import is_measured
from adaserve.patches import hook, wrap_routes
from adaserve.scheduler.admission.fairness import HoldBudget

SERVER_INFO = ("/server_info", "/get_server_info")
METRICS = ("/metrics",)
SHARE, MAX_S = 0.1, 1.0
"""Of the time, that the answers of a route may take; and how much of it may be saved up."""

Headers = tuple[tuple[bytes, bytes], ...]

_TOOK_S = "state_s"
_waited: ContextVar[list[float]] = ContextVar("adaserve_waited")
"""Seconds for which the answer at hand waited for schedulers that did something else."""


def register() -> None:
    controller = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
    hook(f"{controller}.get_internal_state", _timed, HookType.AROUND)
    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    hook(f"{manager}.get_internal_state", _waiting, HookType.AROUND)
    hook("sglang.srt.utils.common.add_prometheus_middleware", _limit_metrics, HookType.AFTER)


def _timed(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    start_s = time.perf_counter()
    output = original(self, recv_req)
    output.internal_state["adaserve"][_TOOK_S] = time.perf_counter() - start_s
    return output


async def _waiting(original: Callable[..., Awaitable[list[Any]]], self: Any) -> list[Any]:
    start_s = time.perf_counter()
    states = await original(self)
    took_s = max(state["adaserve"][_TOOK_S] for state in states)
    _waited.get([]).append(time.perf_counter() - start_s - took_s)
    return states


def mount(app: Any) -> None:
    """Puts the limit around SGLang's routes. Who measures the server is told what is true now."""
    if not is_measured():
        wrap_routes(app, SERVER_INFO, CachedAnswers)


def _limit_metrics(_: None, app: Any) -> None:
    wrap_routes(app, METRICS, lambda route: CachedAnswers(route, _format))


def _format(asked: dict[bytes, bytes]) -> Headers:
    """Whether metrics may come in the OpenMetrics format, and whether compressed."""
    accept = b"application/openmetrics-text" if b"openmetrics" in asked.get(b"accept", b"") else b"*/*"
    encoding = b"gzip" if b"gzip" in asked.get(b"accept-encoding", b"") else b""
    return (b"accept", accept), (b"accept-encoding", encoding)


class CachedAnswers:
    """ASGI app around one of SGLang's. ``read``: what of a request's headers an answer depends on. There are
    few such answers."""

    def __init__(
        self,
        app: ASGIApp,
        read: Callable[[dict[bytes, bytes]], Headers] = lambda _: (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._app, self._read, self._clock = app, read, clock
        self._budget, self._one_by_one = HoldBudget(SHARE, MAX_S), asyncio.Lock()
        self._kept: dict[Headers, list[Message]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = self._read(dict(scope["headers"]))
        async with self._one_by_one:
            start_s = self._clock()
            if headers not in self._kept or self._budget.has("", start_s):
                alone = {**scope, "headers": list(headers), "query_string": b""}
                self._kept[headers] = await self._answer(alone, start_s)
            answer = self._kept[headers]
        for message in answer:
            await send(message)

    async def _answer(self, scope: Scope, start_s: float) -> list[Message]:
        answer: list[Message] = []
        _waited.set(waited := list[float]())

        async def nothing() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def keep(message: Message) -> None:
            answer.append(message)

        await self._app(scope, nothing, keep)
        end_s = self._clock()
        self._budget.charge([""], end_s - start_s - sum(waited), end_s)
        return answer
