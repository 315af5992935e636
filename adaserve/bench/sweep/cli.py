"""The command ``adaserve bench sweep``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from adaserve.bench.options import floats, words
from adaserve.bench.options import seeds as seed_list
from adaserve.loadgen.cli import panel

Text = str | None


_what, _traffic, _server, _run = map(panel, ("What is measured", "Traffic", "Server", "Run"))


def bench_sweep(
    *,
    axes: Annotated[Any, _what("Of load, scale, share, peaks.", parser=words, show_default="all")] = None,
    policies: Annotated[
        Any, _what("Policies on the load axis.", parser=words, show_default="all eleven")
    ] = None,
    side_policies: Annotated[
        Any,
        _what("Policies on the other axes.", parser=words, show_default="five, or those of --policies"),
    ] = None,
    loads: Annotated[
        Any,
        _what("Request rates over this host's capacity.", parser=floats, show_default="0.3,0.45,0.6,0.75"),
    ] = None,
    at: Annotated[float | None, _what("Load of the other axes.", show_default="0.6")] = None,
    shares: Annotated[
        Any, _what("Shares of urgent requests.", parser=floats, show_default="0.3,0.6,0.9")
    ] = None,
    scales: Annotated[
        Any,
        _what(
            "SLOs of the urgent class over the baseline.",
            parser=floats,
            show_default="1.6,1.4,1.2,1,0.8,0.6",
        ),
    ] = None,
    seeds: Annotated[
        Any, _what("Comma-separated, or a number of seeds as x3.", parser=seed_list, show_default="0")
    ] = None,
    seconds: Annotated[float | None, _what("Arrivals per case.", show_default="30")] = None,
    quick: Annotated[bool, _what("Four policies, two loads and peaks: about eight minutes.")] = False,
    check_plain: Annotated[
        bool | None,
        _what("Compare `none` with SGLang without speculation.", show_default="yes"),
    ] = None,
    trace: Annotated[
        Text, _traffic("Arrivals, lengths and classes from this file, at this host's rate.")
    ] = None,
    slo_config: Annotated[Text, _traffic("YAML with other classes and SLOs.")] = None,
    prompt_scale: Annotated[
        float | None, _traffic("Prompt lengths over those of paper or trace.", show_default="0.11")
    ] = None,
    output_scale: Annotated[
        float | None, _traffic("Output lengths over those of paper or trace.", show_default="0.5")
    ] = None,
    temperature: Annotated[
        float | None, _traffic("For every class; 0 is greedy decoding.", show_default="0.8")
    ] = None,
    model: Annotated[Text, _server("Target.", show_default="the embedded model")] = None,
    draft: Annotated[Text, _server("Draft.", show_default="the embedded model")] = None,
    size: Annotated[
        Text, _server("Parameters that the embedded target is widened to.", show_default="100M")
    ] = None,
    cpu_weights: Annotated[Text, _server("How a CPU host stores weights.", show_default="auto")] = None,
    prefill: Annotated[
        Text,
        _server(
            "slack or exclusive, for every policy.",
            show_default="slack for policies that know SLOs, exclusive as in SGLang for the others",
        ),
    ] = None,
    max_depth: Annotated[
        int | None, _server("Deepest candidate tree.", show_default="5, or that of the longest chain")
    ] = None,
    budget: Annotated[int | None, _server("Tokens per verification.", show_default="measured")] = None,
    baseline_ms: Annotated[float | None, _server("Baseline, ms per token.", show_default="measured")] = None,
    capacity: Annotated[float | None, _server("Requests/s of load 1.", show_default="measured")] = None,
    minutes: Annotated[float | None, _run("Start no case that would end after this time.")] = None,
    out: Annotated[
        Path | None,
        _run("Results; a folder of an earlier call is continued.", show_default="results/<UTC>-sweep"),
    ] = None,
    plot_only: Annotated[Path | None, _run("Only draw the figures and tables of this folder again.")] = None,
    readme: Annotated[
        Path | None, _run("Put this sweep's column into that file (results/README.md).")
    ] = None,
    plan_only: Annotated[bool, _run("Show what would run.")] = False,
) -> None:
    """Policies against request rate, urgent share, SLO scale and fluctuating traffic, as in the paper.

    One server runs every policy on the same requests. At each point the policies run one after another in
    random order, because the speed of a host drifts. Ctrl-C stops; the same --out continues."""
    from adaserve.bench.sweep.commands import Options, redraw, show_plan, sweep
    from adaserve.bench.sweep.plan import SweepError
    from adaserve.loadgen.errors import LoadgenError
    from adaserve.server import ServerError
    from adaserve.slo.classes import SLOError
    from adaserve.slo.trace import TraceError

    console = Console(stderr=True)
    try:
        if plot_only is not None:
            redraw(plot_only, readme, console)
            return
        options = Options(
            given={
                "axes": axes,
                "policies": policies,
                "side_policies": side_policies,
                "loads": loads,
                "at": at,
                "shares": shares,
                "scales": scales,
                "seeds": seeds,
                "seconds": seconds,
                "check_plain": check_plain,
                "trace": trace,
                "slo_config": slo_config,
                "prompt_scale": prompt_scale,
                "output_scale": output_scale,
                "temperature": temperature,
            },
            quick=quick,
            server={"model": model, "draft": draft, "size": size},
            config={
                "cpu_weights": cpu_weights,
                "prefill": prefill,
                "max_depth": max_depth,
                "budget": budget,
            },
            baseline_ms=baseline_ms,
            capacity_rps=capacity,
            minutes=minutes,
            out=out,
            readme=readme,
        )
        if plan_only:
            show_plan(options, console)
            return
        done = sweep(options, console)
    except (SweepError, ServerError, LoadgenError, SLOError, TraceError, ValueError) as error:
        _fail(error, console)
    raise typer.Exit(0 if done else 3)


def _fail(error: Exception, console: Console) -> NoReturn:
    console.print(f"[red]error:[/] {error}", highlight=False, soft_wrap=True)
    raise typer.Exit(2)
