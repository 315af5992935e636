"""The command ``adaserve bench sweep``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from adaserve.bench.options import counts, floats, seed_list, words
from adaserve.commands import DOES_NOT_COUNT, new_folder, panel

Text = str | None
_what, _traffic, _server, _run = map(panel, ("What is measured", "Traffic", "Server", "Run"))


def bench_sweep(
    *,
    axes: Annotated[
        Any,
        _what(
            "What to vary: load, peaks, share, scale, kinds, traces.",
            parser=words,
            show_default="load, and traces where there are any",
        ),
    ] = None,
    policies: Annotated[
        Any,
        _what(
            "Systems on the load axis: policies, sglang, sglang-priority. NAME+gate has our gate and "
            "prefills, NAME+mixed, NAME+slack and NAME+exclusive those of that --adaserve-prefill; "
            "chain, adaptive-verify and urgency without a length get their best one.",
            parser=words,
            show_default="nine as they are, four with the gate",
        ),
    ] = None,
    side_policies: Annotated[
        Any,
        _what("Systems on the other axes.", parser=words, show_default="seven, or those of --policies"),
    ] = None,
    loads: Annotated[
        Any,
        _what(
            "Request rates, as multiples of this host's capacity.", parser=floats, show_default="0.3,0.6,1"
        ),
    ] = None,
    at: Annotated[float | None, _what("Load of the other axes.", show_default="0.6")] = None,
    shares: Annotated[
        Any, _what("Shares of urgent requests, 0 to 1.", parser=floats, show_default="0.3,0.6,0.9")
    ] = None,
    scales: Annotated[
        Any,
        _what(
            "TPOT SLOs of the urgent class, in baselines.",
            parser=floats,
            show_default="1.6,1.4,1.2,1,0.8,0.6",
        ),
    ] = None,
    kinds: Annotated[
        Any,
        _what("Other kinds of traffic: sessions, repetition, long.", parser=words, show_default="all"),
    ] = None,
    lengths: Annotated[
        Any,
        _what(
            "Lengths among which chain, adaptive-verify and urgency choose.",
            parser=counts,
            show_default="2,4",
        ),
    ] = None,
    seeds: Annotated[Any, _what("Seeds; x3 means 0,1,2.", parser=seed_list, show_default="x3")] = None,
    blocks: Annotated[
        int | None, _what("Blocks per point and seed; peaks have three times as many.", show_default="1")
    ] = None,
    seconds: Annotated[float | None, _what("Seconds of arrivals per block.", show_default="20")] = None,
    quick: Annotated[bool, _what("Two systems, one load, one seed: about four minutes.", "--quick")] = False,
    check_plain: Annotated[
        bool | None,
        _what("Compare `none` with SGLang without speculation.", show_default="yes, where `none` plays"),
    ] = None,
    trace: Annotated[
        Text, _traffic("Arrivals, lengths and classes from this file, at this host's rate.")
    ] = None,
    traces: Annotated[
        Path | None, _traffic("Folder of trace files, each a point of the axis `traces`.")
    ] = None,
    slo_config: Annotated[Text, _traffic("YAML file with SLO classes.")] = None,
    prompt_scale: Annotated[
        float | None, _traffic("Factor on the prompt lengths of the paper or the trace.", show_default="0.11")
    ] = None,
    output_scale: Annotated[
        float | None, _traffic("Factor on the output lengths of the paper or the trace.", show_default="0.5")
    ] = None,
    temperature: Annotated[
        float | None, _traffic("Sampling temperature of every class; 0 is greedy.", min=0, show_default="0.8")
    ] = None,
    max_tokens: Annotated[
        int | None,
        _traffic(
            "max_tokens of every request. Answers end earlier, at a length that no system knows. "
            "0: exactly the length of each answer.",
            min=0,
            show_default="512",
        ),
    ] = None,
    model: Annotated[Text, _server("Target model.", show_default="the embedded model")] = None,
    draft: Annotated[Text, _server("Draft model.", show_default="the embedded model")] = None,
    size: Annotated[
        Text, _server("Parameters that the embedded target is widened to.", show_default="100M")
    ] = None,
    cpu_weights: Annotated[Text, _server("How a CPU host stores weights.", show_default="auto")] = None,
    max_depth: Annotated[
        int | None, _server("Deepest candidate tree.", show_default="5, or that of the longest chain")
    ] = None,
    budget: Annotated[int | None, _server("Most tokens per verification.", show_default="measured")] = None,
    baseline_ms: Annotated[
        float | None,
        _server("Milliseconds per token of the idle server.", min=0.1, show_default="measured"),
    ] = None,
    capacity: Annotated[
        float | None, _server("Requests per second of load 1.", min=0.001, show_default="measured")
    ] = None,
    minutes: Annotated[
        float | None, _run("Minutes to run; no block starts that would end later.", min=0.1)
    ] = None,
    attempts: Annotated[int, _run("Tries per block while other programs disturb it.", min=1)] = 3,
    out: Annotated[
        Path | None,
        _run(
            "Results folder; one of an earlier call is continued.",
            show_default="results/<UTC>-sweep",
            callback=new_folder,
        ),
    ] = None,
    plot_only: Annotated[
        Path | None, _run("Draw figures and tables of this folder again, and run nothing.")
    ] = None,
    simulate: Annotated[
        Path | None,
        _run("Replay this folder's blocks in the simulator, and compare."),
    ] = None,
    readme: Annotated[
        Path | None, _run("Write this sweep's column into this file (results/README.md).")
    ] = None,
    plan_only: Annotated[bool, _run("Show what would run, and run nothing.", "--plan-only")] = False,
) -> None:
    """Compare systems by both SLOs at several loads, mixes, SLOs and traces.

    Systems play the same block of requests in random order before any plays the next one, because the speed
    of a host drifts. After Ctrl-C the same --out continues. Exit code 4: blocks are left."""
    from adaserve.bench.sweep.commands import Options, redraw, replay, show_plan, sweep, trace_files

    console = Console(stderr=True)
    if plot_only is not None:
        redraw(plot_only, readme, console)
        return
    if simulate is not None:
        replay(simulate, console)
        return
    options = Options(
        given=dict(
            axes=axes, policies=policies, side_policies=side_policies, loads=loads, at=at, shares=shares,
            scales=scales, kinds=kinds, traces=None if traces is None else trace_files(traces),
            lengths=lengths, seeds=seeds, blocks=blocks, seconds=seconds, check_plain=check_plain,
            trace=trace, slo_config=slo_config, prompt_scale=prompt_scale, output_scale=output_scale,
            temperature=temperature, max_tokens=max_tokens,
        ),
        quick=quick,
        server=dict(model=model, draft=draft, size=size),
        config=dict(cpu_weights=cpu_weights, max_depth=max_depth, budget=budget),
        baseline_ms=baseline_ms, capacity_rps=capacity, minutes=minutes, attempts=attempts, out=out,
        readme=readme,
    )  # fmt: skip
    if plan_only:
        show_plan(options)
        return
    raise typer.Exit(0 if sweep(options, console) else DOES_NOT_COUNT)
