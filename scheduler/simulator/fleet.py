"""Fleet scale: a million requests on a hundred replicas, all replicas stepped together in numpy.

The policy itself is too slow to run two million times, so its pace is learned first from the detailed
simulator: seconds per iteration and tokens per request and iteration, by batch size and class. What is
lost: the policy's reaction to single requests that fall behind. ``tests`` compare both on one replica.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from adaserve.scheduler.interface import FloatArray, IntArray
from adaserve.scheduler.latency import LatencyModel
from adaserve.scheduler.prefill import PrefillConfig
from adaserve.scheduler.simulator.run import SimulationConfig, build_replica
from adaserve.scheduler.simulator.workload import TextModel, make_requests, synthetic_trace
from adaserve.slo.classes import SLOConfig
from adaserve.slo.trace import Trace

N_LEVELS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96)
PACE_MIX = {"coding": 0.6, "chat": 0.2, "summarization": 0.2}


@dataclass(frozen=True, slots=True)
class PaceTable:
    """What one replica does with n running requests."""

    rows: FloatArray  # [k] batch sizes
    seconds: FloatArray  # [k] per decode iteration, no prefill
    tokens: dict[str, FloatArray]  # class -> [k] tokens per request and iteration
    spread: float  # standard deviation of log(tokens) between requests


def learn_pace(config: SimulationConfig, slos: SLOConfig, baseline_s: float, seed: int) -> PaceTable:
    """Runs the detailed replica at fixed batch sizes, each for a few hundred iterations."""
    seconds: list[float] = []
    tokens: dict[str, list[float]] = {name: [] for name in PACE_MIX}
    ratios: list[float] = []
    for n in N_LEVELS:
        trace = synthetic_trace(n, 1e6, seed, PACE_MIX)
        rows = tuple(replace(r, arrival_s=0.0, output_tokens=100_000) for r in trace.rows)
        text = TextModel()
        requests = make_requests(replace(trace, rows=rows), slos, baseline_s, text, seed)
        endless = replace(config.replica, kv_tokens=1 << 40, noise=0.0, prefill=PrefillConfig())  # no gate
        replica = build_replica(replace(config, replica=endless))
        for request in requests:
            replica.submit(request)
        while len(replica.rows) < n:
            replica.step()
        before, first = replica.rows.decoded.copy(), len(replica.log)
        for _ in range(150):
            replica.step()
        made = (replica.rows.decoded - before) / 150
        seconds.append(float(np.mean([entry[6] for entry in replica.log[first:]])))
        classes = np.array(replica.rows.classes)
        for name, column in tokens.items():
            own = made[classes == name]
            column.append(float(own.mean()) if len(own) else float(made.mean()))
            ratios += list(np.log(own / own.mean())) if len(own) > 1 else []
    return PaceTable(
        np.array(N_LEVELS, np.float64),
        np.array(seconds),
        {k: np.array(v) for k, v in tokens.items()},
        float(np.std(ratios)) if ratios else 0.0,
    )


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """A fleet of equal replicas."""

    replicas: int
    router: str = "least-work"
    seed: int = 0
    chunk_tokens: int = 512
    slots: int = 128  # running requests per replica
    window_s: float = 0.25  # arrivals are routed in windows of this length


class Fleet:
    """State of all replicas: [R, S] slots, R clocks, R queues."""

    def __init__(
        self, config: FleetConfig, latency: LatencyModel, pace: PaceTable, requests: FleetRequests
    ) -> None:
        shape = (config.replicas, config.slots)
        self.config, self.pace, self.requests = config, pace, requests
        self.clock: FloatArray = np.zeros(config.replicas)
        self.owner: IntArray = np.full(shape, -1)  # request number, -1 = free
        self.left: FloatArray = np.zeros(shape)  # tokens still to produce
        self.work: FloatArray = np.zeros(config.replicas)  # tokens routed and not produced
        self.queues: list[deque[int]] = [deque() for _ in range(config.replicas)]
        self.rest: IntArray = np.zeros(config.replicas, np.int64)  # prompt tokens left of each queue's head
        self.waiting = np.zeros(config.replicas, np.bool_)
        self._rng = np.random.default_rng([config.seed, 0xF1EE7])
        self._token_s = (
            float(latency.verify_s(513.0) - latency.verify_s(1.0)) / 512
            + float(latency.draft_step_s(513) - latency.draft_step_s(1)) / 512
        )
        self._fixed_s = latency.verify_s(1.0)
        names = requests.class_names
        grid = np.arange(config.slots + 1, dtype=np.float64)
        self._seconds: FloatArray = np.interp(grid, pace.rows, pace.seconds)
        mean: FloatArray = np.mean(np.stack(list(pace.tokens.values())), axis=0)
        self._tokens: FloatArray = np.stack(
            [np.interp(grid, pace.rows, pace.tokens.get(c, mean)) for c in names]
        )

    def submit(self, replica: int, request: int) -> None:
        """Queues a request; an idle replica wakes at its arrival."""
        if not self.waiting[replica] and not (self.owner[replica] >= 0).any():
            self.clock[replica] = max(self.clock[replica], self.requests.arrival[request])
        if not self.queues[replica]:
            self.rest[replica] = self.requests.prompt[request]
        self.queues[replica].append(request)
        self.waiting[replica] = True
        self.work[replica] += self.requests.output[request]

    def advance(self, until_s: float) -> None:
        """Steps every busy replica until its clock passes ``until_s``."""
        while True:
            busy = (self.owner >= 0).any(axis=1) | self.waiting
            at = np.flatnonzero(busy & (self.clock < until_s))
            if not len(at):
                return
            self._step(at)

    def _step(self, at: IntArray) -> None:
        active = self.owner[at] >= 0
        n = active.sum(axis=1)
        chunk, ready = self._prefill(at)
        self.clock[at] += np.where(n > 0, self._seconds[n], self._fixed_s) + chunk * self._token_s
        if active.any():
            i, j = np.nonzero(active)
            rows, owner = at[i], self.owner[at[i], j]
            r = self.requests
            mean = self._tokens[r.kind[owner], n[i]] * r.factor[owner]
            new = np.maximum(1.0, np.floor(mean + self._rng.random(len(mean))))
            made = np.minimum(new, self.left[rows, j])
            self.left[rows, j] -= made
            self.work -= np.bincount(rows, made, len(self.work))
            over = self.left[rows, j] <= 0
            r.end[owner[over]] = self.clock[rows[over]]
            self.owner[rows[over], j[over]] = -1
        for replica, request in ready:
            self._start(replica, request)

    def _prefill(self, at: IntArray) -> tuple[FloatArray, list[tuple[int, int]]]:
        """Spends each waiting replica's chunk on its queue; returns tokens [len(at)] and finished prompts."""
        tokens, ready = np.zeros(len(at)), []
        for k in np.flatnonzero(self.waiting[at]).tolist():
            replica = int(at[k])
            queue, left = self.queues[replica], self.config.chunk_tokens
            free = int((self.owner[replica] < 0).sum())
            while queue and left > 0 and free > 0:
                take = min(left, int(self.rest[replica]))
                left -= take
                self.rest[replica] -= take
                if self.rest[replica] == 0:
                    ready.append((replica, queue.popleft()))
                    free -= 1
                    self.rest[replica] = self.requests.prompt[queue[0]] if queue else 0
            self.waiting[replica] = bool(queue)
            tokens[k] = self.config.chunk_tokens - left
        return tokens, ready

    def _start(self, replica: int, request: int) -> None:
        r = self.requests
        r.first[request] = self.clock[replica]
        self.work[replica] -= 1
        if r.output[request] <= 1:
            r.end[request] = self.clock[replica]
            return
        slot = int(np.argmin(self.owner[replica]))
        self.owner[replica, slot] = request
        self.left[replica, slot] = r.output[request] - 1


@dataclass(slots=True)
class FleetRequests:
    """Requests as arrays; ``first`` and ``end`` are written by the fleet (NaN = never)."""

    arrival: FloatArray
    prompt: IntArray
    output: IntArray
    kind: IntArray  # index into class_names
    tpot_slo: FloatArray
    ttft_slo: FloatArray
    factor: FloatArray  # the request's own pace relative to its class
    class_names: tuple[str, ...]
    first: FloatArray
    end: FloatArray

    def attained(self) -> np.ndarray:
        """Requests that met their SLOs, [n] bool; unfinished ones did not."""
        made = np.maximum(self.output - 1, 1)
        tpot = (self.end - self.first) / made
        met = (self.output <= 1) | (tpot <= self.tpot_slo * (1 + 1e-9))
        done: np.ndarray = np.isfinite(self.end) & met & (self.first - self.arrival <= self.ttft_slo)
        return done


def fleet_requests(
    trace: Trace, slos: SLOConfig, baseline_s: float, spread: float, seed: int
) -> FleetRequests:
    """Arrays of a trace; SLOs are resolved once per distinct (class, milliseconds)."""
    memo: dict[tuple[str | None, float | None, float | None, float | None], tuple[str, float, float]] = {}
    kinds: dict[str, int] = {}
    n = len(trace)
    kind, tpot, ttft = np.zeros(n, np.int64), np.zeros(n), np.zeros(n)
    for i, row in enumerate(trace.rows):
        key = (row.slo_class, row.slo_tpot_ms, row.slo_x_baseline, row.slo_ttft_ms)
        if key not in memo:
            slo = row.slo(slos, baseline_s)
            memo[key] = (slo.slo_class, slo.tpot_s, slo.ttft_s)
        name, tpot[i], ttft[i] = memo[key]
        kind[i] = kinds.setdefault(name, len(kinds))
    rng = np.random.default_rng([seed, 0xFAC])
    return FleetRequests(
        arrival=np.array([r.arrival_s for r in trace.rows]),
        prompt=np.array([max(1, r.prompt_tokens) for r in trace.rows], np.int64),
        output=np.array([max(1, r.output_tokens) for r in trace.rows], np.int64),
        kind=kind,
        tpot_slo=tpot,
        ttft_slo=ttft,
        factor=np.exp(rng.normal(0, spread, n) - spread**2 / 2),
        class_names=tuple(kinds),
        first=np.full(n, np.nan),
        end=np.full(n, np.nan),
    )


def run_fleet(
    requests: FleetRequests,
    latency: LatencyModel,
    pace: PaceTable,
    config: FleetConfig,
    progress: Callable[[int], None] | None = None,
) -> FleetRequests:
    """Routes and serves all requests; ``progress`` gets the number routed so far."""
    fleet = Fleet(config, latency, pace, requests)
    choose = _router(config, requests, pace)
    n, i = len(requests.arrival), 0
    while i < n:
        window_end = requests.arrival[i] + config.window_s
        fleet.advance(float(requests.arrival[i]))
        while i < n and requests.arrival[i] < window_end:
            fleet.submit(choose(fleet, i), i)
            i += 1
        if progress:
            progress(i)
    fleet.advance(float(requests.arrival[-1]) + 3600.0)
    return requests


def _router(config: FleetConfig, requests: FleetRequests, pace: PaceTable) -> Callable[[Fleet, int], int]:
    if config.router == "round-robin":
        return lambda fleet, i: i % config.replicas
    if config.router == "least-work":
        return lambda fleet, i: int(np.argmin(fleet.work))
    if config.router != "slo":
        raise ValueError(f"unknown router {config.router!r}; choose round-robin, least-work or slo")
    lax_s = 2.0 * float(pace.seconds[-1]) / float(np.mean([v[-1] for v in pace.tokens.values()]))

    def slo(fleet: Fleet, i: int) -> int:
        """Lax requests fill the replicas that are a little busier than the median; strict ones spread."""
        if requests.tpot_slo[i] < lax_s or not np.isfinite(requests.tpot_slo[i]):
            return int(np.argmin(fleet.work))
        limit = 1.25 * float(np.median(fleet.work)) + 1
        return int(np.argmax(np.where(fleet.work <= limit, fleet.work, -1.0)))

    return slo


def fleet_attainment(
    trace: Trace,
    slos: SLOConfig,
    baseline_s: float,
    latency: LatencyModel,
    pace: PaceTable,
    config: FleetConfig,
) -> float:
    """Share of a trace's requests that attain their SLOs on that fleet."""
    requests = fleet_requests(trace, slos, baseline_s, pace.spread, config.seed)
    return float(run_fleet(requests, latency, pace, config).attained().mean())
