"""Runs requests through replicas behind a router, and writes records in the project's result schema."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from sortedcontainers import SortedList

from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.interface import Policy
from adaserve.scheduler.policies import build_policy
from adaserve.scheduler.simulator.clairvoyant import CLAIRVOYANT, ClairvoyantPolicy, RevealingSampler
from adaserve.scheduler.simulator.order import build_order
from adaserve.scheduler.simulator.played import PlayedReplica
from adaserve.scheduler.simulator.replica import Replica, ReplicaConfig
from adaserve.scheduler.simulator.router import build_router
from adaserve.scheduler.simulator.trees import ChildSource, SyntheticChildren, TreeSampler
from adaserve.scheduler.simulator.workload import SimRequest
from adaserve.slo.classes import to_ms
from adaserve.slo.run_summary import RequestRecord


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """Everything but the requests."""

    replica: ReplicaConfig
    policy: str = "priced"
    """A policy name, fcfs / stta / sep-pipe (continuous batching with that order), or one of CLAIRVOYANT."""
    policy_config: PolicyConfig | None = None  # None = the defaults with the replica's latency model
    replicas: int = 1
    router: str = "least-work"
    children: ChildSource = field(default_factory=SyntheticChildren)
    seed: int = 0
    drain_s: float = 600.0  # simulated seconds after the last arrival, then the rest counts as failed


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Requests as they ended, and the replicas with their logs."""

    requests: list[SimRequest]
    replicas: list[PlayedReplica]

    def records(self) -> list[RequestRecord]:
        """One judged record per request, by arrival."""
        return [to_record(r) for r in self.requests]


def build_replica(config: SimulationConfig, index: int = 0) -> PlayedReplica:
    """A replica with its own policy and random streams."""
    latency = config.replica.latency
    order = build_order(config.policy, latency)
    policy_config = config.policy_config or PolicyConfig(latency=latency)
    policy: Policy
    streams = np.random.default_rng([config.seed, index, 0x51A]).spawn(2)
    if config.policy in CLAIRVOYANT:
        policy = seer = ClairvoyantPolicy(config.policy, policy_config)
        sampler: TreeSampler = RevealingSampler(config.children, streams[0], seer)
    else:
        policy = build_policy(config.policy if order is None else "none", policy_config)
        sampler = TreeSampler(config.children, streams[0])
    return PlayedReplica(policy, config.replica, sampler, streams[1], order)


def simulate(
    requests: list[SimRequest], config: SimulationConfig, progress: Callable[[int], None] | None = None
) -> SimulationResult:
    """Plays every iteration. ``progress`` as in ``serve``."""
    replicas = [build_replica(config, i) for i in range(config.replicas)]
    serve(requests, replicas, config, progress)
    return SimulationResult(requests, replicas)


def serve(
    requests: Sequence[SimRequest],
    replicas: Sequence[Replica],
    config: SimulationConfig,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Discrete events: the earliest of next arrival and next iteration. ``requests`` by arrival; ``progress``
    gets how many have arrived so far."""
    route = build_router(config.router)
    busy: SortedList = SortedList()  # clocks and numbers of busy replicas
    horizon = (requests[-1].arrival_s if requests else 0.0) + config.drain_s
    arrived = 0
    while arrived < len(requests) or busy:
        clock = busy[0][0] if busy else math.inf
        if arrived < len(requests) and requests[arrived].arrival_s <= clock:
            index = route(replicas, requests[arrived])
            idle = not replicas[index].busy
            replicas[index].submit(requests[arrived])
            if idle and replicas[index].busy:
                busy.add((replicas[index].now_s, index))
            arrived += 1
            if progress and arrived % 50 == 0:
                progress(arrived)
            continue
        if clock > horizon:
            break
        _, index = busy.pop(0)
        replicas[index].step()
        if replicas[index].busy:
            busy.add((replicas[index].now_s, index))


def to_record(request: SimRequest) -> RequestRecord:
    """The request in the project's record form, judged."""
    ended = request.finished
    record = RequestRecord(
        id=request.rid,
        slo_class=request.slo_class,
        slo_ttft_ms=to_ms(request.ttft_slo_s),
        slo_tpot_ms=to_ms(request.tpot_slo_s),
        scheduled_s=request.arrival_s,
        sent_s=request.arrival_s,
        first_token_s=request.first_token_s if ended else None,
        last_token_s=request.last_token_s if ended else None,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens if ended else 0,
        n_chunks=request.iterations + 1 if ended else 0,
        finish_reason="length" if ended else None,
        error=None if ended else ("rejected-saturated" if request.shed else "unfinished"),
        http_status=200 if ended else 429 if request.shed else None,
        accept_length=request.produced / request.iterations if request.iterations else None,
    )
    record.judge()
    return record


def violations(records: Iterable[RequestRecord]) -> float:
    """1 - attainment."""
    met = [r.attained for r in records]
    return 1.0 - sum(met) / max(1, len(met))
