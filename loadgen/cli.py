"""The commands ``adaserve bench serve`` and ``adaserve report``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.markup import escape

from adaserve.commands import DOES_NOT_COUNT, NO, panel
from adaserve.loadgen.errors import LoadgenError
from adaserve.terminal import say

if TYPE_CHECKING:
    from adaserve.loadgen.config import BenchConfig
    from adaserve.loadgen.run_folder import Run

_server, _load, _requests, _output = map(panel, ("Server", "Load", "Requests", "Output"))
Text: TypeAlias = str | None
Number: TypeAlias = float | None
Count: TypeAlias = int | None


def bench_serve(
    *,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="YAML file; options override it.")
    ] = None,
    url: Annotated[
        Text, _server("Address of the server.", envvar="ADASERVE_URL", show_default="http://127.0.0.1:30000")
    ] = None,
    model: Annotated[Text, _server("Name of the model.", show_default="the first one served")] = None,
    api: Annotated[
        Text, _server("API: completions, chat or generate (SGLang's own).", show_default="completions")
    ] = None,
    api_key: Annotated[
        Text, _server("API key of the server.", envvar=["ADASERVE_API_KEY", "OPENAI_API_KEY"])
    ] = None,
    slo_headers: Annotated[
        Text, _server("SLO headers to send: both, ms, class or none.", show_default="both")
    ] = None,
    rps: Annotated[Number, _load("Requests per second.", "--rps", "--request-rate", show_default="1")] = None,
    burstiness: Annotated[
        Number, _load("As in vLLM: 1 = Poisson, less = bursts, more = even gaps.", show_default="1")
    ] = None,
    duration: Annotated[Number, _load("Seconds during which requests arrive.", show_default="60")] = None,
    trace: Annotated[
        Text, _load("Trace to replay for --duration: JSONL, Azure, BurstGPT, Mooncake or AdaServe file.")
    ] = None,
    start: Annotated[Number, _load("Skip this many seconds of the trace.")] = None,
    target_rps: Annotated[
        Number,
        _load("Stretch the trace so that all of it has this mean rate; --duration plays a part of it."),
    ] = None,
    time_scale: Annotated[Number, _load("Multiply the trace's times; 2 halves the load.")] = None,
    max_requests: Annotated[Count, _load("Send at most this many requests.")] = None,
    num_prompts: Annotated[
        Count, _load("Send this many requests, however long it takes; not with --duration.")
    ] = None,
    seed: Annotated[Count, _load("Seed; the same seed gives the same schedule.", show_default="0")] = None,
    processes: Annotated[int, _load("Number of sending processes.")] = 1,
    mix: Annotated[
        Text,
        _requests(
            "Shares of the classes, such as coding=0.7,chat=0.3.",
            show_default="60% coding, 20% chat, 20% summarization",
        ),
    ] = None,
    slo: Annotated[
        list[str] | None,
        _requests(
            "TPOT SLO: coding=1.2x (baselines), chat=50 (ms); with TTFT: chat=50,ttft:2000. Repeatable."
        ),
    ] = None,
    baseline_ms: Annotated[
        Number, _requests("Milliseconds per token of the idle server.", show_default="what the server says")
    ] = None,
    prompts: Annotated[
        Text,
        _requests(
            "Prompts: a JSONL(.gz) file of {category, text}.",
            show_default="those that ship with AdaServe",
        ),
    ] = None,
    output_tokens: Annotated[
        Count, _requests("Tokens to generate, for every class; not with a trace.")
    ] = None,
    temperature: Annotated[Number, _requests("Sampling temperature, for every class.")] = None,
    ignore_eos: Annotated[
        bool | None, _requests("Generate the full length (SGLang and vLLM accept this).")
    ] = None,
    warmup: Annotated[
        Number, _output("First seconds of the run, which are not judged.", show_default="0")
    ] = None,
    out: Annotated[Path | None, _output("Results folder.", show_default="results/<UTC>-TAG")] = None,
    tag: Annotated[str, _output("Name of the run.")] = "bench",
    plan_only: Annotated[bool, _output("Show what would be sent, send nothing.", "--plan-only")] = False,
    fail_under_attainment: Annotated[
        Number, _output("Exit with 3 if attainment is below this share (0 to 1).")
    ] = None,
) -> None:
    """Send requests with different SLOs and report which of them got the speed they asked for.

    The load is open-loop: requests leave at their planned times, however slow the server is. Without
    options: one minute of coding, chat and summarization requests, one per second, against a server
    on port 30000. Works with any OpenAI-compatible server.

    Try: adaserve bench serve --rps 2 --duration 60 --mix coding=0.7,chat=0.3 --slo chat=50

    Exit code 2: bad input. 3: attainment is below the limit. 4: the run is not valid."""
    from adaserve.loadgen import options
    from adaserve.loadgen.bench import run_bench
    from adaserve.loadgen.config import BenchConfig, load_config
    from adaserve.loadgen.report import write_report
    from adaserve.loadgen.results import new_results_dir
    from adaserve.loadgen.run_folder import read_run

    console = Console(stderr=True)
    _check_share(fail_under_attainment)
    if processes < 1:
        raise LoadgenError(f"--processes must be 1 or more, not {processes}")
    settings = load_config(config) if config is not None else BenchConfig()
    settings = options.with_server(
        settings,
        {"url": url, "model": model, "api": api, "slo_headers": slo_headers, "ignore_eos": ignore_eos},
        api_key,
    )
    settings = options.with_load(
        settings,
        trace,
        {"start_s": start, "target_rps": target_rps, "time_scale": time_scale},
        options.arrivals(rps, burstiness),
    )
    settings = options.with_classes(settings, mix, slo or [])
    settings = options.with_tokens(settings, output_tokens, temperature)
    limits = {"duration_s": duration, "warmup_s": warmup, "max_requests": max_requests}
    settings = options.with_count(settings, limits | {"num_prompts": num_prompts})
    common = {"seed": seed, "baseline_ms": baseline_ms, "prompts": prompts}
    settings = settings.changed(**options.given(common))
    if plan_only:
        return _show_plan(settings)
    folder = out if out is not None else new_results_dir(Path("results"), tag)
    summary = run_bench(settings, folder, processes, console)
    try:
        write_report([read_run(folder)], folder)
    finally:  # printed last: the reader of a pipe may be gone, which ends the command
        _print_outcome(summary, folder, console)
    if not summary["valid"]:
        raise typer.Exit(DOES_NOT_COUNT)
    check_attainment(summary, fail_under_attainment)


def report(
    runs: Annotated[
        list[str], typer.Argument(help="Results folders of load tests; NAME=FOLDER gives one a name.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for report.html and PNGs.", show_default="the first results folder"),
    ] = None,
    png: Annotated[bool, typer.Option(help="Write PNG files beside the page.")] = True,
    fail_under_attainment: Annotated[
        Number,
        typer.Option(help="Exit with 3 if attainment is below this share (0 to 1), 4 if a run is not valid."),
    ] = None,
) -> None:
    """Turn results folders into one page with attainment, goodput, latency curves and a comparison.

    Folders with the same name apart from time stamp and seed are seeds of one setting: their mean is
    shown with error bars. The page is one file without outside links."""
    from adaserve.loadgen.report import write_report
    from adaserve.loadgen.run_folder import require_one_setting

    _check_share(fail_under_attainment)
    # A run that two patterns of a shell have found is not two seeds.
    read = list({(run.label, run.folder.resolve()): run for run in map(_read, runs)}.values())
    require_one_setting(read)
    folder = out or read[0].folder
    path = write_report(read, folder, png)
    say(Console(stderr=True), f"report: {path}")
    if fail_under_attainment is None:
        return
    for run in read:
        if not run.summary["valid"]:
            print(f"{run.folder} is not valid: {'; '.join(run.summary['invalid_reasons'])}", file=sys.stderr)
            raise typer.Exit(DOES_NOT_COUNT)
        check_attainment(run.summary, fail_under_attainment)


def _read(text: str) -> Run:
    from adaserve.loadgen.run_folder import read_run

    label, separator, folder = text.partition("=")
    named = separator and not Path(text).is_dir()
    return read_run(Path(folder), label) if named else read_run(Path(text))


def _check_share(limit: float | None) -> None:
    # A limit above 1 is allowed although it can never be reached, so that one can see a pipeline fail.
    if limit is not None and not 0 <= limit < 2:
        raise LoadgenError(f"--fail-under-attainment must be a share from 0 to 1, not {limit:g}")


def check_attainment(summary: Mapping[str, Any], limit: float | None) -> None:
    """Ends the command with exit code 3 when attainment is below ``limit``."""
    attainment = summary["slo_attainment"] or 0.0
    if limit is not None and attainment < limit:
        print(f"attainment {attainment:g} is below {limit:g}", file=sys.stderr)
        raise typer.Exit(NO)


def _show_plan(config: BenchConfig) -> None:
    from adaserve.loadgen.schedule import class_counts, schedule_before_baseline

    schedule = schedule_before_baseline(config)
    counts = ", ".join(f"{n} {c}" for n, c in class_counts(schedule.requests).items())
    typer.echo(f"{len(schedule)} requests in {schedule.duration_s:.1f} s: {counts}")
    typer.echo(f"prompts: {schedule.prompts_source}; trace sha256 {schedule.trace_sha256[:16]}")


def _print_outcome(summary: Mapping[str, Any], folder: Path, console: Console) -> None:
    from adaserve.loadgen.bench import class_table

    Console().print(class_table(summary), "")
    for reason in summary["invalid_reasons"]:
        console.print(f"[yellow]this run is not valid: {escape(reason)}[/yellow]")
    if guessed := summary["tokens_guessed"]:
        console.print(f"[yellow]{guessed} answers had no usage: each chunk counts as one token[/yellow]")
    for error, count in list(summary["errors"].items())[:3]:
        console.print(f"[red]{count} x {escape(error)}[/red]")
    said = f"results: {folder}, page: {folder / 'report.html'}"
    say(console, said)
