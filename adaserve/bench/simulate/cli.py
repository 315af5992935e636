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

from adaserve.bench.display import progress
from adaserve.bench.options import counts, floats, listed, seed_list
from adaserve.bench.simulate.options import (
    TRACE,
    Baseline,
    CacheTokens,
    EosShare,
    GpuName,
    JsonFile,
    ModelName,
    OneTrace,
    PolicyName,
    ProfileFile,
    Replicas,
    RouterName,
    Seed,
    SloConfig,
    TensorParallel,
    output_option,
    prefill_option,
    traffic_option,
)
from adaserve.commands import fail, new_folder

app = typer.Typer(help="Simulate policies, loads and fleets without a GPU.", no_args_is_help=True)
console = Console(stderr=True)


@contextmanager
def _refusing() -> Iterator[None]:
    """Ends the command with one sentence if its options make no sense."""
    try:
        yield
    except ValueError as error:
        fail(str(error))


@app.command()
def run(
    *,
    trace: Annotated[list[str], typer.Option(metavar="TRACE", help=f"{TRACE} May be repeated.")],
    policy: Annotated[
        list[str],
        typer.Option(
            metavar="NAME",
            help="Scheduling policy, as in `adaserve serve`. Also fcfs, stta and sep-pipe (plain decoding in "
            "that order), and clairvoyant and true-probabilities (which know what no server knows). With "
            "settings: LABEL=NAME:KEY=VALUE,... May be repeated.",
        ),
    ] = ["priced"],  # noqa: B006 - typer copies it
    loads: Annotated[
        Any, traffic_option("Request rates, as multiples of the trace's own.", parser=floats)
    ] = "1",
    seeds: Annotated[Any, listed(seed_list, "Seeds; x3 means 0,1,2.")] = "0",
    model: ModelName = "llama-3.1-70b",
    gpu: GpuName = "a100",
    tp: TensorParallel = 4,
    profile: ProfileFile = None,
    kv_tokens: CacheTokens = None,
    baseline_ms: Baseline = None,
    slo_config: SloConfig = None,
    prefill: Annotated[
        Literal["fixed", "mixed", "slack", "exclusive"],
        prefill_option(
            "fixed: chunks of one size share forwards with decoding, as in the artifact of the paper's "
            "authors; mixed, slack or exclusive: as with --adaserve-prefill of a server.",
            metavar="NAME",
        ),
    ] = "fixed",
    chunk: Annotated[
        int | None,
        prefill_option("Largest chunk, in tokens.", min=1, show_default="512, or 4096 where they run alone"),
    ] = None,
    order: Annotated[
        Literal["fcfs", "slack", "short", "deadline"] | None,
        prefill_option(
            "Order in which prompts are prefilled: fcfs, slack, short or deadline.",
            metavar="NAME",
            show_default="deadline with mixed and slack, or fcfs",
        ),
    ] = None,
    gate: Annotated[
        float | None,
        prefill_option(
            "Start a prompt only while the tightest running SLO keeps this headroom; 0 = always.",
            min=0,
            show_default="1.1 with mixed and slack, or 0",
        ),
    ] = None,
    shed: Annotated[
        bool,
        prefill_option("Answer 429 to requests whose TTFT SLO has passed while they waited.", "--shed"),
    ] = False,
    lag: Annotated[
        bool,
        typer.Option("--lag", help="Outcomes arrive one plan late, as under SGLang's overlap schedule."),
    ] = False,
    replicas: Replicas = 1,
    router: RouterName = "least-work",
    miscalibration: Annotated[
        float | None,
        traffic_option(
            "Share by which the logits of the draft's likeliest tokens are too large.",
            min=0,
            max=1,
            show_default="0.15; a recording's own with --recorded",
        ),
    ] = None,
    eos_share: EosShare = 0.0,
    recorded: Annotated[
        Path | None,
        traffic_option(
            "Take candidate trees, but no times, from this recording (`adaserve serve --record`).",
            metavar="FILE",
        ),
    ] = None,
    out: Annotated[
        Path | None, output_option("Results folder.", metavar="FOLDER", callback=new_folder)
    ] = None,
    records: Annotated[bool, output_option("Also write one line per request to --out.")] = True,
) -> None:
    """Simulate every trace x load x policy x seed; print a table, write records and plots to --out.

    Try: adaserve simulate run --trace synthetic:200:4 --policy priced --policy none
    """
    from adaserve.bench.simulate.cases import check_same_settings
    from adaserve.bench.simulate.grid import Grid, run_and_report

    grid = Grid(
        trace, policy, model, gpu, tp, profile, kv_tokens, loads, seeds, baseline_ms, slo_config, prefill,
        chunk, order, gate, shed, lag, replicas, router, miscalibration, eos_share, recorded,
    )  # fmt: skip
    with _refusing():
        cases, setting = grid.prepared()
        check_same_settings(cases, setting, out)
        if out:
            grid.write(out)
    run_and_report(cases, setting, out, records, console)


@app.command()
def capacity(
    *,
    trace: Annotated[
        list[str],
        typer.Option(
            metavar="TRACE",
            help=f"{TRACE} May be repeated, for files of several servers with --record-requests.",
        ),
    ],
    target: Annotated[float, typer.Option(min=0.001, max=1.0, help="Attainment to reach, 0 to 1.")] = 0.95,
    policy: PolicyName = "priced",
    model: ModelName = "llama-3.1-70b",
    gpu: GpuName = "a100",
    tp: TensorParallel = 4,
    profile: ProfileFile = None,
    kv_tokens: CacheTokens = None,
    router: RouterName = "least-work",
    most: Annotated[int, typer.Option(min=1, help="Most replicas to try.")] = 1024,
    seed: Seed = 0,
    baseline_ms: Baseline = None,
    slo_config: SloConfig = None,
    recorded: Annotated[
        Path | None,
        traffic_option(
            "Take acceptance and the load of the host from this recording (`adaserve serve --record`).",
            metavar="FILE",
        ),
    ] = None,
    out: JsonFile = None,
) -> None:
    """Find the smallest number of replicas that attains --target on a trace."""
    from adaserve.bench.simulate.fleet import SimulatedFleet
    from adaserve.bench.simulate.hardware import Hardware
    from adaserve.bench.simulate.traces import read_recorded
    from adaserve.host.files import write_json
    from adaserve.scheduler.simulator.capacity import min_replicas
    from adaserve.slo.classes import SLOConfig
    from adaserve.slo.run_summary import percent, summarize

    with _refusing():
        slos = SLOConfig.load(slo_config) if slo_config else SLOConfig()
        hardware = Hardware(model, gpu, tp, profile)
        cache = kv_tokens or hardware.kv_tokens()
        recordings = () if recorded is None else (recorded,)
        of = SimulatedFleet.of(
            policy, hardware.latency(), baseline_ms, seed, recordings, cache, router, hardware.on_cpu()
        )
        loaded = read_recorded(trace, seed)
        most = min(most, len(loaded))  # with one for each request, all of them run alone
        with console.status(_replicas(1)) as status:
            served, summaries = of.records(loaded, slos), {}

            def attain(n: int) -> float:
                status.update(_replicas(n))
                summaries[n] = summarize(served(n))
                return float(summaries[n]["slo_attainment"])

            answer = min_replicas(attain, target, most)
    if out:
        write_json(out, asdict(answer))
    if recorded:
        said = "--profile says" if profile else f"{model} on {tp} {gpu} would take"
        print(f"iterations take {of.slowdown:.2f} times what {said}: as the recorded ones did")
    for n, got in answer.tried.items():
        print(f"{_replicas(n):>14}: {percent(got, 2)}% attained{_first_tokens(summaries[n])}")
    none = "no number is enough" if most == len(loaded) else f"more than {most}"
    print(f"minimum replicas for {100 * target:g}% attainment: {answer.replicas or none}")


def _first_tokens(summary: dict[str, Any]) -> str:
    """Mean and p99 TTFT, which attainment does not tell if nobody states a TTFT SLO; empty without
    answers."""
    if summary["mean_ttft_ms"] is None:
        return ""
    mean_s, late_s = (summary[f"{key}_ttft_ms"] / 1e3 for key in ("mean", "p99"))
    return f", TTFT {mean_s:.2f} s (p99 {late_s:.2f} s)"


def _replicas(n: int) -> str:
    return "1 replica" if n == 1 else f"{n} replicas"


@app.command()
def fleet(
    *,
    trace: OneTrace,
    replicas: Replicas = 100,
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
    """Simulate a fleet that serves a trace. A million requests take a quarter of an hour on one core."""
    from adaserve.bench.simulate.fleet import SimulatedFleet
    from adaserve.bench.simulate.hardware import Hardware
    from adaserve.bench.simulate.traces import read_workload
    from adaserve.host.files import write_json

    with _refusing():
        hardware = Hardware(model, gpu, tp, profile)
        cache = hardware.kv_tokens()
        of = SimulatedFleet.of(
            policy, hardware.latency(), baseline_ms, seed, (), cache, router, hardware.on_cpu()
        )
        with console.status("drawing the trace"):
            loaded = read_workload(trace, seed)
    with progress(console) as bar:
        task = bar.add_task("requests", total=len(loaded))
        served = of.serve(loaded, replicas, lambda done: bar.update(task, completed=done))
    if out:
        write_json(out, served)
    print(json.dumps(served, indent=1))


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
    skip: Annotated[int, typer.Option(min=0, help="First requests, which are not judged.")] = 50,
    max_requests: Annotated[int, typer.Option(min=1, help="Most requests of the trace to serve.")] = 500,
) -> None:
    """Show how well the TPOT of requests is predicted when they arrive, and how well it could be.

    In the table, load predicts only from the load at the arrival, server is the predictor that a server uses,
    and foreseen knows every later iteration, but not the text of the request. It predicts nothing for
    requests that ran alone.
    """
    from adaserve.bench.simulate.forecast import forecast_text
    from adaserve.bench.simulate.hardware import Hardware
    from adaserve.bench.simulate.traces import read_workload
    from adaserve.scheduler.simulator.workload import TextModel

    with _refusing():
        loaded = read_workload(trace, seed)
        loaded = replace(loaded, rows=loaded.rows[:max_requests])
        hardware = Hardware(model, gpu, tp, profile)
        with console.status("simulating"):
            print(forecast_text(loaded, hardware, policy, TextModel(eos_share=eos_share), skip, seed))


@app.command()
def fit(
    profile: Annotated[Path, typer.Argument(help="Latency profile written by `adaserve profile`.")],
) -> None:
    """Fit a line (TurboSpec), a roofline and a table to a latency profile; print their errors."""
    from adaserve.bench.fit import show_fit

    show_fit(profile)


@app.command()
def context(
    *,
    model: ModelName = "llama-3.1-8b",
    gpu: GpuName = "a100",
    tp: TensorParallel = 8,
    requests: Annotated[Any, listed(counts, "Requests that decode together.")] = "1,16,32,64,128,256",
    contexts: Annotated[Any, listed(counts, "Cached tokens of each.")] = "2000,8000,16000,32000",
    window: Annotated[int, typer.Option(min=16, help="Recent tokens that sparse drafts read.")] = 512,
    acceptance: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Acceptance rate of a draft model's token.")
    ] = 0.7,
    own_acceptance: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Acceptance rate of a token where the target drafts for itself."),
    ] = 0.85,
    out: Annotated[
        Path | None, typer.Option(help="Folder for JSON, Markdown and a figure.", callback=new_folder)
    ] = None,
) -> None:
    """Simulate speculation at long contexts by data-sheet costs, for any known model and GPU."""
    from adaserve.bench.context.report import write
    from adaserve.bench.context.simulated import simulate_context
    from adaserve.loadgen.results import command_line

    with _refusing():
        found = simulate_context(model, gpu, tp, requests, contexts, window, acceptance, own_acceptance)
    if out:
        more = {"command": command_line(), "inflection_tokens": found.inflections}
        write(out, "context", found.title, found.text, found.cells, more)
    print(found.text)
