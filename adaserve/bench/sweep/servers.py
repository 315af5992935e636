"""The servers of a sweep: started when they are needed, and again when they died; asked over HTTP."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from adaserve.bench.client import Ask, send, stream
from adaserve.bench.start_server import running_server
from adaserve.bench.sweep.systems import PLAIN, STOCK, System, system
from adaserve.server import ServerError, ServerProcess, ServerSpec
from adaserve.slo.replay_lengths import ENV as REPLAY_ENV

BASELINE_REQUESTS, BASELINE_TOKENS = 7, 48
PACE_REQUESTS, PACE_TOKENS = 3, 20
CAPACITY_REQUESTS, CAPACITY_RUNNING = 64, 16
WARM_REQUESTS, WARM_RUNNING = 16, 4
PREFILL_TOKENS, PREFILL_REQUESTS = (16, 48, 128, 384), 5
IDLE, IDLE_ROUNDS = (PLAIN, STOCK), 6
SET_UP_ROUNDS = 3
"""Baseline, prefills and capacity are measured this often, in turns: a host has slow minutes."""

IdleRounds = Mapping[str, Mapping[str, Sequence[float]]]
"""Server -> ``tpot_ms`` of one request and ``saturated_rps`` -> a value per round; rounds are paired."""


@dataclass
class _Running:
    """A server that is up, and how it is set."""

    process: ServerProcess
    set_to: tuple[str | None, str | None] = (None, None)  # policy and prefills
    warm: set[str] = field(default_factory=set)  # systems that have served here


class Servers:
    """Starts the servers that blocks need, and leaves them up: one that sleeps costs nothing, and turns of
    seconds leave no time for starting. A context manager: what runs at the end is stopped."""

    def __init__(self, spec: ServerSpec, work: Path) -> None:
        self._spec, self._work = spec, work
        self._open = ExitStack()  # what runs
        self._servers: dict[str, _Running] = {}  # by System.server
        self.starts = 0

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._servers.clear()
        self._open.close()

    def serve(self, wanted: System, warm_up: Iterable[Ask] = ()) -> ServerProcess:
        """A drained server that is set as wanted, and has served requests so before. Raises ServerError,
        httpx errors when it died meanwhile."""
        if wanted.server in self._servers and not self._answers(wanted.server):
            self.stop()
        server = self._servers.get(wanted.server) or self._start(wanted)
        self._drain(server)
        self._set(server, wanted)
        if wanted.name not in server.warm:
            asks = [a if wanted.policy else a.plain() for a in warm_up]
            send(server.process.url, asks, WARM_RUNNING)
            server.warm.add(wanted.name)
            self._drain(server)
        return server.process

    def pace_ms(self, wanted: System, texts: Sequence[str]) -> float:
        """How fast the host is right now: ms per token of single requests with plain decoding, on the server
        that is set as wanted and drained, and is so again afterwards."""
        server = self._servers[wanted.server]
        if wanted.policy is not None:
            self._set(server, system(PLAIN))
        found_ms = unloaded(server.process, texts, PACE_REQUESTS, PACE_TOKENS)
        self._drain(server)
        self._set(server, wanted)
        return found_ms

    @staticmethod
    def _set(server: _Running, wanted: System) -> None:
        setting = (wanted.policy, wanted.prefill)
        if setting == server.set_to:
            return
        assert wanted.policy is not None and wanted.prefill is not None
        server.process.set_policy(wanted.policy)
        server.process.set_prefill(wanted.prefill)
        server.set_to = setting

    def _start(self, wanted: System) -> _Running:
        spec = self._spec if wanted.policy else replace(self._spec, algorithm=None)
        if wanted.priority:
            spec = replace(spec, extra=(*spec.extra, "--enable-priority-scheduling"))
        self.starts += 1
        log = self._work / f"server-{self.starts}-{wanted.server}.log"
        process = self._open.enter_context(running_server(spec, log, env={REPLAY_ENV: "1"}))
        started = self._servers[wanted.server] = _Running(process)
        return started

    def _answers(self, kind: str) -> bool:
        try:
            return httpx.get(self._servers[kind].process.url + "/health", timeout=30.0).status_code == 200
        except httpx.HTTPError:
            return False

    def _drain(self, server: _Running) -> None:
        """Waits until nothing runs, and empties the prefix cache. Raises ServerError, having stopped all."""
        try:
            server.process.drain()
        except ServerError:
            self.stop()
            raise


def unloaded(
    server: ServerProcess,
    texts: Sequence[str],
    requests: int = BASELINE_REQUESTS,
    tokens: int = BASELINE_TOKENS,
) -> float:
    """ms per token of single requests, one after the other: the median of several."""
    asks = [Ask(texts[k % len(texts)], tokens) for k in range(requests)]
    return statistics.median(stream(server.url, a).tpot_ms for a in asks)


def saturated_rps(server: ServerProcess, asks: Sequence[Ask]) -> float:
    """Requests/s of which at most ``CAPACITY_RUNNING`` run at a time: towards the end fewer do."""
    start_s = time.perf_counter()
    send(server.url, asks, CAPACITY_RUNNING)
    return len(asks) / (time.perf_counter() - start_s)


def prefill_times(server: ServerProcess, texts: Sequence[tuple[str, int]]) -> tuple[list[float], list[float]]:
    """Prompt tokens, and the TTFT of single requests of that length in ms. ``texts``: prompts with their
    tokens, roughly; those nearest to each of PREFILL_TOKENS are sent, each once, since a second time it would
    be cached. Lengths that the server has no room for are left out, but two have to be there."""
    tokens: list[float] = []
    times: list[float] = []
    for wanted in PREFILL_TOKENS:
        nearest = sorted(texts, key=lambda t: abs(t[1] - wanted))[:PREFILL_REQUESTS]
        try:
            answers = [stream(server.url, Ask(text, 2)) for text, _ in nearest]
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.BAD_REQUEST or len(tokens) < 2:
                raise
            break
        tokens.append(statistics.median(a.prompt_tokens for a in answers))
        times.append(statistics.median(a.ttft_ms for a in answers))
    return tokens, times


def idle_rounds(servers: Servers, asks: Sequence[Ask]) -> IdleRounds:
    """`none` and SGLang without speculation in turns, idle and saturated, on two servers that are both up."""
    found: dict[str, dict[str, list[float]]] = {n: {"tpot_ms": [], "saturated_rps": []} for n in IDLE}
    for k in range(IDLE_ROUNDS):
        for name in IDLE if k % 2 else IDLE[::-1]:
            server = servers.serve(system(name), asks[:WARM_REQUESTS])
            single_ms = unloaded(server, [str(a.prompt) for a in asks])
            server.drain()
            rate_rps = saturated_rps(server, [a.plain() for a in asks])
            found[name]["tpot_ms"].append(round(single_ms, 4))
            found[name]["saturated_rps"].append(round(rate_rps, 4))
    return found
