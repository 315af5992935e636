"""``adaserve simulate capacity`` and ``fleet``: replicas behind a router, in detail or at fleet scale."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from adaserve.bench.simulate.hardware import PROFILED_CACHE
from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.latency import LatencyModel
from adaserve.scheduler.policies import build_policy, is_slo_aware
from adaserve.scheduler.prefill import PrefillConfig, served_prefill
from adaserve.scheduler.simulator.fleet import (
    FleetConfig,
    PaceTable,
    fleet_attainment,
    fleet_requests,
    learn_pace,
    run_fleet,
)
from adaserve.scheduler.simulator.recorded import load_children, recorded_slowdown
from adaserve.scheduler.simulator.replica import ReplicaConfig
from adaserve.scheduler.simulator.run import SimulationConfig, simulate, violations
from adaserve.scheduler.simulator.trees import ChildSource, SyntheticChildren
from adaserve.scheduler.simulator.workload import SimRequest, TextModel, make_requests
from adaserve.slo.classes import SLOConfig
from adaserve.slo.metrics import RequestRecord
from adaserve.slo.trace import Trace

DETAILED = 3000
"""Requests of a trace that `capacity` simulates iteration by iteration, at some hundred requests a second."""


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """What ``capacity`` and ``fleet`` know of one replica and its requests."""

    latency: LatencyModel
    config: SimulationConfig
    baseline_s: float

    @staticmethod
    def of(
        policy: str,
        latency: LatencyModel,
        baseline_ms: float | None,
        seed: int,
        recorded: Path | None = None,
        kv_tokens: int = PROFILED_CACHE,
    ) -> SimulatedFleet:
        """``recorded``: iterations of an engine, to draw trees from; if they took longer than ``latency``
        says, so will the simulated ones. Raises ValueError where the policy is unknown."""
        build_policy(policy)
        children: ChildSource = load_children(recorded) if recorded else SyntheticChildren()
        times = recorded_slowdown(recorded, latency) if recorded else 1.0
        chunk = PrefillConfig().chunk_tokens
        replica = ReplicaConfig(
            latency,
            kv_tokens,
            prefill_mode="exclusive",
            prefill=served_prefill(chunk) if is_slo_aware(policy) else PrefillConfig(chunk),
            exclusive_tokens=chunk,
            busy=((0.0, np.inf, times),),
        )
        config = SimulationConfig(
            replica, policy, PolicyConfig(latency=latency), children=children, seed=seed
        )
        return SimulatedFleet(latency, config, (baseline_ms or latency.baseline_s() * 1e3) / 1e3)

    def pace(self) -> PaceTable:
        """How one replica fares under load; takes seconds."""
        return learn_pace(self.config, SLOConfig(), self.baseline_s, self.config.seed)

    def attainment(self, trace: Trace, slos: SLOConfig, router: str = "least-work") -> Callable[[int], float]:
        """Share of the trace's requests that would attain their SLOs, by the number of replicas.

        Long traces are simulated at fleet scale, which knows nothing of the admission gate."""
        if len(trace) <= DETAILED:
            requests = make_requests(trace, slos, self.baseline_s, TextModel(), self.config.seed)
            return lambda n: 1.0 - violations(self._detailed(requests, n, router))
        pace = self.pace()
        return lambda n: fleet_attainment(
            trace, slos, self.baseline_s, self.latency, pace, FleetConfig(n, router, self.config.seed)
        )

    def _detailed(self, requests: Sequence[SimRequest], replicas: int, router: str) -> list[RequestRecord]:
        fleet = replace(self.config, replicas=replicas, router=router)
        return simulate([replace(r) for r in requests], fleet).records()

    def serve(self, trace: Trace, replicas: int, router: str, show: Callable[[int], None]) -> dict[str, Any]:
        """The trace at fleet scale, with the classes that servers know; JSON values. Raises SLOError."""
        began, seed = time.process_time(), self.config.seed
        pace = self.pace()
        requests = fleet_requests(trace, SLOConfig(), self.baseline_s, pace.spread, seed)
        ready = time.process_time()
        run_fleet(requests, self.latency, pace, FleetConfig(replicas, router, seed), show)
        met, wait_s = requests.attained(), requests.first - requests.arrival
        return {
            "requests": len(trace),
            "replicas": replicas,
            "requests_per_s": trace.rps,
            "policy": self.config.policy,
            "router": router,
            "seed": seed,
            "attainment": float(met.mean()),
            "attainment_by_class": {
                name: float(met[requests.kind == i].mean()) for i, name in enumerate(requests.class_names)
            },
            "mean_ttft_ms": float(1e3 * np.nanmean(wait_s)),
            "p99_ttft_ms": float(1e3 * np.nanpercentile(wait_s, 99)),
            "cpu_s": {"prepare": ready - began, "serve": time.process_time() - ready},
        }
