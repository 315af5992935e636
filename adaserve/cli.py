"""The command ``adaserve``.

A module of a command imports at its top what its options need, and what does the work where it runs: help and
small commands must not wait for PyTorch.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from adaserve.bench.fleet.cli import bench_fleet
from adaserve.bench.gpu_check.cli import gpu_check
from adaserve.bench.learn.cli import bench_learn
from adaserve.bench.options import counts, floats, known, words
from adaserve.bench.simulate.cli import app as simulator
from adaserve.bench.soak.cli import bench_soak
from adaserve.bench.sweep.cli import bench_sweep
from adaserve.commands import Commands, fail, new_file, new_folder
from adaserve.cores import short_spins, usable_cores
from adaserve.fleet.cli import app as fleet
from adaserve.learning.cli import app as draft
from adaserve.loadgen import cli as loadgen
from adaserve.pair.cli import app as pair

app = typer.Typer(
    name="adaserve",
    cls=Commands,
    help="Serve every LLM request at the speed it asks for.\n\n"
    "Start with `adaserve demo`, or `adaserve serve` and a request with the header x-slo-tpot-ms.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # it joins the lines of a paragraph
)
EXTRA = ("locust", "matplotlib", "jinja2")
"""Libraries of the extra ``adaserve[bench]``, and the commands that need them."""
MEASURING = ("bench", "demo", "gpu-check", "report", "simulate")
bench = typer.Typer(help="Measure: load tests and latency.", no_args_is_help=True)
console = Console(stderr=True)

Model = Annotated[
    str | None,
    typer.Option(
        "--model-path",
        "--model",
        help="Target: a folder or Hugging Face name.",
        show_default="the embedded model",
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft-model-path",
        "--speculative-draft-model-path",  # SGLang's name
        help="Draft with the target's vocabulary.",
        show_default="the embedded model",
    ),
]
Drafts = Annotated[
    str | None,
    typer.Option(
        help="Who proposes tokens: model, self, suffix, or two of them as model,suffix. self is the target "
        "over a few of its tokens (--draft-window); suffix proposes what followed earlier in the same "
        "request's text, at next to no cost and for any model.",
        show_default="model; suffix where --model-path has no --draft-model-path",
    ),
]
Window = Annotated[
    str,
    typer.Option(
        help="Recent tokens of the context that a draft model reads, besides the first ones: a number, 0 for "
        "the whole context, or auto: the policy priced chooses for each request."
    ),
]
DraftKind = Annotated[
    str,
    typer.Option(
        help="What the draft is: model (a language model), eagle3 (an EAGLE-3 head on the target's hidden "
        "states), mtp (an MTP layer, by default the one in the target's own checkpoint), medusa (Medusa "
        "heads on hidden states), or auto: by its config.json. Of the embedded drafts it chooses one; auto "
        "is the model."
    ),
]
SecondDraft = Annotated[
    str | None,
    typer.Option(help="Another draft model, whose candidates join the first one's in one tree."),
]
Size = Annotated[str, typer.Option(help="Parameters that the embedded target is widened to.")]
PolicyName = Annotated[
    str,
    typer.Option(
        "--policy", help="Decides what is verified: priced, adaserve, turbospec, chain-4, none, ..."
    ),
]
Budget = Annotated[int | None, typer.Option(min=1, help="Tokens per verification.", show_default="measured")]
Weights = Annotated[str, typer.Option(help="How a CPU host stores weights: auto, fp32, fp16, bf16.")]
DraftWeights = Annotated[
    str,
    typer.Option(
        help="How a CPU host stores a draft's weights: auto, fp32, fp16, bf16, int8. auto is int8 where the "
        "processor multiplies 8-bit numbers fast, and else what --cpu-weights says."
    ),
]


@app.callback()
def _require(context: typer.Context) -> None:
    """Ends a measuring command with one sentence when a library of its extra is not installed."""
    needed = EXTRA if context.invoked_subcommand in MEASURING else ()
    for name in (n for n in needed if find_spec(n) is None):
        fail(f"adaserve {context.invoked_subcommand} needs {name}: pip install 'adaserve[bench]'")


def _spec(
    model: str | None,
    draft: str | None,
    size: str,
    extra: tuple[str, ...] = (),
    host: str = "127.0.0.1",
    port: int = 30000,
    drafts: str | None = None,
    **settings: Any,
) -> Any:
    from adaserve.config import AdaServeConfig
    from adaserve.server import ServerSpec

    is_part = settings.get("draft_kind") == "mtp" and "model" in (drafts or "model").split(",")
    if is_part and draft is None:
        draft = model  # an MTP layer stands in the target's checkpoint
    if drafts is None:
        drafts = "suffix" if model is not None and draft is None else "model"
    config = AdaServeConfig(drafts=drafts, **settings)
    return ServerSpec(model, draft, size, host, port, config, extra)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    *,
    model: Model = None,
    draft: Draft = None,
    draft_kind: DraftKind = "auto",
    second_draft: SecondDraft = None,
    drafts: Drafts = None,
    draft_window: Window = "0",
    draft_sinks: Annotated[
        int, typer.Option(min=0, help="First tokens of the context that a draft with a window reads.")
    ] = 4,
    suffix_scope: Annotated[
        str,
        typer.Option(
            help="Text that suffix searches: request (the request's own), or key (also what was served to "
            "others with the same API key)."
        ),
    ] = "request",
    suffix_memory_mb: Annotated[
        int, typer.Option(min=1, help="Most memory for the texts that suffix searches, in MB.")
    ] = 128,
    learn: Annotated[
        bool,
        typer.Option(
            "--learn",
            help="Train the draft on what is served, on spare processor time, and swap better ones in. CPU "
            "hosts only. Requests with x-adaserve-learn: off are left out.",
        ),
    ] = False,
    learn_folder: Annotated[
        Path | None,
        typer.Option(help="Keep better drafts here, and start with the last one.", show_default="not kept"),
    ] = None,
    size: Size = "100M",
    policy: PolicyName = "priced",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 30000,
    budget: Budget = None,
    max_depth: Annotated[int, typer.Option(help="Deepest candidate tree.")] = 5,
    max_width: Annotated[int, typer.Option(help="Widest beam.")] = 3,
    slo_config: Annotated[
        Path | None,
        typer.Option(help="YAML file with the SLO classes.", show_default="coding, chat, summarization"),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="File written by `adaserve profile`.", show_default="the cached one, else measured at start"
        ),
    ] = None,
    baseline_ms: Annotated[
        float | None,
        typer.Option(help="ms per token of the idle server, for x_baseline SLOs.", show_default="measured"),
    ] = None,
    record: Annotated[Path | None, typer.Option(help="Record every iteration here, for replay.")] = None,
    record_requests: Annotated[
        Path | None,
        typer.Option(
            help="Append lengths and SLOs of requests to this trace, for `adaserve simulate capacity`."
        ),
    ] = None,
    shed: Annotated[
        bool,
        typer.Option("--shed", help="Answer 429 to requests that would miss their TTFT SLO in the queue."),
    ] = False,
    orca: Annotated[
        bool, typer.Option("--orca", help="Add ORCA's response header endpoint-load-metrics (Envoy).")
    ] = False,
    cpu_weights: Weights = "auto",
    draft_weights: DraftWeights = "auto",
) -> None:
    """Serve a model with per-request SLOs: SGLang's HTTP API, plus AdaServe.

    Without a model the embedded pair is served, on any machine. Every flag of
    `python -m sglang.launch_server` is accepted too and passed to SGLang unchanged.

    Try: curl localhost:30000/v1/completions -H 'x-slo-tpot-ms: 40' -H 'content-type: application/json'
    -d '{"model": "adaserve-embedded", "prompt": "def main(", "max_tokens": 64}'
    """
    from adaserve.server import require_free

    spec = _spec(
        model, draft, size, tuple(context.args), host, port,
        draft_kind=draft_kind, second_draft=second_draft, drafts=drafts,
        draft_window=draft_window, draft_sinks=draft_sinks,
        suffix_scope=suffix_scope, suffix_memory_mb=suffix_memory_mb,
        learn=learn, learn_folder=_text(learn_folder),
        policy=policy, budget=budget, max_depth=max_depth, max_width=max_width, baseline_ms=baseline_ms,
        slo_config=_text(slo_config), profile=_text(profile), record=_text(record), cpu_weights=cpu_weights,
        draft_weights=draft_weights, shed=shed, orca=orca, record_requests=_text(record_requests),
    )  # fmt: skip
    require_free(spec.host, spec.port)
    command = spec.command()
    os.environ.update(spec.environment())
    sys.stdout.flush()
    # The server takes this process's place, so that signals reach SGLang itself.
    os.execv(command[0], command)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


@app.command()
def demo(
    *,
    seconds: Annotated[float, typer.Option(min=5, help="Seconds of traffic.")] = 60.0,
    policy: Annotated[str, typer.Option(help="Policy to compare with `none`.")] = "priced",
    rps: Annotated[
        float | None,
        typer.Option(min=0.01, help="Requests per second.", show_default="from this host's speed"),
    ] = None,
    repetition: Annotated[
        bool,
        typer.Option("--repetition", help="Prompts whose answers repeat earlier text; drafts from it too."),
    ] = False,
    size: Size = "100M",
    out: Annotated[
        Path | None,
        typer.Option(help="Results folder.", show_default="results/<UTC>-demo", callback=new_folder),
    ] = None,
) -> None:
    """See three classes of requests get three speeds, with AdaServe and without it.

    Starts a server with the embedded pair, sends the same mixed traffic with both policies in turns of some
    seconds, prints a table and writes a report.
    """
    from adaserve.bench.demo import run_demo

    run_demo(seconds, policy, rps, size, out, console, repetition=repetition)


@app.command()
def profile(
    *,
    model: Model = None,
    draft: Draft = None,
    second_draft: SecondDraft = None,
    size: Size = "100M",
    cpu_weights: Weights = "auto",
    draft_weights: DraftWeights = "auto",
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write.", show_default="a cache folder, where `serve` finds it", callback=new_file
        ),
    ] = None,
) -> None:
    """Measure how long drafting and verifying take on this host.

    Takes a minute or two with the embedded pair. From then on `adaserve serve` uses the result.
    """
    from adaserve.bench.profile import run_profile

    stored: dict[str, Any] = dict(cpu_weights=cpu_weights, draft_weights=draft_weights)
    run_profile(_spec(model, draft, size, second_draft=second_draft, **stored), out, console)


@app.command()
def doctor(
    *, json_output: Annotated[bool, typer.Option("--json", help="Print findings as JSON.")] = False
) -> None:
    """Say what this host has, what is missing, and what to do about it. Exit code 1: something is missing."""
    from adaserve.doctor import doctor as examine

    raise typer.Exit(examine(json_output))


@bench.command("latency")
def bench_latency(
    *,
    model: Model = None,
    draft: Draft = None,
    draft_kinds: Annotated[
        Any,
        typer.Option(
            "--draft-kind",
            parser=words,
            metavar="A,B",
            help="As in `serve`, or `self`: the target drafts for itself. Several are compared in turns, "
            "each on a server of its own. model:fp32 stores the draft's weights like that.",
        ),
    ] = "auto",
    size: Size = "100M",
    policies: Annotated[
        Any,
        typer.Option(
            parser=words,
            metavar="A,B",
            help="Policies; `none` is always measured too. priced@256, @0, @auto: what drafts read.",
        ),
    ] = "priced",
    batches: Annotated[
        Any,
        typer.Option(parser=counts, metavar="A,B", help="Numbers of concurrent requests."),
    ] = "1,4,8,16,32",
    contexts: Annotated[
        Any,
        typer.Option(
            parser=counts,
            metavar="A,B",
            help="Tokens of a request, answer included, made of long held-out texts of the embedded pair.",
            show_default="short prompts",
        ),
    ] = None,
    temperatures: Annotated[
        Any, typer.Option(parser=floats, metavar="A,B", help="Sampling temperatures.")
    ] = "0,0.7",
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved repetitions.")] = 5,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens generated per request.")] = 64,
    repetition: Annotated[
        Any,
        typer.Option(
            parser=words,
            metavar="A,B",
            help="Text that repeats itself instead of held-out text: edits, turns, templates, json.",
        ),
    ] = "",
    cpu_weights: Weights = "auto",
    budget: Budget = None,
    out: Annotated[
        Path | None,
        typer.Option(help="JSON file.", show_default="results/<UTC>-latency/latency.json", callback=new_file),
    ] = None,
) -> None:
    """Compare TPOT with plain decoding at several batch sizes, in turns on one server per kind of draft."""
    from adaserve.bench.latency import BASE, SELF, SELF_WINDOW, LatencyPlan, run_latency
    from adaserve.bench.repetition import KINDS
    from adaserve.config import AdaServeConfig

    others = tuple(p for p in policies if p != BASE)
    for name, _, window in (p.partition("@") for p in others):
        AdaServeConfig(policy=name, draft_window=window or 0)  # refused now, not when its turn comes
    known("--repetition", repetition, KINDS)
    plan = LatencyPlan(
        others, batches, temperatures, rounds, tokens, repetition=repetition, contexts=contexts or (0,)
    )
    if contexts and (model is not None or repetition):
        raise typer.BadParameter("--contexts are made of the embedded pair's held-out text: give no other")
    # The same start for all: paced prefills let the first requests of a batch decode beside prompts.
    common: dict[str, Any] = {"cpu_weights": cpu_weights, "budget": budget, "prefill": "exclusive"}

    def spec(draft_kind: str) -> Any:
        kind, _, weights = draft_kind.partition(":")
        chosen: dict[str, Any] = {"draft_kind": kind}
        if kind == SELF:
            chosen = {"drafts": SELF, "draft_window": SELF_WINDOW}
        return _spec(model, draft, size, plan.flags, **chosen, draft_weights=weights or "auto", **common)

    run_latency({kind: spec(kind) for kind in draft_kinds}, plan, out, console)


@bench.command("heads")
def bench_heads(
    *,
    batches: Annotated[Any, typer.Option(parser=counts, metavar="A,B", help="Requests at once.")] = "1,4,8",
    temperature: Annotated[
        float, typer.Option(min=0, help="Temperature of the text that the target writes.")
    ] = 0.8,
    depth: Annotated[int, typer.Option(min=1, max=8, help="Depth of the trees.")] = 4,
    width: Annotated[int, typer.Option(min=1, max=16, help="Width of the trees.")] = 3,
    trees: Annotated[int, typer.Option(min=2, help="Trees of each draft per batch size.")] = 200,
    rows: Annotated[int, typer.Option(min=2, help="Prompts per category.")] = 24,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens the target writes per prompt.")] = 96,
    seed: Annotated[int, typer.Option(help="Seed of the text.")] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of a forward.", show_default="all")
    ] = None,
    draft_weights: Annotated[
        Any,
        typer.Option(
            parser=words,
            metavar="A,B",
            help="How weights of draft and EAGLE-3 head are stored, as in `serve`; several are compared.",
        ),
    ] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(help="JSON file.", show_default="results/<UTC>-heads/heads.json", callback=new_file),
    ] = None,
) -> None:
    """Accepted tokens and drafting time of the embedded draft and the embedded heads, in turns."""
    from adaserve.bench.heads import HeadPlan, run_heads
    from adaserve.engine.host.linear import STORAGES

    known("--draft-weights", draft_weights, STORAGES)
    plan = HeadPlan(
        batches, temperature, depth, width, tokens, rows, trees, seed, threads or usable_cores(),
        draft_weights=draft_weights,
    )  # fmt: skip
    run_heads(plan, out, console)


@bench.command("kernels")
def bench_kernels(
    *,
    tokens: Annotated[
        Any, typer.Option(parser=counts, metavar="A,B", help="Tokens per forward.")
    ] = "1,2,3,4,5,6,7,8,10,12,13,14,16,20,24,25,32,40,48,56,64",
    storages: Annotated[
        Any, typer.Option(parser=words, metavar="A,B", help="How weights are stored: fp32, fp16, bf16.")
    ] = "fp32,fp16",
    queries: Annotated[
        Any, typer.Option(parser=counts, metavar="A,B", help="Tokens per request in attention.")
    ] = "1,5,16,64",
    contexts: Annotated[
        Any, typer.Option(parser=counts, metavar="A,B", help="Cached tokens of the request.")
    ] = "256,2048,8192,32768",
    rounds: Annotated[int, typer.Option(min=1, help="Forwards of each median.")] = 15,
    threads: Annotated[int, typer.Option(min=1, help="Threads of a forward.")] = usable_cores(),
    layers: Annotated[int, typer.Option(min=1, help="Layers of the widened target.")] = 4,
    avx2: Annotated[bool, typer.Option("--avx2", help="Without AVX-512, on a host that has it.")] = False,
    against: Annotated[
        Path | None, typer.Option(help="Folder of other kernel sources to compare with, in turns.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for a JSON and a Markdown file.", callback=new_folder)
    ] = None,
) -> None:
    """Milliseconds of forwards by tokens and by context, with the C kernels of this host."""
    from adaserve.bench.kernels import KernelPlan, run_kernels
    from adaserve.engine.host.build import WITHOUT_AVX512
    from adaserve.engine.host.linear import STORAGES

    known("--storages", storages, STORAGES)
    flags = WITHOUT_AVX512 if avx2 else ()
    plan = KernelPlan(tokens, storages, queries, contexts, rounds, threads, layers, flags, against, out)
    run_kernels(plan, console)


@bench.command("context")
def bench_context(
    *,
    requests: Annotated[
        Any, typer.Option(parser=counts, metavar="A,B", help="Requests that decode together.")
    ] = "1,4,8,16",
    contexts: Annotated[
        Any, typer.Option(parser=counts, metavar="A,B", help="Cached tokens of each.")
    ] = "2048,8192,32768",
    windows: Annotated[
        Any,
        typer.Option(
            parser=counts,
            metavar="A,B",
            help="Recent tokens that drafts read; the first is that of self-speculation.",
        ),
    ] = "256,64",
    rounds: Annotated[int, typer.Option(min=1, help="Forwards of each median.")] = 7,
    threads: Annotated[int, typer.Option(min=1, help="Threads of a forward.")] = usable_cores(),
    fp16: Annotated[bool, typer.Option("--fp16", help="Keep weights in fp16 instead of fp32.")] = False,
    text_tokens: Annotated[
        int, typer.Option(min=64, help="Tokens of each text on which agreement is measured.")
    ] = 8000,
    temperature: Annotated[float, typer.Option(min=0.0, help="Temperature of those texts.")] = 0.8,
    quick: Annotated[bool, typer.Option("--quick", help="Few sizes and rounds: does it run?")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for JSON, Markdown and a figure.", callback=new_folder)
    ] = None,
) -> None:
    """Speculation at long contexts: costs, acceptance, best depth and speedup of each way to draft."""
    from adaserve.bench.context.agreement import TextPlan
    from adaserve.bench.context.run import ContextPlan, run_context

    text = TextPlan(2, 256, 24, temperature) if quick else TextPlan(4, text_tokens, 96, temperature)
    if quick:
        requests, contexts, rounds = [1, 4], [512, 2048], 2
    plan = ContextPlan(requests, contexts, windows, rounds, threads, "fp16" if fp16 else "fp32", text, out)
    run_context(plan, console)


bench.command("fleet")(bench_fleet)
bench.command("learn")(bench_learn)
bench.command("serve")(loadgen.bench_serve)
bench.command("soak")(bench_soak)
bench.command("sweep")(bench_sweep)
app.add_typer(bench, name="bench")
app.command("gpu-check")(gpu_check)
app.command("report")(loadgen.report)
app.add_typer(simulator, name="simulate")
app.add_typer(fleet, name="fleet")
app.add_typer(pair, name="pair")
app.add_typer(draft, name="draft")


def main() -> None:
    """Entry point of the console script."""
    short_spins(os.environ)
    # However a command ends, the servers that it started end too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        app()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
