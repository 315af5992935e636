"""Whoever asks for ``/server_info`` all the time gets the answer of a moment ago.

Why: for each answer a scheduler tells its settings and its state between two iterations, and the HTTP process
writes them down in its event loop. That takes tens of milliseconds, nearly all of it for SGLang's settings,
and meanwhile nobody gets a token. So answers may take a share of the time, and a second of it in one go.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.host import is_measured
from adaserve.patches import hook
from adaserve.patches.routes import App, Message, Receive, Send
from adaserve.scheduler.fairness import HoldBudget

PATHS = ("/server_info", "/get_server_info")
SHARE, MOST_S = 0.1, 1.0
"""Of the time, that answers may take; and how much of it may be saved up."""

_TOOK_S = "state_s"
_waited: ContextVar[list[float]] = ContextVar("adaserve_waited")
"""Seconds for which the answer at hand waited for schedulers that did something else."""


def register() -> None:
    controller = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
    hook(f"{controller}.get_internal_state", _timed, HookType.AROUND)
    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    hook(f"{manager}.get_internal_state", _waiting, HookType.AROUND)


def _timed(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    start_s = time.perf_counter()
    output = original(self, recv_req)
    if (state := output.internal_state.get("adaserve")) is not None:
        state[_TOOK_S] = time.perf_counter() - start_s
    return output


async def _waiting(original: Callable[..., Awaitable[list[Any]]], self: Any) -> list[Any]:
    start_s = time.perf_counter()
    states = await original(self)
    took_s = max((state["adaserve"][_TOOK_S] for state in states if "adaserve" in state), default=0.0)
    _waited.get([]).append(time.perf_counter() - start_s - took_s)
    return states


def mount(app: Any) -> None:
    """Puts the limit around SGLang's routes. Who measures the server is told what is true now."""
    if is_measured():
        return
    for route in app.router.routes:
        if getattr(route, "path", None) in PATHS:
            route.app = ServerInfo(route.app)


class ServerInfo:
    """ASGI app around SGLang's own, whose answer depends on nothing in a request."""

    def __init__(self, app: App, clock: Callable[[], float] = time.perf_counter) -> None:
        self._app, self._clock = app, clock
        self._budget, self._one_by_one = HoldBudget(SHARE, MOST_S), asyncio.Lock()
        self._kept: list[Message] = []

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        async with self._one_by_one:
            start_s = self._clock()
            if not self._kept or self._budget.has("", start_s):
                self._kept = await self._answer(scope, receive, start_s)
            answer = self._kept
        for message in answer:
            await send(message)

    async def _answer(self, scope: Message, receive: Receive, start_s: float) -> list[Message]:
        answer: list[Message] = []
        _waited.set(waited := list[float]())

        async def keep(message: Message) -> None:
            answer.append(message)

        await self._app(scope, receive, keep)
        end_s = self._clock()
        self._budget.charge([""], end_s - start_s - sum(waited), end_s)
        return answer
