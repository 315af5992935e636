"""The server of a sweep: one at a time, restarted when it died, asked over HTTP."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from adaserve.bench.report import start_server
from adaserve.bench.sweep.plan import PLAIN, STOCK
from adaserve.server import Server, ServerError, ServerSpec, free_port

BASELINE_REQUESTS, BASELINE_TOKENS = 7, 48
CAPACITY_REQUESTS, CAPACITY_RUNNING = 64, 16
WARM_REQUESTS, WARM_RUNNING = 16, 4
IDLE_ROUNDS = 6
_DRAIN_S = 60.0

IdleRounds = Mapping[str, Mapping[str, Sequence[float]]]
"""Server -> ``tpot_ms`` of one request and ``saturated_rps`` -> a value per round; rounds are paired."""


class StockSpec(ServerSpec):
    """The same target on the same platform, served by SGLang without speculation."""

    __slots__ = ()

    def command(self) -> list[str]:
        words = ServerSpec.command(self)
        for flag in ("--speculative-draft-model-path", "--speculative-algorithm"):
            if flag in words:
                k = words.index(flag)
                del words[k : k + 2]
        return words


@dataclass(frozen=True, slots=True)
class Ask:
    """One request outside of the load tests."""

    text: str
    tokens: int
    temperature: float = 0.0
    slo_class: str | None = None
    slo_tpot_ms: float | None = None

    def plain(self) -> Ask:
        """The same without an SLO, for servers that know none."""
        return replace(self, slo_class=None, slo_tpot_ms=None)

    def body(self, stream: bool = False) -> dict[str, Any]:
        params: dict[str, Any] = {
            "temperature": self.temperature,
            "max_new_tokens": self.tokens,
            "ignore_eos": True,
        }
        slo = {"slo_class": self.slo_class, "slo_tpot_ms": self.slo_tpot_ms}
        if given := {k: v for k, v in slo.items() if v is not None}:
            params["custom_params"] = given
        return {"text": self.text, "sampling_params": params, "stream": stream}


class Host:
    """Starts the servers that cases need. A context manager: what runs at the end is stopped."""

    def __init__(self, spec: ServerSpec, work: Path, console: Console) -> None:
        self._spec, self._work, self._console = spec, work, console
        self._open: Any = None  # the context manager of what runs
        self._server: Server | None = None
        self._stock = False
        self._policy: str | None = None
        self._warm: set[str] = set()
        self.starts = 0

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        opened, self._open, self._server, self._policy = self._open, None, None, None
        self._warm.clear()
        if opened is not None:
            opened.__exit__(None, None, None)

    def beside(self) -> Host:
        """A host for a second server of the same kind."""
        return Host(self._spec, self._work / "beside", self._console)

    def serve(self, policy: str, warm_up: Iterable[Ask] = ()) -> Server:
        """A drained server that runs ``policy``, warmed up once per start. Raises ServerError, httpx
        errors when it died meanwhile."""
        stock = policy == STOCK
        if self._server is not None and (stock != self._stock or not self._answers()):
            self.stop()
        server = self._server or self._start(stock)
        self.drain()
        if not stock and policy != self._policy:
            server.set_policy(policy)
            self._policy = policy
        if policy not in self._warm:
            burst(server, [a.plain() if stock else a for a in warm_up], WARM_RUNNING)
            self._warm.add(policy)
            self.drain()
        return server

    def _start(self, stock: bool) -> Server:
        self._work.mkdir(parents=True, exist_ok=True)
        spec = replace(self._spec, port=free_port())
        if stock:
            spec = StockSpec(**{name: getattr(spec, name) for name in ServerSpec.__dataclass_fields__})
        self.starts += 1
        log = self._work / f"server-{self.starts}{'-stock' if stock else ''}.log"
        self._open = start_server(spec, log, self._console)
        try:
            self._server = self._open.__enter__()
        except BaseException:
            self._open = None
            raise
        self._stock, self._policy = stock, None
        return self._server

    def _answers(self) -> bool:
        assert self._server is not None
        try:
            return httpx.get(self._server.url + "/health", timeout=30.0).status_code == 200
        except httpx.HTTPError:
            return False

    def drain(self) -> None:
        """Waits until nothing runs, and empties the prefix cache. Raises ServerError."""
        assert self._server is not None
        end_s = time.monotonic() + _DRAIN_S
        while httpx.post(self._server.url + "/flush_cache", timeout=30.0).status_code != 200:
            if time.monotonic() > end_s:
                self.stop()
                raise ServerError(f"the server did not become idle within {_DRAIN_S:.0f} s and was stopped")
            httpx.post(self._server.url + "/abort_request", json={"rid": "", "abort_all": True}, timeout=30.0)
            time.sleep(0.5)


def report_of(server: Server) -> dict[str, Any] | None:
    """The server's counters; None from SGLang without AdaServe."""
    try:
        return server.report()
    except KeyError:
        return None


def generate(server: Server, asks: Sequence[Ask]) -> list[dict[str, Any]]:
    """Answers of one batch, in order."""
    body = {
        "text": [a.text for a in asks],
        "sampling_params": [a.body()["sampling_params"] for a in asks],
    }
    answer = httpx.post(server.url + "/generate", json=body, timeout=600.0).raise_for_status().json()
    return list(answer)


def burst(server: Server, asks: Sequence[Ask], running: int) -> float:
    """Sends all requests, ``running`` of them at any time; returns the seconds that it took."""
    start_s = time.perf_counter()
    with httpx.Client(timeout=300.0) as client, ThreadPoolExecutor(max(1, running)) as pool:

        def send(ask: Ask) -> None:
            client.post(server.url + "/generate", json=ask.body()).raise_for_status()

        list(pool.map(send, asks))
    return time.perf_counter() - start_s


def streamed_tpot_ms(server: Server, ask: Ask) -> float:
    """TPOT of one request as a client sees it."""
    times: list[float] = []
    tokens: list[int] = []
    body = ask.body(stream=True)
    with httpx.stream("POST", server.url + "/generate", json=body, timeout=300.0) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
                tokens.append(json.loads(line[6:])["meta_info"]["completion_tokens"])
    if len(times) < 2 or tokens[-1] == tokens[0]:
        raise ServerError("the server answered with a single piece: no latency per token can be measured")
    return (times[-1] - times[0]) / (tokens[-1] - tokens[0]) * 1e3


def unloaded(server: Server, texts: Sequence[str]) -> float:
    """ms per token of single requests, one after the other: the median of several."""
    asks = [Ask(texts[k % len(texts)], BASELINE_TOKENS) for k in range(BASELINE_REQUESTS)]
    return statistics.median(streamed_tpot_ms(server, a) for a in asks)


def saturated_rps(server: Server, asks: Sequence[Ask]) -> float:
    """Requests/s that are served when enough of them wait at any time."""
    return len(asks) / burst(server, asks, CAPACITY_RUNNING)


def idle_rounds(host: Host, asks: Sequence[Ask]) -> IdleRounds:
    """`none` and SGLang without speculation in turns, idle and saturated. Both servers are up all the time:
    one after the other, a slow minute of the machine would count against one of them."""
    with host.beside() as other:
        hosts = {PLAIN: host, STOCK: other}
        servers = {name: h.serve(name, asks[:WARM_REQUESTS]) for name, h in hosts.items()}
        found: dict[str, dict[str, list[float]]] = {n: {"tpot_ms": [], "saturated_rps": []} for n in servers}
        for k in range(IDLE_ROUNDS):
            for name in (PLAIN, STOCK) if k % 2 else (STOCK, PLAIN):
                hosts[name].drain()
                single_ms = unloaded(servers[name], [a.text for a in asks])
                hosts[name].drain()
                rate_rps = saturated_rps(servers[name], [a.plain() for a in asks])
                found[name]["tpot_ms"].append(round(single_ms, 4))
                found[name]["saturated_rps"].append(round(rate_rps, 4))
    return found
