"""Saying how a server is doing takes a share of its time, however often it is asked."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from adaserve.host import PROFILE_ROUTES_ENV
from adaserve.patches import server_info

TELLING_S, WRITING_S, FORWARD_S = 0.03, 0.02, 0.3


class Asked:
    """A server that tells its state after the forward at hand, and what clients got of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server_info.time, "perf_counter", lambda: self.now_s)
        self.now_s, self.told = 100.0, 0
        self.app = server_info.ServerInfo(self._app, lambda: self.now_s)

    async def _state(self, _: Any = None) -> list[Any]:
        await asyncio.sleep(0)
        self.now_s += FORWARD_S + TELLING_S
        return [{"adaserve": {"state_s": TELLING_S}}, {"adaserve": {"state_s": 0.01}}]

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        await server_info._waiting(self._state, None)
        self.now_s += WRITING_S
        self.told += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"%d" % self.told})

    async def ask(self) -> int:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await self.app({"type": "http"}, None, send)  # type: ignore[arg-type]
        return int(sent[1]["body"])


def test_who_asks_now_and_then_is_told_what_is_true_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a forward takes."""
    asked = Asked(monkeypatch)

    async def asking() -> None:
        for number in range(1, 100):
            assert await asked.ask() == number
            asked.now_s += 0.5

    asyncio.run(asking())


def test_a_flood_of_questions_takes_a_tenth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    start_s, heard = asked.now_s, set()

    async def flood() -> None:
        while asked.now_s < start_s + 60.0:
            heard.update(await asyncio.gather(*(asked.ask() for _ in range(50))))
            asked.now_s += 0.01

    asyncio.run(flood())
    spent_s, passed_s = (TELLING_S + WRITING_S) * asked.told, asked.now_s - start_s
    assert 0.5 * server_info.SHARE * passed_s < spent_s
    assert spent_s <= server_info.MOST_S + server_info.SHARE * passed_s + 0.1
    assert len(heard) == asked.told, "answers are renewed all the same"


@pytest.mark.parametrize(("measured", "limited"), [("", True), ("1", False)])
def test_who_measures_is_told_what_is_true_now(
    measured: str, limited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old answer would give its times to what was measured before."""
    monkeypatch.setenv(PROFILE_ROUTES_ENV, measured)
    routes = [SimpleNamespace(path=path, app=object()) for path in (*server_info.PATHS, "/health")]
    server_info.mount(SimpleNamespace(router=SimpleNamespace(routes=routes)))
    wrapped = [isinstance(route.app, server_info.ServerInfo) for route in routes]
    assert wrapped == [limited, limited, False]
