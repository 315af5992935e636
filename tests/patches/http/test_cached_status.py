"""Answers that are costly to make take a share of the server's time, however often they are asked for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from adaserve.host.device import PROFILE_ROUTES_ENV
from adaserve.patches.http import cached_status
from adaserve.patches.http.cached_status import CachedAnswers

TELLING_S, WRITING_S, FORWARD_S = 0.03, 0.02, 0.3
COLLECTING_S = 0.05


class BatchRequests:
    """A server that tells its state after the forward at hand, and what clients got of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cached_status.time, "perf_counter", lambda: self.now_s)
        self.now_s, self.told = 100.0, 0
        self.app = CachedAnswers(self._app, clock=lambda: self.now_s)

    async def _state(self, _: Any = None) -> list[Any]:
        await asyncio.sleep(0)
        self.now_s += FORWARD_S + TELLING_S
        return [{"adaserve": {"state_s": TELLING_S}}, {"adaserve": {"state_s": 0.01}}]

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        await cached_status._waiting(self._state, None)
        self.now_s += WRITING_S
        self.told += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"%d" % self.told})

    async def ask(self) -> int:
        return int(await answered(self.app))


async def answered(app: Any, gone: bool = False, **headers: bytes) -> bytes:
    """The body that a client gets; ``gone``: it has left, or sends no body."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.disconnect"} if gone else {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    named = [(name.replace("_", "-").encode(), value) for name, value in headers.items()]
    await app({"type": "http", "headers": named, "query_string": b"name[]=x"}, receive, send)
    return bytes(sent[1]["body"])


def test_who_asks_now_and_then_is_told_what_is_true_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a forward takes."""
    asked = BatchRequests(monkeypatch)

    async def asking() -> None:
        for number in range(1, 100):
            assert await asked.ask() == number
            asked.now_s += 0.5

    asyncio.run(asking())


def test_a_flood_of_questions_takes_a_tenth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = BatchRequests(monkeypatch)
    start_s, heard = asked.now_s, set()

    async def flood() -> None:
        while asked.now_s < start_s + 60.0:
            heard.update(await asyncio.gather(*(asked.ask() for _ in range(50))))
            asked.now_s += 0.01

    asyncio.run(flood())
    spent_s, passed_s = (TELLING_S + WRITING_S) * asked.told, asked.now_s - start_s
    assert 0.5 * cached_status.SHARE * passed_s < spent_s
    assert spent_s <= cached_status.MAX_S + cached_status.SHARE * passed_s + 0.1
    assert len(heard) == asked.told, "answers are renewed all the same"


@pytest.mark.parametrize(("measured", "limited"), [("", True), ("1", False)])
def test_who_measures_is_told_what_is_true_now(
    measured: str, limited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old answer would give its times to what was measured before."""
    monkeypatch.setenv(PROFILE_ROUTES_ENV, measured)
    paths = (*cached_status.SERVER_INFO, "/health")
    routes = [SimpleNamespace(path=path, app=object()) for path in paths]
    cached_status.mount(SimpleNamespace(router=SimpleNamespace(routes=routes)))
    wrapped = [isinstance(route.app, CachedAnswers) for route in routes]
    assert wrapped == [limited, limited, False]


class Metrics:
    """Prometheus' app, which takes some time, and how often metrics were collected."""

    def __init__(self) -> None:
        self.now_s, self.collected, self.headers = 100.0, 0, set[Any]()
        self.app = CachedAnswers(self._app, cached_status._format, lambda: self.now_s)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.now_s += COLLECTING_S
        self.collected += 1
        self.headers.add(tuple(scope["headers"]))
        assert scope["query_string"] == b""
        if (await receive())["type"] == "http.request":  # as Prometheus' own
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"%d" % self.collected})

    def scrape(self, gone: bool = False, **headers: bytes) -> bytes:
        return asyncio.run(answered(self.app, gone, **headers))


def test_a_scraper_gets_new_ones_every_time() -> None:
    metrics = Metrics()
    for scrape in range(1, 50):
        assert metrics.scrape() == b"%d" % scrape
        metrics.now_s += 1.0


@pytest.mark.parametrize("gone", [False, True])
def test_one_that_never_stops_asking_gets_old_ones(gone: bool) -> None:
    """And if it does not wait for them, others do not get nothing."""
    metrics = Metrics()
    start_s, answers = metrics.now_s, set()
    while metrics.now_s < start_s + 20.0:
        answers.add(metrics.scrape(gone))
        metrics.now_s += 1e-2
    assert 2.8 <= metrics.collected * COLLECTING_S <= 3.2, "1 s that was saved up, and a tenth of 20 s"
    assert len(answers) == metrics.collected, "they are renewed all the same"


def test_what_is_kept_is_little() -> None:
    metrics = Metrics()
    for i in range(100):
        metrics.scrape(accept=b"text/x%d" % i, accept_encoding=b"br;q=0.%d" % i)
        metrics.scrape(
            accept=b"application/openmetrics-text;version=1.%d" % i, accept_encoding=b"gzip, x%d" % i
        )
    assert len(metrics.headers) == 2
