"""``adaserve simulate capacity`` and ``fleet``: replicas behind a router, played or looked up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from adaserve.bench.simulate.hardware import PROFILED_CACHE
from adaserve.bench.simulate.server_defaults import server_defaults
from adaserve.scheduler.costs.latency import LatencyModel
from adaserve.scheduler.simulator.paced import PacedReplica, PaceTable, learn_pace
from adaserve.scheduler.simulator.recorded import RECORDED_TEXT, load_recorded
from adaserve.scheduler.simulator.run import SimulationConfig, serve, simulate, to_record, violations
from adaserve.scheduler.simulator.workload import SimRequest, TextModel, make_requests
from adaserve.slo.classes import SLOConfig
from adaserve.slo.run_summary import RequestRecord, summarize
from adaserve.slo.trace import Trace

DETAILED = 3000
"""Requests of a trace whose every iteration `capacity` plays, at some hundred requests a second."""


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """What ``capacity`` and ``fleet`` know of the replicas, the router and the requests."""

    config: SimulationConfig  # how many replicas there are is said later
    baseline_s: float
    text: TextModel = field(default_factory=TextModel)
    slowdown: float = 1.0  # times that iterations take what the hardware or the profile says

    @staticmethod
    def of(
        policy: str,
        latency: LatencyModel,
        baseline_ms: float | None,
        seed: int,
        recorded: Sequence[Path] = (),
        kv_tokens: int = PROFILED_CACHE,
        router: str = "least-work",
        mixed: bool = False,
    ) -> SimulatedFleet:
        """``recorded``: iterations of replicas, to draw trees from; if they took longer than ``latency``
        says, so will the simulated ones, and prefills take what the recorded ones did. ``mixed``: as in
        ``server_defaults``. Raises ValueError if the policy is unknown, or if the recordings say too
        little."""
        found = load_recorded(recorded, latency) if recorded else None
        mixed = mixed or (found is not None and found.mixed)
        config = replace(server_defaults(policy, latency, seed, kv_tokens, mixed), router=router)
        text, slowdown = TextModel(), 1.0
        if found is not None:
            text, slowdown = RECORDED_TEXT, found.slowdown
            replica = replace(config.replica, busy=((0.0, np.inf, slowdown),), prefill_cost=found.prefills)
            config = replace(config, replica=replica, children=found.children)
        return SimulatedFleet(config, (baseline_ms or latency.baseline_s() * 1e3) / 1e3, text, slowdown)

    def attainment(self, trace: Trace, slos: SLOConfig, warm_up: int = 0) -> Callable[[int], float]:
        """Share of the trace's requests that would attain their SLOs, by the number of replicas.
        ``warm_up``: of the first ones, which are served and not counted."""
        served = self.records(trace, slos)
        return lambda n: 1.0 - violations(served(n)[warm_up:])

    def records(self, trace: Trace, slos: SLOConfig) -> Callable[[int], list[RequestRecord]]:
        """The trace's requests as replicas would serve them, by the number of replicas.

        The iterations of long traces are looked up, those of shorter ones played."""
        requests = self._requests(trace, slos)
        if len(trace) <= DETAILED:
            return lambda n: simulate(_fresh(requests), replace(self.config, replicas=n)).records()
        pace = learn_pace(requests, self.config)
        return lambda n: self._paced(_fresh(requests), pace, n)

    def _requests(self, trace: Trace, slos: SLOConfig) -> list[SimRequest]:
        return make_requests(trace, slos, self.baseline_s, self.text, self.config.seed)

    def _paced(
        self,
        requests: list[SimRequest],
        pace: PaceTable,
        replicas: int,
        show: Callable[[int], None] | None = None,
    ) -> list[RequestRecord]:
        config = replace(self.config, replicas=replicas)
        streams = np.random.default_rng([config.seed, 0xF1EE7]).spawn(replicas)
        drafts = config.policy != "none"
        fleet = [PacedReplica(pace, config.replica, rng, drafts) for rng in streams]
        serve(requests, fleet, config, show)
        return [to_record(r) for r in requests]

    def serve(self, trace: Trace, replicas: int, show: Callable[[int], None]) -> dict[str, Any]:
        """The trace with looked-up iterations and the classes that servers know; JSON values. Raises
        SLOError."""
        began = time.process_time()
        requests = self._requests(trace, SLOConfig())
        pace = learn_pace(requests, self.config)
        ready = time.process_time()
        summary = summarize(self._paced(requests, pace, replicas, show))
        return {
            "requests": len(trace),
            "replicas": replicas,
            "requests_per_s": trace.rps,
            "policy": self.config.policy,
            "router": self.config.router,
            "seed": self.config.seed,
            "attainment": summary["slo_attainment"],
            "attainment_by_class": {n: c["slo_attainment"] for n, c in summary["by_class"].items()},
            "mean_ttft_ms": summary["mean_ttft_ms"],
            "p99_ttft_ms": summary["p99_ttft_ms"],
            "cpu_s": {"prepare": ready - began, "serve": time.process_time() - ready},
        }


def _fresh(requests: Sequence[SimRequest]) -> list[SimRequest]:
    """Copies of the requests, since a simulation writes into them."""
    return [replace(r) for r in requests]
