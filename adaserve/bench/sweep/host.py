"""The server of a sweep: one at a time, restarted when it died, asked over HTTP."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from adaserve.bench.client import Ask, send, streamed_tpot_ms
from adaserve.bench.servers import running
from adaserve.bench.sweep.plan import PLAIN, STOCK
from adaserve.server import ServerError, ServerProcess, ServerSpec

BASELINE_REQUESTS, BASELINE_TOKENS = 7, 48
CAPACITY_REQUESTS, CAPACITY_RUNNING = 64, 16
WARM_REQUESTS, WARM_RUNNING = 16, 4
IDLE_ROUNDS = 6

IdleRounds = Mapping[str, Mapping[str, Sequence[float]]]
"""Server -> ``tpot_ms`` of one request and ``saturated_rps`` -> a value per round; rounds are paired."""


class Host:
    """Starts the servers that cases need. A context manager: what runs at the end is stopped."""

    def __init__(self, spec: ServerSpec, work: Path, console: Console) -> None:
        self._spec, self._work, self._console = spec, work, console
        self._open = ExitStack()  # what runs
        self._server: ServerProcess | None = None
        self._stock = False
        self._policy: str | None = None
        self._warm: set[str] = set()
        self.starts = 0

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._server = self._policy = None
        self._warm.clear()
        self._open.close()

    def beside(self) -> Host:
        """A host for a second server of the same kind."""
        return Host(self._spec, self._work / "beside", self._console)

    def serve(self, policy: str, warm_up: Iterable[Ask] = ()) -> ServerProcess:
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

    def _start(self, stock: bool) -> ServerProcess:
        spec = replace(self._spec, algorithm=None) if stock else self._spec
        self.starts += 1
        log = self._work / f"server-{self.starts}{'-stock' if stock else ''}.log"
        self._server = self._open.enter_context(running(spec, log, self._console))
        self._stock, self._policy = stock, None
        return self._server

    def _answers(self) -> bool:
        assert self._server is not None
        try:
            return httpx.get(self._server.url + "/health", timeout=30.0).status_code == 200
        except httpx.HTTPError:
            return False

    def drain(self) -> None:
        """Waits until nothing runs, and empties the prefix cache. Raises ServerError, having stopped it."""
        assert self._server is not None
        try:
            self._server.drain()
        except ServerError:
            self.stop()
            raise


def report_of(server: ServerProcess) -> dict[str, Any] | None:
    """The server's counters; None from SGLang without AdaServe."""
    try:
        return server.report()
    except KeyError:
        return None


def burst(server: ServerProcess, asks: Sequence[Ask], at_once: int) -> float:
    """Sends all requests, ``at_once`` of them at any time; returns the seconds that it took."""
    start_s = time.perf_counter()
    send(server.url, asks, at_once)
    return time.perf_counter() - start_s


def unloaded(server: ServerProcess, texts: Sequence[str]) -> float:
    """ms per token of single requests, one after the other: the median of several."""
    asks = [Ask(texts[k % len(texts)], BASELINE_TOKENS) for k in range(BASELINE_REQUESTS)]
    return statistics.median(streamed_tpot_ms(server.url, a) for a in asks)


def saturated_rps(server: ServerProcess, asks: Sequence[Ask]) -> float:
    """Requests/s that are served when enough of them wait at any time."""
    return len(asks) / burst(server, asks, CAPACITY_RUNNING)


def idle_rounds(host: Host, asks: Sequence[Ask]) -> IdleRounds:
    """`none` and SGLang without speculation in turns, idle and saturated. Both servers are up all the time:
    otherwise a slow minute of the machine would count against only one of them."""
    with host.beside() as other:
        hosts = {PLAIN: host, STOCK: other}
        servers = {name: h.serve(name, asks[:WARM_REQUESTS]) for name, h in hosts.items()}
        found: dict[str, dict[str, list[float]]] = {n: {"tpot_ms": [], "saturated_rps": []} for n in servers}
        for k in range(IDLE_ROUNDS):
            for name in (PLAIN, STOCK) if k % 2 else (STOCK, PLAIN):
                hosts[name].drain()
                single_ms = unloaded(servers[name], [str(a.prompt) for a in asks])
                hosts[name].drain()
                rate_rps = saturated_rps(servers[name], [a.plain() for a in asks])
                found[name]["tpot_ms"].append(round(single_ms, 4))
                found[name]["saturated_rps"].append(round(rate_rps, 4))
    return found
