"""Whoever asks for metrics all the time gets the ones that were there a moment ago.

Why: Prometheus' metrics are open to everybody, also where a server has keys. To collect what all processes
have written takes tens of milliseconds, in the HTTP process' event loop: meanwhile no client gets a token. So
collecting them may take a share of the time, and a second of it in one go, which no scraper notices.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook, is_active
from adaserve.patches.routes import App, Message, Receive, Send
from adaserve.scheduler.fairness import HoldBudget

PATH = "/metrics"
SHARE, MOST_S = 0.1, 1.0
"""Of the time, that collecting metrics may take; and how much of it may be saved up."""


def register() -> None:
    hook("sglang.srt.utils.common.add_prometheus_middleware", _limit, HookType.AFTER)


def _limit(_: None, app: Any) -> None:
    if is_active():
        for route in app.routes:
            if getattr(route, "path", None) == PATH:
                route.app = Metrics(route.app)


class Metrics:
    """ASGI app around Prometheus' own. Of what that takes from a request two things are left: whether it may
    answer in the OpenMetrics format, and whether compressed. So there are few answers to keep."""

    def __init__(self, app: App, clock: Callable[[], float] = time.perf_counter) -> None:
        self._app, self._clock = app, clock
        self._budget = HoldBudget(SHARE, MOST_S)
        self._kept: dict[tuple[bytes, bytes], list[Message]] = {}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        asked = dict(scope["headers"])
        accept = b"application/openmetrics-text" if b"openmetrics" in asked.get(b"accept", b"") else b"*/*"
        encoding = b"gzip" if b"gzip" in asked.get(b"accept-encoding", b"") else b""
        start_s = self._clock()
        if (accept, encoding) not in self._kept or self._budget.has(PATH, start_s):
            headers = [(b"accept", accept), (b"accept-encoding", encoding)]
            answer: list[Message] = []

            async def keep(message: Message) -> None:
                answer.append(message)

            await self._app({**scope, "query_string": b"", "headers": headers}, receive, keep)
            self._kept[accept, encoding] = answer
            end_s = self._clock()
            self._budget.charge([PATH], end_s - start_s, end_s)
        for message in self._kept[accept, encoding]:
            await send(message)
