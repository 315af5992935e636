"""The commands ``adaserve simulate ...``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import Progress

from adaserve.bench.options import counts, floats
from adaserve.bench.options import seeds as seed_list
from adaserve.commands import fail, new_file, new_folder

app = typer.Typer(help="Simulate policies, loads and fleets without a GPU.", no_args_is_help=True)
console = Console(stderr=True)

# Options that several commands have.
OneTrace = Annotated[str, typer.Option(help="Trace file, or synthetic:N:RPS[:BURST].")]
PolicyName = Annotated[str, typer.Option(help="A policy of `adaserve serve`.")]
ModelName = Annotated[str, typer.Option(help="Target: llama-3.1-8b, llama-3.1-70b or qwen2.5-32b.")]
GpuName = Annotated[str, typer.Option(help="a100, h100, h200 or l40s.")]
TensorParallel = Annotated[int, typer.Option(min=1, help="Tensor parallel degree.")]
ProfileFile = Annotated[
    Path | None, typer.Option(help="Latency profile of `adaserve profile`, instead of a model and GPUs.")
]
CacheTokens = Annotated[
    int | None, typer.Option(min=1, help="Tokens of KV cache.", show_default="from the hardware")
]
RouterName = Annotated[
    Literal["round-robin", "least-work", "slo"], typer.Option(help="How requests get to replicas.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of every random choice.")]
Baseline = Annotated[
    float | None,
    typer.Option(min=0.001, help="ms per token of an idle replica.", show_default="from the hardware"),
]
SloConfig = Annotated[
    Path | None, typer.Option(help="YAML with SLO classes.", show_default="coding, chat, summarization")
]
EosShare = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Share of requests that stop before their cap.")
]
JsonFile = Annotated[Path | None, typer.Option(help="JSON file for the result.", callback=new_file)]


@contextmanager
def _refusing() -> Iterator[None]:
    """Ends the command with one line where its options cannot be meant."""
    try:
        yield
    except ValueError as error:
        fail(str(error))


@app.command()
def run(
    *,
    trace: Annotated[
        list[str], typer.Option(help="Trace file, or synthetic:N:RPS[:BURST]; may be repeated.")
    ],
    policy: Annotated[
        list[str],
        typer.Option(
            help="A policy of `adaserve serve`; fcfs, stta or sep-pipe: plain decoding in that order; "
            "clairvoyant or true-probabilities: what no server can know. With settings: "
            "label=name:key=value,... May be repeated."
        ),
    ] = ["adaserve"],  # noqa: B006 - typer copies it
    model: ModelName = "llama-3.1-70b",
    gpu: GpuName = "a100",
    tp: TensorParallel = 4,
    profile: ProfileFile = None,
    kv_tokens: CacheTokens = None,
    speedup: Annotated[
        Any, typer.Option(parser=floats, metavar="A,B", help="Loads as multiples of the trace's own rate.")
    ] = "1",
    seeds: Annotated[Any, typer.Option(parser=seed_list, metavar="A,B", help="0,1,2 or x3.")] = "0",
    baseline_ms: Baseline = None,
    slo_config: SloConfig = None,
    prefill: Annotated[
        Literal["mixed", "exclusive"],
        typer.Option(help="mixed: chunks of prompts run in the forwards that decode; exclusive: alone."),
    ] = "mixed",
    chunk: Annotated[int, typer.Option(min=1, help="Most tokens of a chunk.")] = 512,
    order: Annotated[
        Literal["fcfs", "slack", "short", "deadline"],
        typer.Option(help="Order in which prompts are prefilled."),
    ] = "fcfs",
    gate: Annotated[
        float | None, typer.Option(min=0.0, help="Start prefills only above this headroom.")
    ] = None,
    shed: Annotated[
        bool, typer.Option("--shed", help="Answer 429 when the TTFT SLO is already lost.")
    ] = False,
    lag: Annotated[
        bool, typer.Option("--lag", help="As under the overlap schedule: outcomes arrive one plan late.")
    ] = False,
    replicas: Annotated[int, typer.Option(min=1, help="Equal replicas behind the router.")] = 1,
    router: RouterName = "least-work",
    miscalibration: Annotated[
        float, typer.Option(min=0.0, help="How far path probabilities are off, in logits.")
    ] = 0.15,
    eos_share: EosShare = 0.0,
    recorded: Annotated[
        Path | None, typer.Option(help="Recording of engine iterations to draw trees from.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for results.", callback=new_folder)] = None,
    records: Annotated[bool, typer.Option(help="Write one line per request to --out.")] = True,
) -> None:
    """Simulate every trace x load x policy x seed; print a table, write records and plots to --out."""
    from adaserve.bench.simulate.grid import Grid, run_and_report

    grid = Grid(
        trace, policy, model, gpu, tp, profile, kv_tokens, speedup, seeds, baseline_ms, slo_config, prefill,
        chunk, order, gate, shed, lag, replicas, router, miscalibration, eos_share, recorded,
    )  # fmt: skip
    with _refusing():
        cases, setting = grid.prepared()
        if out:
            grid.write(out)
    run_and_report(cases, setting, out, records, console)


@app.command()
def capacity(
    *,
    trace: Annotated[
        list[str],
        typer.Option(
            help="Trace file, or synthetic:N:RPS[:BURST]; may be repeated for what several servers "
            "wrote with --record-requests."
        ),
    ],
    target: Annotated[float, typer.Option(min=0.001, max=1.0, help="Attainment to reach.")] = 0.95,
    policy: PolicyName = "priced",
    model: ModelName = "llama-3.1-70b",
    gpu: GpuName = "a100",
    tp: TensorParallel = 4,
    profile: ProfileFile = None,
    kv_tokens: CacheTokens = None,
    router: RouterName = "least-work",
    most: Annotated[int, typer.Option(min=1, help="Largest fleet to try.")] = 1024,
    seed: Seed = 0,
    baseline_ms: Baseline = None,
    slo_config: SloConfig = None,
    recorded: Annotated[
        Path | None,
        typer.Option(help="Recording of engine iterations: acceptance, and how busy the host was."),
    ] = None,
    out: JsonFile = None,
) -> None:
    """The smallest number of replicas that attains --target on a trace."""
    from adaserve.bench.simulate.fleet import SimulatedFleet
    from adaserve.bench.simulate.hardware import Hardware
    from adaserve.bench.simulate.traces import read_recorded
    from adaserve.scheduler.simulator.capacity import min_replicas
    from adaserve.slo.classes import SLOConfig

    with _refusing():
        slos = SLOConfig.load(slo_config) if slo_config else SLOConfig()
        hardware = Hardware(model, gpu, tp, profile)
        cache = kv_tokens or hardware.kv_tokens()
        of = SimulatedFleet.of(policy, hardware.latency(), baseline_ms, seed, recorded, cache)
        loaded = read_recorded(trace, seed)
        with Progress(console=console) as progress:
            task = progress.add_task("one replica", total=None)
            attainment = of.attainment(loaded, slos, router)

            def attain(n: int) -> float:
                progress.update(task, description=f"{n} replicas")
                return attainment(n)

            answer = min_replicas(attain, target, most)
    for n, got in answer.tried.items():
        print(f"{n:5d} replicas: {100 * got:.2f}% attained")
    found = f"{answer.replicas}" if answer.replicas else f"more than {most}"
    print(f"minimum replicas for {100 * target:g}% attainment: {found}")
    if out:
        out.write_text(json.dumps(asdict(answer), indent=1) + "\n", encoding="utf-8")


@app.command()
def fleet(
    *,
    trace: OneTrace,
    replicas: Annotated[int, typer.Option(min=1, help="Equal replicas behind the router.")] = 100,
    policy: PolicyName = "priced",
    model: ModelName = "llama-3.1-70b",
    gpu: GpuName = "a100",
    tp: TensorParallel = 4,
    profile: ProfileFile = None,
    router: RouterName = "least-work",
    seed: Seed = 0,
    baseline_ms: Baseline = None,
    out: JsonFile = None,
) -> None:
    """Serve a trace with a fleet: a million requests on a hundred replicas take minutes on one core."""
    from adaserve.bench.simulate.fleet import SimulatedFleet
    from adaserve.bench.simulate.hardware import Hardware
    from adaserve.bench.simulate.traces import read_workload

    with _refusing():
        latency = Hardware(model, gpu, tp, profile).latency()
        of = SimulatedFleet.of(policy, latency, baseline_ms, seed)
        with console.status("drawing the trace"):
            loaded = read_workload(trace, seed)
    with Progress(console=console) as progress:
        task = progress.add_task("requests", total=len(loaded))
        served = of.serve(loaded, replicas, router, lambda done: progress.update(task, completed=done))
    print(json.dumps(served, indent=1))
    if out:
        out.write_text(json.dumps(served, indent=1) + "\n", encoding="utf-8")


@app.command()
def forecast(
    *,
    trace: OneTrace,
    policy: PolicyName = "priced",
    model: ModelName = "llama-3.1-70b",
    gpu: GpuName = "a100",
    tp: TensorParallel = 4,
    profile: ProfileFile = None,
    seed: Seed = 0,
    eos_share: EosShare = 0.0,
    skip: Annotated[int, typer.Option(min=0, help="Requests at the beginning that are not judged.")] = 50,
    max_requests: Annotated[int, typer.Option(min=1, help="Requests of the trace that are served.")] = 500,
) -> None:
    """How well the TPOT of requests is predicted when they arrive, and how well it could be.

    `load` goes by the load at the arrival alone, `server` is what a server says, and `foreseen` knows every
    iteration to come, but not the text of the request.
    """
    from adaserve.bench.forecast import forecast_text
    from adaserve.bench.simulate.hardware import Hardware
    from adaserve.bench.simulate.traces import read_workload
    from adaserve.scheduler.simulator.workload import TextModel

    with _refusing():
        loaded = read_workload(trace, seed)
        loaded = replace(loaded, rows=loaded.rows[:max_requests])
        latency = Hardware(model, gpu, tp, profile).latency()
        with console.status("simulating"):
            print(forecast_text(loaded, latency, policy, TextModel(eos_share=eos_share), skip, seed))


@app.command()
def fit(profile: Annotated[Path, typer.Argument(help="Latency profile of `adaserve profile`.")]) -> None:
    """Fit a line (TurboSpec), a roofline and a table to a latency profile; print their errors."""
    from adaserve.bench.fit import show_fit

    show_fit(profile)


@app.command()
def context(
    *,
    model: ModelName = "llama-3.1-8b",
    gpu: GpuName = "a100",
    tp: TensorParallel = 8,
    requests: Annotated[
        Any, typer.Option(parser=counts, metavar="A,B", help="Requests that decode together.")
    ] = "1,16,32,64,128,256",
    contexts: Annotated[
        Any, typer.Option(parser=counts, metavar="A,B", help="Cached tokens of each.")
    ] = "2000,8000,16000,32000",
    window: Annotated[int, typer.Option(min=16, help="Recent tokens that sparse drafts read.")] = 512,
    acceptance: Annotated[float, typer.Option(min=0.0, max=1.0, help="Of a token of the draft model.")] = 0.7,
    own_acceptance: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Of a token where the target drafts for itself.")
    ] = 0.85,
    out: Annotated[
        Path | None, typer.Option(help="Folder for JSON, Markdown and a figure.", callback=new_folder)
    ] = None,
) -> None:
    """Speculation at long contexts by data-sheet costs, for any model and GPU that the simulator knows."""
    from adaserve.bench.context.simulated import simulate_context
    from adaserve.loadgen.figures import save
    from adaserve.loadgen.results import command_line

    with _refusing():
        found = simulate_context(model, gpu, tp, requests, contexts, window, acceptance, own_acceptance)
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
