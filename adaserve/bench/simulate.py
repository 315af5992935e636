"""``adaserve simulate``: policies, loads and fleets without a GPU."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import numpy as np
import typer
import yaml
from rich.console import Console
from rich.progress import Progress

from adaserve.bench.context.simulated import simulate_context
from adaserve.bench.fit import show_fit
from adaserve.bench.forecast import forecast_text
from adaserve.bench.options import counts, floats
from adaserve.bench.options import seeds as seed_list
from adaserve.bench.study import (
    Case,
    Setting,
    markdown,
    plot_reliability,
    plot_timeline,
    plot_violations,
    run_case,
    run_grid,
)
from adaserve.loadgen.figures import save
from adaserve.loadgen.results import command_line
from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.latency import LatencyModel, ProfileError, load_latency
from adaserve.scheduler.policies import build_policy, is_slo_aware, policy_names
from adaserve.scheduler.prefill import Order, PrefillConfig, served_prefill
from adaserve.scheduler.simulator.capacity import min_replicas
from adaserve.scheduler.simulator.clairvoyant import CLAIRVOYANT
from adaserve.scheduler.simulator.fleet import (
    FleetConfig,
    PaceTable,
    fleet_attainment,
    fleet_requests,
    learn_pace,
    run_fleet,
)
from adaserve.scheduler.simulator.hardware import hardware_latency, kv_capacity_tokens
from adaserve.scheduler.simulator.order import ROW_ORDERS
from adaserve.scheduler.simulator.recorded import load_children, recorded_slowdown
from adaserve.scheduler.simulator.replica import PrefillMode, ReplicaConfig
from adaserve.scheduler.simulator.run import SimulationConfig, simulate, violations
from adaserve.scheduler.simulator.trees import ChildSource, SyntheticChildren
from adaserve.scheduler.simulator.workload import SimRequest, TextModel, make_requests, synthetic_trace
from adaserve.slo.classes import SLOConfig, SLOError
from adaserve.slo.metrics import RequestRecord
from adaserve.slo.trace import Trace, TraceError, assign_classes, read_trace

app = typer.Typer(help="Simulate policies, loads and fleets without a GPU.", no_args_is_help=True)
console = Console(stderr=True)
PAPER_MIX = {"coding": 0.6, "chat": 0.2, "summarization": 0.2}

# Options that several commands have.
OneTrace = Annotated[str, typer.Option(help="trace file, or synthetic:N:RPS[:BURST]")]
TensorParallel = Annotated[int, typer.Option(help="tensor parallel degree")]
ProfileFile = Annotated[Path | None, typer.Option(help="latency profile of `adaserve profile` instead")]
CacheTokens = Annotated[int | None, typer.Option(help="KV cache size; default from the hardware")]
RouterName = Literal["round-robin", "least-work", "slo"]
Baseline = Annotated[float | None, typer.Option(help="unloaded ms per token; default from latency")]
JsonFile = Annotated[Path | None, typer.Option(help="JSON file for the result")]

PROFILED_CACHE = 200_000
DETAILED = 3000
"""Requests of a trace that `capacity` simulates iteration by iteration, at some hundred requests a second."""


def _fail(error: Exception | str) -> NoReturn:
    console.print(f"[red]error:[/red] {error}")
    raise typer.Exit(2)


def read_workload(spec: str, seed: int) -> Trace:
    """A trace file, or ``synthetic:N:RPS[:BURST]``. Rows without a class or SLO get the paper's mix."""
    if spec.startswith("synthetic:"):
        parts = spec.split(":")[1:]
        if len(parts) not in (2, 3):
            raise TraceError(f"expected synthetic:N:RPS or synthetic:N:RPS:BURST, got {spec!r}")
        return synthetic_trace(int(parts[0]), float(parts[1]), seed, PAPER_MIX, *map(float, parts[2:]))
    return _with_classes(read_trace(spec), seed)


def read_recorded(specs: list[str], seed: int) -> Trace:
    """As ``read_workload``, or what several servers recorded, in the order in which requests finished."""
    if len(specs) == 1 and specs[0].startswith("synthetic:"):
        return read_workload(specs[0], seed)
    return _with_classes(Trace.merged(read_trace(path, sort=True) for path in specs), seed)


def _with_classes(trace: Trace, seed: int) -> Trace:
    if all(row.slo_class is None and row.slo_tpot_ms is None for row in trace.rows):
        return replace(trace, rows=tuple(assign_classes(trace.rows, PAPER_MIX, seed)))
    return trace


def read_policy_config(text: str, latency: LatencyModel) -> PolicyConfig:
    """``key=value,key=value`` over the defaults; values are YAML. Raises ValueError naming the keys."""
    values: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        values[key] = yaml.safe_load(value)
    try:
        return PolicyConfig(latency=latency, **values)
    except TypeError as error:
        names = ", ".join(PolicyConfig.__dataclass_fields__)
        raise ValueError(f"{error}; settings are: {names}") from error


def _latency(model: str, gpu: str, tp: int, profile: Path | None) -> LatencyModel:
    return load_latency(profile) if profile else hardware_latency(model, gpu, tp)


def _cache(model: str, gpu: str, tp: int, profile: Path | None) -> int:
    """Tokens of KV cache; a profile does not say how much memory its host has."""
    return PROFILED_CACHE if profile else kv_capacity_tokens(model, gpu, tp)


def split_policy(spec: str) -> tuple[str, str, str]:
    """``name`` or ``label=name:key=value,...`` -> (label, name, settings)."""
    head, _, settings = spec.partition(":")
    label, _, name = head.partition("=")
    return label, name or label, settings


@app.command()
def run(
    trace: Annotated[list[str], typer.Option(help="trace file, or synthetic:N:RPS[:BURST]; may be repeated")],
    policy: Annotated[
        list[str],
        typer.Option(
            help=f"{', '.join((*policy_names(), *ROW_ORDERS[1:], *CLAIRVOYANT))}; or label=name:key=value,..."
        ),
    ] = ["adaserve"],  # noqa: B006 - typer copies it
    model: str = "llama-3.1-70b",
    gpu: str = "a100",
    tp: TensorParallel = 4,
    profile: ProfileFile = None,
    kv_tokens: CacheTokens = None,
    speedup: Annotated[
        Any, typer.Option(parser=floats, metavar="A,B", help="loads as multiples of the trace's own rate")
    ] = "1",
    seeds: Annotated[Any, typer.Option(parser=seed_list, metavar="A,B", help="0,1,2 or x3")] = "0",
    baseline_ms: Baseline = None,
    slo_config: Annotated[Path | None, typer.Option(help="YAML with SLO classes")] = None,
    prefill: PrefillMode = "mixed",
    chunk: int = 512,
    order: Annotated[Order, typer.Option(help="order in which prompts are prefilled")] = "fcfs",
    gate: Annotated[float | None, typer.Option(help="start prefills only above this headroom")] = None,
    shed: Annotated[bool, typer.Option(help="answer 429 when the TTFT SLO is already lost")] = False,
    lag: Annotated[bool, typer.Option(help="overlap schedule: outcomes arrive one plan late")] = False,
    replicas: int = 1,
    router: RouterName = "least-work",
    miscalibration: float = 0.15,
    eos_share: Annotated[float, typer.Option(help="share of requests that stop before their cap")] = 0.0,
    recorded: Annotated[
        Path | None, typer.Option(help="recording of engine iterations to draw trees from")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="folder for results")] = None,
    records: Annotated[bool, typer.Option(help="write one line per request to --out")] = True,
) -> None:
    """Simulate every trace x load x policy x seed; print a table, write records and plots to --out."""
    arguments = dict(locals())
    try:
        latency = _latency(model, gpu, tp, profile)
        cache = kv_tokens or _cache(model, gpu, tp, profile)
        prefill_config = PrefillConfig(chunk, order, gate, shed=shed)
        replica = ReplicaConfig(latency, cache, prefill_mode=prefill, prefill=prefill_config, lag=lag)
        children: ChildSource = load_children(recorded) if recorded else SyntheticChildren(miscalibration)
        slos = SLOConfig.load(slo_config) if slo_config else SLOConfig()
        setting = Setting(
            slos, TextModel(eos_share=eos_share), (baseline_ms or latency.baseline_s() * 1e3) / 1e3
        )
        cases = []
        for name in trace:
            for factor in speedup:
                for seed in seeds:
                    loaded = read_workload(name, seed).scaled(1 / factor)
                    label = name if name.startswith("synthetic") else Path(name).stem
                    for spec in policy:
                        tag, chosen, settings = split_policy(spec)
                        if chosen not in (*ROW_ORDERS, *CLAIRVOYANT):
                            build_policy(chosen)
                        config = SimulationConfig(
                            replica, chosen, read_policy_config(settings, latency), replicas, router, children
                        )
                        cases.append(Case(label, loaded.rps, tag, seed, config, loaded))
    except (ValueError, ProfileError, TraceError, SLOError, OSError) as error:
        _fail(error)
    _run_and_report(cases, setting, out, arguments, records)


def _run_and_report(
    cases: list[Case], setting: Setting, out: Path | None, arguments: dict[str, Any], records: bool
) -> None:
    if out:
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.yaml").write_text(yaml.safe_dump(_plain(arguments)), encoding="utf-8")
        (out / "command.txt").write_text(command_line() + "\n", encoding="utf-8")
    with Progress(console=console) as progress:
        task = progress.add_task("simulating", total=len(cases))

        def show(i: int, case: Case) -> None:
            progress.update(
                task, completed=i, description=f"{case.workload} {case.load:.2f} rps {case.policy}"
            )

        try:
            rows = run_grid(cases, setting, out, show, records)
        except SLOError as error:
            _fail(error)
    text = markdown(rows)
    print(text)
    if out:
        (out / "table.md").write_text(text + "\n", encoding="utf-8")
        (out / "summary.json").write_text(
            json.dumps([r["summary"] for r in rows], indent=1) + "\n", encoding="utf-8"
        )
        plot_violations(rows, out / "violations.png")
        _, _, result = run_case(cases[0], setting)
        plot_timeline(result, out / "timeline.png")
        plot_reliability(result, out / "reliability.png")


def _plain(arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: str(v) if isinstance(v, Path) else v for k, v in arguments.items()}


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
        says, so will the simulated ones."""
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


@app.command()
def capacity(
    trace: Annotated[
        list[str],
        typer.Option(
            help="trace file, or synthetic:N:RPS[:BURST]; may be repeated for what several servers "
            "wrote with --record-requests"
        ),
    ],
    target: Annotated[float, typer.Option(help="attainment to reach")] = 0.95,
    policy: str = "priced",
    model: str = "llama-3.1-70b",
    gpu: str = "a100",
    tp: TensorParallel = 4,
    profile: ProfileFile = None,
    kv_tokens: CacheTokens = None,
    router: RouterName = "least-work",
    most: Annotated[int, typer.Option(help="largest fleet to try")] = 1024,
    seed: int = 0,
    baseline_ms: Baseline = None,
    slo_config: Annotated[Path | None, typer.Option(help="YAML with SLO classes")] = None,
    recorded: Annotated[
        Path | None,
        typer.Option(help="recording of engine iterations: acceptance, and how busy the host was"),
    ] = None,
    out: JsonFile = None,
) -> None:
    """The smallest number of replicas that attains --target on a trace."""
    try:
        slos = SLOConfig.load(slo_config) if slo_config else SLOConfig()
        of = SimulatedFleet.of(
            policy,
            _latency(model, gpu, tp, profile),
            baseline_ms,
            seed,
            recorded,
            kv_tokens or _cache(model, gpu, tp, profile),
        )
        loaded = read_recorded(trace, seed)
        with Progress(console=console) as progress:
            task = progress.add_task("one replica", total=None)
            attainment = of.attainment(loaded, slos, router)

            def attain(n: int) -> float:
                progress.update(task, description=f"{n} replicas")
                return attainment(n)

            answer = min_replicas(attain, target, most)
    except (ValueError, ProfileError, TraceError, SLOError) as error:
        _fail(error)
    for n, got in answer.tried.items():
        print(f"{n:5d} replicas: {100 * got:.2f}% attained")
    found = f"{answer.replicas}" if answer.replicas else f"more than {most}"
    print(f"minimum replicas for {100 * target:g}% attainment: {found}")
    if out:
        out.write_text(json.dumps(asdict(answer), indent=1) + "\n", encoding="utf-8")


@app.command()
def fleet(
    trace: OneTrace,
    replicas: Annotated[int, typer.Option(help="equal replicas behind the router")] = 100,
    policy: str = "priced",
    model: str = "llama-3.1-70b",
    gpu: str = "a100",
    tp: TensorParallel = 4,
    profile: ProfileFile = None,
    router: RouterName = "least-work",
    seed: int = 0,
    baseline_ms: Baseline = None,
    out: JsonFile = None,
) -> None:
    """Serve a trace with a fleet: a million requests on a hundred replicas take minutes on one core."""
    began = time.process_time()
    try:
        of = SimulatedFleet.of(policy, _latency(model, gpu, tp, profile), baseline_ms, seed)
        setting = FleetConfig(replicas, router, seed)
        with console.status("drawing the trace, learning the pace of one replica"):
            loaded = read_workload(trace, seed)
            pace = of.pace()
            requests = fleet_requests(loaded, SLOConfig(), of.baseline_s, pace.spread, seed)
        ready = time.process_time()
        with Progress(console=console) as progress:
            task = progress.add_task("requests", total=len(loaded))
            run_fleet(requests, of.latency, pace, setting, lambda done: progress.update(task, completed=done))
    except (ValueError, ProfileError, TraceError, SLOError) as error:
        _fail(error)
    met = requests.attained()
    result = {
        "requests": len(loaded),
        "replicas": replicas,
        "requests_per_s": loaded.rps,
        "policy": policy,
        "router": router,
        "seed": seed,
        "attainment": float(met.mean()),
        "attainment_by_class": {
            name: float(met[requests.kind == i].mean()) for i, name in enumerate(requests.class_names)
        },
        "mean_ttft_ms": float(1e3 * np.nanmean(requests.first - requests.arrival)),
        "p99_ttft_ms": float(1e3 * np.nanpercentile(requests.first - requests.arrival, 99)),
        "cpu_s": {"prepare": ready - began, "serve": time.process_time() - ready},
    }
    print(json.dumps(result, indent=1))
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


@app.command()
def forecast(
    trace: OneTrace,
    policy: str = "priced",
    model: str = "llama-3.1-70b",
    gpu: str = "a100",
    tp: TensorParallel = 4,
    profile: ProfileFile = None,
    seed: int = 0,
    eos_share: Annotated[float, typer.Option(help="share of requests that stop before their cap")] = 0.0,
    skip: Annotated[int, typer.Option(min=0, help="requests at the beginning that are not judged")] = 50,
    max_requests: Annotated[int, typer.Option(min=1, help="of the trace")] = 500,
) -> None:
    """How well the TPOT of requests is predicted when they arrive, and how well it could be.

    `load` goes by the load at the arrival alone, `server` is what a server says, and `foreseen` knows every
    iteration to come, but not the text of the request.
    """
    try:
        loaded = read_workload(trace, seed)
        loaded = replace(loaded, rows=loaded.rows[:max_requests])
        latency = _latency(model, gpu, tp, profile)
        with console.status("simulating"):
            print(forecast_text(loaded, latency, policy, TextModel(eos_share=eos_share), skip, seed))
    except (ValueError, ProfileError, TraceError, SLOError) as error:
        _fail(error)


@app.command()
def fit(profile: Annotated[Path, typer.Argument(help="latency profile of `adaserve profile`")]) -> None:
    """Fit a line (TurboSpec), a roofline and a table to a latency profile; print their errors."""
    try:
        show_fit(profile)
    except ProfileError as error:
        _fail(error)


@app.command()
def context(
    *,
    model: Annotated[str, typer.Option(help="target")] = "llama-3.1-8b",
    gpu: Annotated[str, typer.Option(help="a100, h100, ...")] = "a100",
    tp: TensorParallel = 8,
    requests: Annotated[
        Any, typer.Option(parser=counts, metavar="A,B", help="that decode together")
    ] = "1,16,32,64,128,256",
    contexts: Annotated[
        Any, typer.Option(parser=counts, metavar="A,B", help="cached tokens of each")
    ] = "2000,8000,16000,32000",
    window: Annotated[int, typer.Option(min=16, help="recent tokens that sparse drafts read")] = 512,
    acceptance: Annotated[float, typer.Option(min=0.0, max=1.0, help="of a token of the draft model")] = 0.7,
    own_acceptance: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="of a token where the target drafts for itself")
    ] = 0.85,
    out: Annotated[Path | None, typer.Option(help="folder for JSON, Markdown and a figure")] = None,
) -> None:
    """Speculation at long contexts by data-sheet costs, for any model and GPU that the simulator knows."""
    try:
        found = simulate_context(model, gpu, tp, requests, contexts, window, acceptance, own_acceptance)
    except ValueError as error:
        _fail(error)
    print(found.text)
    if out:
        out.mkdir(parents=True, exist_ok=True)
        record = {
            "command": command_line(),
            "cells": [cell.record() for cell in found.cells],
            "inflection_tokens": found.inflections,
        }
        (out / "context.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        (out / "context.md").write_text(found.text + "\n", encoding="utf-8")
        save(found.figure(), out / "context.png")
