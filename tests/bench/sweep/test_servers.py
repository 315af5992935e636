"""How the servers of a sweep are set, warmed and replaced, and what is asked of them; no server runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from adaserve.bench.client import Ask, Streamed
from adaserve.bench.sweep import servers
from adaserve.bench.sweep.servers import Servers, prefill_times
from adaserve.bench.sweep.systems import STOCK, STOCK_PRIORITY, system
from adaserve.server import ServerSpec

ASKS = [Ask("text", 8, slo_class="chat", slo_tpot_ms=50.0)]


class Process:
    """A server that writes down what it is told."""

    def __init__(self, spec: ServerSpec, url: str) -> None:
        self.spec, self.url = spec, url
        self.told: list[str] = []

    def set_policy(self, name: str) -> None:
        self.told.append(name)

    def set_prefill(self, mode: str) -> None:
        self.told.append(mode)

    def drain(self) -> None:
        pass


class World:
    """Servers that were started, which of them run and are well, and what was sent to them."""

    def __init__(self) -> None:
        self.started: list[Process] = []
        self.up: list[Process] = []
        self.well = True
        self.sent: list[tuple[str, list[Ask]]] = []

    @contextmanager
    def running(self, spec: ServerSpec, _: Path, env: dict[str, str]) -> Iterator[Process]:
        made = Process(spec, f"http://{len(self.started)}")
        self.started.append(made)
        self.up.append(made)
        yield made
        self.up.remove(made)

    def get(self, *_: object, **__: object) -> httpx.Response:
        return httpx.Response(200 if self.well else 503)

    def stream(self, url: str, ask: Ask) -> Streamed:
        policy = [word for p in self.up if p.url == url for word in p.told][-2:]
        self.sent.append(("/".join(policy), [ask]))
        return Streamed(0.0, [1.0, 2.0], [1, 101], 9)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(servers, "running_server", made.running)
    monkeypatch.setattr(servers, "send", lambda url, asks, _: made.sent.append((url, list(asks))))
    monkeypatch.setattr(servers, "stream", made.stream)
    monkeypatch.setattr(httpx, "get", made.get)
    return made


def test_a_server_is_set_and_warmed_once_for_each_system(world: World, tmp_path: Path) -> None:
    with Servers(ServerSpec(), tmp_path) as up:
        for name in ("turbospec", "turbospec", "turbospec+gate", "turbospec"):
            up.serve(system(name), ASKS)
        (process,) = world.up
        assert process.told == ["turbospec", "exclusive", "turbospec", "mixed", "turbospec", "exclusive"]
        assert world.sent == [(process.url, ASKS)] * 2, "one warm-up each"
    assert not world.up


def test_the_pace_is_that_of_plain_decoding_and_changes_no_setting(world: World, tmp_path: Path) -> None:
    with Servers(ServerSpec(), tmp_path) as up:
        wanted = system("priced")
        up.serve(wanted)
        world.sent.clear()
        assert up.pace_ms(wanted, ["text"]) == 10.0
        assert {setting for setting, _ in world.sent} == {"none/exclusive"}
        assert world.started[0].told[-2:] == ["priced", "mixed"]


def test_stock_sglang_has_servers_of_its_own_and_gets_no_slos(world: World, tmp_path: Path) -> None:
    with Servers(ServerSpec(), tmp_path) as up:
        for name in (STOCK, STOCK_PRIORITY, "none"):
            up.serve(system(name), ASKS)
        up.pace_ms(system(STOCK), ["text"])
    stock, priority, ours = world.started
    assert [p.spec.algorithm for p in world.started] == [None, None, "ADASERVE"]
    assert [("--enable-priority-scheduling" in p.spec.extra) for p in world.started] == [False, True, False]
    assert stock.told == priority.told == []
    sent = dict(world.sent[:3])
    assert [sent[p.url][0].slo_class for p in (stock, priority, ours)] == [None, None, "chat"]


def test_where_one_server_died_all_are_started_and_warmed_again(world: World, tmp_path: Path) -> None:
    with Servers(ServerSpec(), tmp_path) as up:
        for name in ("none", STOCK):
            up.serve(system(name), ASKS)
        world.well = False
        up.serve(system("none"), ASKS)
        assert world.up == world.started[2:] and len(world.started) == 3
        assert world.started[2].told == ["none", "exclusive"] and world.sent[-1][0] == world.up[0].url


@pytest.mark.parametrize(("room", "lengths"), [(10_000, 4), (200, 3), (20, None)])
def test_prompts_that_a_server_has_no_room_for_are_left_out(
    monkeypatch: pytest.MonkeyPatch, room: int, lengths: int | None
) -> None:
    def stream(_: str, ask: Ask) -> Streamed:
        tokens = len(ask.prompt)
        if tokens > room:
            request = httpx.Request("POST", "http://server/generate")
            raise httpx.HTTPStatusError("too long", request=request, response=httpx.Response(400))
        return Streamed(0.0, [0.1 * tokens], [1], tokens)

    monkeypatch.setattr(servers, "stream", stream)
    texts = [("x" * n, n) for n in range(1, 500)]
    server: Any = Process(ServerSpec(), "http://server")
    if lengths is None:
        with pytest.raises(httpx.HTTPStatusError):
            prefill_times(server, texts)
        return
    tokens, times_ms = prefill_times(server, texts)
    assert tokens == [16, 48, 128, 384][:lengths]
    assert times_ms == pytest.approx([100 * n for n in tokens])
