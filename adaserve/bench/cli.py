"""The commands ``adaserve bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from adaserve.bench.fleet.cli import bench_fleet
from adaserve.bench.learn.cli import bench_learn
from adaserve.bench.options import counts, floats, known, listed, results_file, words
from adaserve.bench.soak.cli import bench_soak
from adaserve.bench.sweep.cli import bench_sweep
from adaserve.commands import given, new_folder
from adaserve.host.cores import usable_cores
from adaserve.loadgen import cli as loadgen
from adaserve.options import Budget, Draft, Model, Size, Weights, server_spec

app = typer.Typer(help="Measure: load tests, latency, and comparisons of systems.", no_args_is_help=True)
console = Console(stderr=True)


@app.command("latency")
def bench_latency(
    *,
    model: Model = None,
    draft: Draft = None,
    draft_kinds: Annotated[
        Any,
        listed(
            words,
            "Kinds of draft, as in `adaserve serve`, or self: the target drafts for itself. Each has a "
            "server of its own. model:fp32 also says how the draft's weights are stored.",
            "--draft-kind",
        ),
    ] = "auto",
    size: Size = "100M",
    policies: Annotated[
        Any, listed(words, "Policies; none is always measured too. priced@256 sets the --draft-window.")
    ] = "priced",
    batches: Annotated[Any, listed(counts, "Numbers of concurrent requests.")] = "1,4,8,16,32",
    contexts: Annotated[
        Any,
        listed(
            counts,
            "Tokens per request, answer included, from long held-out texts (embedded pair only).",
            show_default="short prompts",
        ),
    ] = None,
    temperatures: Annotated[Any, listed(floats, "Sampling temperatures.")] = "0,0.7",
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions, taking turns.")] = 5,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens generated per request.")] = 64,
    repetition: Annotated[
        Any, listed(words, "Use text that repeats itself: edits, turns, templates, json.")
    ] = "",
    cpu_weights: Weights = "auto",
    budget: Budget = None,
    out: Annotated[Path, results_file("latency")],
) -> None:
    """Compare TPOT with plain decoding at several batch sizes, in turn, on one server per kind of draft."""
    from adaserve.bench.latency import BASE, MARGIN, SELF, SELF_WINDOW, LatencyPlan, run_latency
    from adaserve.bench.repetition import KINDS
    from adaserve.config import AdaServeConfig
    from adaserve.pair.vocabulary import MAX_CONTEXT_TOKENS

    others = tuple(p for p in policies if p != BASE)
    for name, _, window in (p.partition("@") for p in others):
        AdaServeConfig(policy=name, draft_window=window or 0)  # refused now, not when its turn comes
    known("--repetition", repetition, KINDS)
    if not draft_kinds:
        raise typer.BadParameter("--draft-kind needs at least one kind of draft")
    if min(temperatures) < 0:
        raise typer.BadParameter(f"--temperatures must be 0 or more, not {min(temperatures):g}")
    plan = LatencyPlan(
        others, batches, temperatures, rounds, tokens, repetition=repetition, contexts=contexts or (0,)
    )
    if contexts and (model is not None or repetition):
        raise typer.BadParameter(
            "--contexts uses the embedded pair's held-out text: leave out --model-path and --repetition"
        )
    least = tokens + MARGIN + 1
    if contexts and not least <= min(contexts) <= max(contexts) <= MAX_CONTEXT_TOKENS:
        raise typer.BadParameter(f"--contexts must be {least} to {MAX_CONTEXT_TOKENS}, answers included")
    # The same start for all: paced prefills let the first requests of a batch decode beside prompts.
    common: dict[str, Any] = {"cpu_weights": cpu_weights, "budget": budget, "prefill": "exclusive"}

    def spec(draft_kind: str) -> Any:
        kind, _, weights = draft_kind.partition(":")
        chosen: dict[str, Any] = {"draft_kind": kind}
        if kind == SELF:
            chosen = {"drafts": SELF, "draft_window": SELF_WINDOW}
        return server_spec(
            model, draft, size, plan.flags, **chosen, draft_weights=weights or "auto", **common
        )

    run_latency({kind: spec(kind) for kind in draft_kinds}, plan, out, console)


@app.command("heads")
def bench_heads(
    *,
    batches: Annotated[Any, listed(counts, "Numbers of concurrent requests.")] = "1,4,8",
    temperature: Annotated[
        float, typer.Option(min=0, help="Temperature of the text that the target writes.")
    ] = 0.8,
    depth: Annotated[int, typer.Option(min=1, max=8, help="Depth of the trees.")] = 4,
    width: Annotated[int, typer.Option(min=1, max=16, help="Width of the trees.")] = 3,
    trees: Annotated[int, typer.Option(min=2, help="Trees of each draft per batch size.")] = 200,
    rows: Annotated[int, typer.Option(min=2, help="Prompts per category.")] = 24,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens that the target writes per prompt.")] = 96,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the text.")] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of a forward.", show_default="all")
    ] = None,
    draft_weights: Annotated[
        Any, listed(words, "How weights of draft and EAGLE-3 head are stored, as in `adaserve serve`.")
    ] = "auto",
    out: Annotated[Path, results_file("heads")],
) -> None:
    """Compare accepted tokens and drafting time of the embedded draft and the embedded heads."""
    from adaserve.bench.heads import run_heads
    from adaserve.bench.offline_drafting import HeadPlan
    from adaserve.engine.cpu.linear import STORAGES

    known("--draft-weights", draft_weights, STORAGES)
    plan = HeadPlan(
        batches, temperature, depth, width, tokens, rows, trees, seed, threads or usable_cores(),
        draft_weights=draft_weights,
    )  # fmt: skip
    run_heads(plan, out, console)


@app.command("kernels")
def bench_kernels(
    *,
    tokens: Annotated[
        Any, listed(counts, "Tokens per forward.", show_default="21 sizes from 1 to 64")
    ] = "1,2,3,4,5,6,7,8,10,12,13,14,16,20,24,25,32,40,48,56,64",
    storages: Annotated[
        Any, listed(words, "Storage of weights: auto, fp32, fp16, bf16 or int8.")
    ] = "fp32,fp16",
    queries: Annotated[Any, listed(counts, "Tokens per request in attention.")] = "1,5,16,64",
    contexts: Annotated[Any, listed(counts, "Cached tokens of the request.")] = "256,2048,8192,32768",
    rounds: Annotated[int, typer.Option(min=1, help="Forwards of each median.")] = 15,
    threads: Annotated[int, typer.Option(min=1, help="Threads of a forward.")] = usable_cores(),
    layers: Annotated[int, typer.Option(min=1, help="Layers of the widened target.")] = 4,
    avx2: Annotated[bool, typer.Option("--avx2", help="Use AVX2 only, even where there is AVX-512.")] = False,
    against: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Compare with the kernel sources in this folder, taking turns.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for a JSON and a Markdown file.", callback=new_folder)
    ] = None,
) -> None:
    """Time forwards by tokens and by context, in milliseconds, with the C kernels of this host."""
    from adaserve.bench.kernels import KernelPlan, run_kernels
    from adaserve.engine.cpu.build import WITHOUT_AVX512
    from adaserve.engine.cpu.linear import STORAGES

    known("--storages", storages, STORAGES)
    flags = WITHOUT_AVX512 if avx2 else ()
    plan = KernelPlan(tokens, storages, queries, contexts, rounds, threads, layers, flags, against, out)
    run_kernels(plan, console)


@app.command("context")
def bench_context(
    context: typer.Context,
    *,
    requests: Annotated[Any, listed(counts, "Requests that decode together.")] = "1,4,8,16",
    contexts: Annotated[Any, listed(counts, "Cached tokens of each.")] = "2048,8192,32768",
    windows: Annotated[
        Any, listed(counts, "Recent tokens that drafts read; self-speculation reads the first of these.")
    ] = "256,64",
    rounds: Annotated[int, typer.Option(min=1, help="Forwards of each median.")] = 7,
    threads: Annotated[int, typer.Option(min=1, help="Threads of a forward.")] = usable_cores(),
    fp16: Annotated[bool, typer.Option("--fp16", help="Keep weights in fp16 instead of fp32.")] = False,
    text_tokens: Annotated[
        int, typer.Option(min=64, help="Tokens of each text on which acceptance is measured.")
    ] = 8000,
    temperature: Annotated[float, typer.Option(min=0.0, help="Temperature of those texts.")] = 0.8,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few sizes and rounds unless they are given, to see that it runs.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for JSON, Markdown and a figure.", callback=new_folder)
    ] = None,
) -> None:
    """Measure speculation at long contexts: costs, acceptance, best tree and speedup of each way to draft."""
    from adaserve.bench.context.agreement import TextPlan
    from adaserve.bench.context.run import ContextPlan, run_context

    if quick:
        few: dict[str, Any] = {"requests": (1, 4), "contexts": (512, 2048), "rounds": 2, "text_tokens": 256}
        asked = {name: context.params[name] for name in few if name in given(context)}
        requests, contexts, rounds, text_tokens = (few | asked).values()
    text = TextPlan(2 if quick else 4, text_tokens, 24 if quick else 96, temperature)
    plan = ContextPlan(requests, contexts, windows, rounds, threads, "fp16" if fp16 else "fp32", text, out)
    run_context(plan, console)


app.command("fleet")(bench_fleet)
app.command("learn")(bench_learn)
app.command("serve")(loadgen.bench_serve)
app.command("soak")(bench_soak)
app.command("sweep")(bench_sweep)
