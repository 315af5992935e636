"""``adaserve bench fleet``: whether what replicas say about themselves is true.

Two questions of a router, and one of who pays for the replicas, asked of real servers behind a real router:
does the headroom gauge tell a loaded replica from an idle one, is the predicted TPOT what requests get, and
would ``adaserve simulate capacity`` have foreseen the attainment?
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console

from adaserve.bench.client import Ask
from adaserve.bench.host_contention import HostContention
from adaserve.bench.simulate.fleet import SimulatedFleet
from adaserve.bench.simulate.traces import read_recorded
from adaserve.config import AdaServeConfig
from adaserve.fleet.local import Fleet, ReplicaSpec, RouterSpec
from adaserve.host.files import write_json
from adaserve.host.ports import free_port
from adaserve.loadgen.arrivals import Arrivals
from adaserve.loadgen.bench import refuse_what_ended_early, run_bench
from adaserve.loadgen.config import BenchConfig, Endpoint
from adaserve.loadgen.results import command_line, iter_records
from adaserve.scheduler.costs.latency import LatencyModel
from adaserve.scheduler.simulator.forecast_accuracy import CLOSE
from adaserve.server import ServerProcess, ServerSpec
from adaserve.slo.classes import SLOConfig
from adaserve.slo.run_summary import PREDICTED, RequestRecord
from adaserve.slo.trace import Trace

LOADS = (1, 2, 4, 8)
"""Requests on the loaded replica while headroom is compared."""

SAMPLES = 5
"""How often the gauges are read, per load and loaded replica."""

SIMULATIONS = 4
"""How often the load is simulated; the mean counts. At attainments around 80% they differ by up to 5
points."""

SAMPLE_S = 0.5
SETTLE_S = 1.5
"""A forecast is made once a second."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """How often the headroom of a loaded replica was below that of an idle one, over all classes."""

    samples: int
    right: int
    ties: int  # equal: a router could not tell

    @property
    def share(self) -> float:
        """Ties are wrong."""
        return self.right / self.samples if self.samples else 0.0


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predicted against delivered TPOT, both as the server counted them."""

    requests: int
    close: float  # share within CLOSE of the delivered one
    close_25: float  # within 25%
    median_error: float  # predicted / delivered - 1

    @staticmethod
    def of(records: Sequence[RequestRecord]) -> Predictions:
        """Counts the requests whose answers tell both."""
        told = [r.server_slo for r in records if r.ok and r.server_slo is not None]
        pairs = [(s.get(PREDICTED), s["tpot_ms"]) for s in told]
        error = np.array([p / d - 1 for p, d in pairs if p and d], np.float64)
        if not len(error):
            return Predictions(0, 0.0, 0.0, 0.0)
        wide = np.abs(error)
        return Predictions(
            len(error),
            float((wide <= CLOSE).mean()),
            float((wide <= 0.25).mean()),
            float(np.median(error)),
        )


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What to run."""

    out: Path
    replicas: int
    router: str
    size: str
    rps: float
    seconds: float
    warmup_s: float  # requests that arrive before are served and not judged
    seed: int
    policy: str


def run_fleet_bench(plan: FleetPlan, console: Console) -> dict[str, Any]:
    """Starts the fleet, measures, stops it, writes ``fleet.json``. Raises ServerError, ConfigError,
    LoadgenError, TraceError."""
    ServerSpec(size=plan.size, config=AdaServeConfig(policy=plan.policy))  # as each replica will be
    fleet = _fleet(plan)
    _traffic(plan, fleet.url, baseline_ms=30.0)
    plan.out.mkdir(parents=True, exist_ok=True)
    others = HostContention()
    with console.status("starting") as status:
        fleet.up(status.update)
    try:
        with others.watched():
            ranking = rank(fleet.replicas, say=lambda text: console.print(text, highlight=False))
            before_load = {path: path.stat().st_size for path in _recordings(plan)}
            summary, records = _load(plan, fleet, console)
        reports = [replica.report() for replica in fleet.replicas]
    finally:
        fleet.down()
    judged = [r for r in records if r.scheduled_s >= plan.warmup_s]
    classes = sorted({r.slo_class for r in judged})
    write_json(plan.out / "replicas.json", reports)
    for path, size in before_load.items():
        forget_beginning(path, size)
    result = {
        "command": command_line(),
        "headroom": asdict(ranking) | {"share": ranking.share},
        "predictions": {
            "all": asdict(Predictions.of(judged)),
            **{name: asdict(Predictions.of([r for r in judged if r.slo_class == name])) for name in classes},
        },
        "capacity": {
            "measured": float(summary["slo_attainment"] or 0.0),
            "simulated": _foreseen(plan, reports, records),
        },
        "other_programs": round(others.share, 3),
        "valid": summary["valid"],
        "invalid_reasons": summary["invalid_reasons"],
    }
    write_json(plan.out / "fleet.json", result)
    return result


def _fleet(plan: FleetPlan) -> Fleet:
    port, folder = free_port(), plan.out
    trace = ("--record-requests", str(folder / "trace.jsonl"))
    flags = ("--size", plan.size, "--policy", plan.policy, *trace)
    replicas = [ReplicaSpec(free_port(), (*flags, "--record", str(path))) for path in _recordings(plan)]
    urls = tuple(replica.url for replica in replicas)
    router = RouterSpec(urls, plan.router, port=port, metrics_port=free_port())
    return Fleet(replicas, router, folder)


def _recordings(plan: FleetPlan) -> list[Path]:
    """Files of recorded iterations, one for each replica."""
    return [plan.out / f"iterations-{i}.jsonl" for i in range(plan.replicas)]


# -- headroom -------------------------------------------------------------------------------


def rank(
    replicas: Sequence[ServerProcess],
    loads: Sequence[int] = LOADS,
    say: Callable[[str], None] = lambda _: None,
) -> Ranking:
    """Loads each replica in turn with that many requests, and compares its headroom with an idle one's."""
    for replica in replicas:
        _generate(replica.url, 24)
    pairs: list[tuple[float, float]] = []
    for load in loads:
        for i, loaded in enumerate(replicas):
            pairs += _under_load(loaded.url, replicas[i - 1].url, load)
        so_far = counted(pairs)
        say(f"headroom, {load} requests on one replica: {so_far.right} of {so_far.samples} right so far")
    return counted(pairs)


def counted(pairs: Sequence[tuple[float, float]]) -> Ranking:
    """``pairs``: the headroom of the loaded and of the idle replica, in each sample."""
    right = sum(loaded < idle for loaded, idle in pairs)
    ties = sum(loaded == idle for loaded, idle in pairs)
    return Ranking(len(pairs), right, ties)


def _under_load(loaded: str, idle: str, requests: int) -> list[tuple[float, float]]:
    """Headroom of both, by sample and class, while ``requests`` run on one at any time."""
    enough = threading.Event()

    def keep_busy() -> None:
        while not enough.is_set():
            _generate(loaded, 1500)

    with ThreadPoolExecutor(requests) as pool:
        clients = [pool.submit(keep_busy) for _ in range(requests)]
        try:
            time.sleep(SETTLE_S)
            pairs = []
            for _ in range(SAMPLES):
                here, there = headroom(loaded), headroom(idle)
                pairs += [(here[name], there[name]) for name in sorted(here.keys() & there.keys())]
                time.sleep(SAMPLE_S)
        finally:
            enough.set()
            httpx.post(loaded + "/abort_request", json={"rid": "", "abort_all": True}, timeout=30)
    for client in clients:
        client.result()
    return pairs


def headroom(url: str) -> dict[str, float]:
    """By class, as ``/v1/loads`` says it; classes without a TPOT SLO have none."""
    (load,) = httpx.get(f"{url}/v1/loads?include=slo", timeout=30).raise_for_status().json()["loads"]
    return {
        name: float(told["headroom"])
        for name, told in load["slo"]["classes"].items()
        if told["headroom"] is not None
    }


def _generate(url: str, tokens: int) -> None:
    """A request without an SLO; its answer is not looked at, since it may be cut off."""
    httpx.post(url + "/generate", json=Ask("import os\n", tokens, 0.7).body(), timeout=600)


# -- load -----------------------------------------------------------------------------------


def _load(plan: FleetPlan, fleet: Fleet, console: Console) -> tuple[dict[str, Any], list[RequestRecord]]:
    config = _traffic(plan, fleet.url, float(fleet.replicas[0].report()["baseline_ms"]))
    trace = plan.out / "trace.jsonl"
    os.truncate(trace, 0)  # what came before is not part of the load; the replicas keep the file open
    folder = plan.out / "load"
    summary = run_bench(config, folder, console=console)
    refuse_what_ended_early(summary)
    return summary, list(iter_records(folder))


def _traffic(plan: FleetPlan, url: str, baseline_ms: float) -> BenchConfig:
    """The mixed-SLO load test of the README, through the router. Raises LoadgenError."""
    return BenchConfig(
        server=Endpoint(url=url),
        arrivals=Arrivals(rps=plan.rps),
        duration_s=plan.seconds,
        warmup_s=plan.warmup_s,
        seed=plan.seed,
        baseline_ms=baseline_ms,
    )


# -- capacity -------------------------------------------------------------------------------


def load_rows(trace: Trace, records: Sequence[RequestRecord], warmup_s: float) -> tuple[Trace, int]:
    """The rows of a trace that ``records`` are about, without the requests that the load test sent to probe
    the server; and how many of the first rows belong to its warm-up."""
    answered = [r for r in records if r.ok]
    rows = trace.rows[max(0, len(trace) - len(answered)) :]
    warm_up = sum(r.scheduled_s < warmup_s for r in answered)
    return Trace.merged([replace(trace, rows=rows)]), warm_up


def forget_beginning(recording: Path, size: int) -> None:
    """Drops the first ``size`` bytes, and the line in which they end: they are about requests before the
    load."""
    rest = recording.read_bytes()[size:]
    recording.write_bytes(rest.partition(b"\n")[2])


def _foreseen(
    plan: FleetPlan, reports: Sequence[dict[str, Any]], records: Sequence[RequestRecord]
) -> dict[int, float]:
    """Attainment by the number of replicas, as ``adaserve simulate capacity`` says of the trace, by what all
    replicas recorded, and by the costs that the first one has learned."""
    costs = LatencyModel.from_json(reports[0]["latency_learned"] or reports[0]["latency"])
    baseline_ms = float(reports[0]["baseline_ms"])
    simulated = SimulatedFleet.of(plan.policy, costs, baseline_ms, plan.seed, _recordings(plan))
    recorded = read_recorded([str(plan.out / "trace.jsonl")], plan.seed)
    trace, warm_up = load_rows(recorded, records, plan.warmup_s)
    seeded = [replace(simulated.config, seed=plan.seed + i) for i in range(SIMULATIONS)]
    attainments = [
        replace(simulated, config=config).attainment(trace, SLOConfig(), warm_up=warm_up) for config in seeded
    ]
    sizes = sorted({1, plan.replicas, plan.replicas + 1})
    return {n: float(np.mean([of(n) for of in attainments])) for n in sizes}


def summary_text(result: dict[str, Any], replicas: int) -> str:
    """The findings, a line each."""
    headroom, capacity = result["headroom"], result["capacity"]
    lines = [
        f"headroom ranks loaded below idle in {headroom['share']:.1%} of {headroom['samples']} samples "
        f"({headroom['ties']} ties)"
    ]
    for name, told in result["predictions"].items():
        lines.append(
            f"predicted TPOT within {CLOSE:.0%} for {told['close']:.1%} of {told['requests']} requests "
            f"({name}; within 25%: {told['close_25']:.1%}; median error {told['median_error']:+.1%})"
        )
    simulated = capacity["simulated"][replicas]
    lines.append(
        f"attainment {capacity['measured']:.1%} measured, {simulated:.1%} simulated on {replicas}: "
        f"{100 * (simulated - capacity['measured']):+.1f} points"
    )
    lines.append(f"other programs used {result['other_programs']:.0%} of the machine")
    lines += [f"this run is not valid: {reason}" for reason in result["invalid_reasons"]]
    return "\n".join(lines)
