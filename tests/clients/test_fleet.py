"""Two real servers behind a real router, started as `adaserve fleet up` does."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from adaserve.bench.fleet.run import rank
from adaserve.fleet import local
from adaserve.fleet.local import ROUTERS, Fleet, RouterSpec
from adaserve.host.ports import free_port
from adaserve.loadgen.config import Endpoint
from adaserve.loadgen.protocol import slo_headers
from adaserve.loadgen.schedule import PlannedRequest
from adaserve.loadgen.server_metrics import parse_metrics
from adaserve.server import ServerProcess
from tests.clients.conftest import MODEL

pytestmark = pytest.mark.skipif(
    find_spec("sglang_router") is None, reason="needs sglang-router: pip install 'adaserve[fleet]'"
)
ENDS_WITHIN_S = 5.0


def body(tokens: int, prompt: str = "import os\n", **more: Any) -> dict[str, Any]:
    return {
        "model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more
    }  # fmt: skip


def slo_of(url: str, params: dict[str, Any] | None = None, **headers: str) -> dict[str, Any]:
    """What a finished response says about its SLO."""
    more = {} if params is None else {"custom_params": params}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = httpx.post(url + "/v1/completions", json=body(4, **more), headers=named, timeout=60)
    said: dict[str, Any] = answer.raise_for_status().json()["metadata"]["slo"]
    return said


@pytest.mark.parametrize("name", ROUTERS)
def test_slos_get_through_a_real_router(server: ServerProcess, tmp_path: Path, name: str) -> None:
    if find_spec(ROUTERS[name]) is None:
        pytest.skip(f"{name} is not installed")
    spec = RouterSpec((server.url,), name, port=free_port(), metrics_port=free_port())
    before = arrivals(server.url)
    with ServerProcess(spec, tmp_path / "router.log") as router:
        until_sent_to(router.url, 1)
        assert slo_of(router.url, {"slo_tpot_ms": 40, "slo_ttft_ms": 5000})["tpot_slo_ms"] == 40
        assert slo_of(router.url, {"slo_class": "chat"})["class"] == "chat"
        assert (
            slo_of(router.url, tracestate="other=1,adaserve=tpot-ms:41;ttft-ms:9000")["ttft_slo_ms"] == 9000
        )
        assert slo_of(router.url, tracestate="adaserve=class:coding")["class"] == "coding"
        assert slo_of(router.url, x_slo_class="chat")["class"] == "default", (
            "docs/fleet.md says it is dropped"
        )
        assert slo_of(server.url, x_slo_class="chat")["class"] == "chat"
        bad = httpx.post(
            router.url + "/v1/completions",
            json=body(4),
            headers={"tracestate": "adaserve=tpot:4"},
            timeout=60,
        )
        assert bad.status_code == 400 and "tpot-ms" in bad.text
        planned = PlannedRequest(0, 0.0, "chat", 42.0, None, "import os", 2, 4)
        sent = {name.replace("-", "_"): value for name, value in slo_headers(Endpoint(), planned).items()}
        assert slo_of(router.url, **sent)["tpot_slo_ms"] == 42, "adaserve bench serve"
        assert len(streamed(router.url, body(24, stream=True))) > 1
    after = arrivals(server.url)
    came = {key: after[key] - before.get(key, 0.0) for key in after}
    assert came == {("router", "yes"): 5, ("router", "no"): 2, ("direct", "yes"): 1, ("direct", "no"): 0}


def arrivals(url: str) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for (name, labels), value in parse_metrics(httpx.get(url + "/metrics", timeout=30).text).items():
        if name == "adaserve:requests_total":
            said = dict(labels)
            key = said["through"], said["slo_stated"]
            found[key] = found.get(key, 0.0) + value
    return found


def until_sent_to(router: str, replicas: int) -> None:
    end_s = time.monotonic() + 60
    while True:
        try:
            workers = httpx.get(router + "/workers", timeout=5).json()["workers"]
        except httpx.TransportError:
            workers = []
        if sum(worker["is_healthy"] for worker in workers) == replicas:
            return
        assert time.monotonic() < end_s, workers
        time.sleep(0.1)


def streamed(url: str, request: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of an answer. Raises when it ends without its last one."""
    events: list[dict[str, Any]] = []
    with httpx.stream("POST", url + "/v1/completions", json=request, timeout=120) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                return events
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
                if "error" in events[-1]:
                    raise RuntimeError(line)
    raise RuntimeError(f"the stream ended after {len(events)} events, without [DONE]")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet.of(2, ("--size", "12M"), tmp_path_factory.mktemp("fleet"), port=free_port(4))
    fleet.up()
    yield fleet
    fleet.down()


def running(replica: ServerProcess) -> int:
    (load,) = httpx.get(f"{replica.url}/v1/loads?include=core", timeout=30).json()["loads"]
    count: int = load["num_running_reqs"]
    return count


@dataclass
class Outcome:
    """How a request ended."""

    ended_s: float = 0.0
    tokens: int = 0
    error: str | None = None


def send(url: str, prompt: str, tokens: int, stream: bool) -> Outcome:
    got = Outcome()
    try:
        request = body(tokens, prompt, stream=stream, custom_params={"slo_class": "chat"})
        if stream:
            request["stream_options"] = {"include_usage": True}
            got.tokens = streamed(url, request)[-1]["usage"]["completion_tokens"]
        else:
            answer = httpx.post(url + "/v1/completions", json=request, timeout=120).raise_for_status()
            got.tokens = answer.json()["usage"]["completion_tokens"]
    except (httpx.HTTPError, RuntimeError) as error:
        got.error = f"{type(error).__name__}: {error}"
    got.ended_s = time.monotonic()
    return got


@pytest.mark.slow
def test_a_prompt_follows_its_prefix(fleet: Fleet) -> None:
    prefix = "\n".join(f"def function_{i}(a, b):\n    return a + {i} * b\n" for i in range(12))
    before = [served(replica) for replica in fleet.replicas]
    for i in range(6):
        httpx.post(fleet.url + "/v1/completions", json=body(4, prefix + f"x = {i}\n"), timeout=60)
    counts = [served(replica) - b for replica, b in zip(fleet.replicas, before, strict=True)]
    assert sorted(counts) == [0, 6]


def served(replica: ServerProcess) -> float:
    return sum(arrivals(replica.url).values())


def together(url: str, requests: int, tokens: int) -> list[Outcome]:
    """Two of three are streamed."""
    with ThreadPoolExecutor(requests) as pool:
        prompts = [f"# {i}\nimport os\n" * (i + 1) for i in range(requests)]
        return list(pool.map(lambda i: send(url, prompts[i], tokens, i % 3 > 0), range(requests)))


def until(reached: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < end_s
        time.sleep(0.02)


@pytest.mark.slow
def test_headroom_tells_a_loaded_replica_from_an_idle_one(fleet: Fleet) -> None:
    found = rank(fleet.replicas, loads=(6,))
    assert found.samples >= 20 and found.share >= 0.95, found


@pytest.mark.slow
def test_a_replica_is_killed_under_load_and_comes_back(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    victim, other = fleet.replicas
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(together, fleet.url, 12, 400)
        until(lambda: running(victim) > 0 and running(other) > 0)
        lost = running(victim)
        main = psutil.Process(victim.pid)
        killed_s = time.monotonic()
        for process in (main, *main.children(recursive=True)):
            os.kill(process.pid, signal.SIGKILL)
        outcomes = future.result()
    failed = [o for o in outcomes if o.error is not None]
    # Streams had begun and are cut off; what had not begun is sent to the other replica by the router.
    assert len(failed) <= lost + 2
    assert all("RemoteProtocolError" in str(o.error) for o in failed), [o.error for o in failed]
    assert all(o.ended_s - killed_s < ENDS_WITHIN_S for o in failed)
    assert all(o.tokens == 400 for o in outcomes if o.error is None)
    assert not victim.alive
    monkeypatch.setattr(local, "MIN_LIFE_S", 0.0)
    fleet.repair(print)
    until_sent_to(fleet.url, 2)
    before, end_s = served(victim), time.monotonic() + 60
    while served(victim) == before:
        assert time.monotonic() < end_s, "the router does not send to the replica that came back"
        together(fleet.url, 12, 32)


@pytest.mark.slow
def test_a_request_in_flight_ends_before_the_fleet_stops(fleet: Fleet) -> None:
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(send, fleet.url, "import sys\n", 600, True)
        until(lambda: sum(map(running, fleet.replicas)) == 1)
        fleet.down()
        assert future.result().tokens == 600
    assert not any(replica.alive for replica in fleet.replicas)
