"""The command ``adaserve``.

A command's module imports at its top only what its options need, and everything else where it is used: help
and small commands must not wait for PyTorch.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import warnings
from collections.abc import MutableMapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from adaserve.bench.cli import app as bench
from adaserve.bench.gpu_check.cli import gpu_check
from adaserve.bench.options import results_folder
from adaserve.bench.simulate.cli import app as simulator
from adaserve.commands import Commands, fail, new_file
from adaserve.commands import flags as split
from adaserve.fleet.cli import app as fleet
from adaserve.host.cache import lead_libraries
from adaserve.host.cores import short_spins
from adaserve.host.lifetime import die_with_parent
from adaserve.loadgen import cli as loadgen
from adaserve.options import (
    Budget,
    Draft,
    DraftKind,
    Drafts,
    DraftWeights,
    Model,
    PolicyName,
    SecondDraft,
    Size,
    TakesConfig,
    Weights,
    Window,
    about_costs,
    about_drafts,
    about_learning,
    about_overload,
    about_recording,
    server_spec,
    settings,
)
from adaserve.pair.cli import app as pair
from adaserve.terminal import say
from adaserve.trainer.cli import app as draft

app = typer.Typer(
    name="adaserve",
    cls=Commands,
    help="Serve every LLM request at the speed it asks for.\n\n"
    "Start with `adaserve demo`, or `adaserve serve` and a request with the header x-slo-tpot-ms.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # it joins the lines of a paragraph
    # SGLang's names are too long for a table of options.
    context_settings={
        "token_normalize_func": lambda name: (
            "draft-model-path"
            if name in ("speculative-draft-model-path", "speculative-draft-model")
            else name
        )
    },
)
EXTRA = ("locust", "matplotlib", "jinja2")
"""Libraries of the extra ``adaserve[bench]``."""
MEASURING = ("bench", "demo", "gpu-check", "report", "simulate")
"""Commands that need them."""
console = Console(stderr=True)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"adaserve {version('adaserve')}")
        raise typer.Exit


@app.callback()
def _require(
    context: typer.Context,
    *,
    _: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit."),
    ] = False,
) -> None:
    """Ends a measuring command with one sentence when a library of its extra is not installed."""
    needed = EXTRA if context.invoked_subcommand in MEASURING else ()
    for name in (n for n in needed if find_spec(n) is None):
        fail(f"adaserve {context.invoked_subcommand} needs {name}: pip install 'adaserve[bench]'")


@app.command(cls=TakesConfig, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    *,
    model: Model = None,
    draft: Draft = None,
    policy: PolicyName = "priced",
    slo_config: Annotated[
        Path | None,
        typer.Option(help="YAML file with SLO classes.", show_default="coding, chat, summarization"),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all networks.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 30000,
    draft_kind: DraftKind = "auto",
    drafts: Drafts = None,
    second_draft: SecondDraft = None,
    draft_window: Window = "0",
    draft_sinks: Annotated[
        int,
        about_drafts("First tokens of the context that a draft with a window reads too.", min=0),
    ] = 4,
    suffix_scope: Annotated[
        str,
        about_drafts(
            "Text that suffix searches: request (the request's own), or key (also what was served to "
            "others with the same API key)."
        ),
    ] = "request",
    suffix_memory_mb: Annotated[int, about_drafts("Memory limit for that text, in MB.", min=1)] = 128,
    budget: Budget = None,
    max_depth: Annotated[int, about_costs("Depth of the deepest candidate tree, in tokens.")] = 5,
    max_width: Annotated[
        int | None,
        about_costs("Candidates per level of the widest tree.", show_default="3; on a GPU 8"),
    ] = None,
    profile: Annotated[
        Path | None,
        about_costs(
            "Latency profile written by `adaserve profile`.",
            show_default="the cached one, else measured at the start",
        ),
    ] = None,
    baseline_ms: Annotated[
        float | None,
        about_costs(
            "Milliseconds per token of the idle server, which x_baseline SLOs multiply.",
            show_default="measured",
        ),
    ] = None,
    shed: Annotated[
        bool,
        about_overload("Answer 429 to waiting requests that would miss their TTFT SLO.", "--shed"),
    ] = False,
    orca: Annotated[
        bool,
        about_overload("Add the response header endpoint-load-metrics (ORCA; Envoy reads it).", "--orca"),
    ] = False,
    learn: Annotated[
        bool,
        about_learning(
            "Train the draft on what is served, in spare processor time, and swap in better versions. "
            "Requests with x-adaserve-learn: off are left out.",
            "--learn",
        ),
    ] = False,
    learn_folder: Annotated[
        Path | None,
        about_learning(
            "Keep better drafts here, and start with the last one.",
            show_default="not kept",
        ),
    ] = None,
    record: Annotated[
        Path | None,
        about_recording(
            "Record every iteration to this file, for `adaserve simulate run --recorded`; to NAME-2 if there "
            "is one already."
        ),
    ] = None,
    record_requests: Annotated[
        Path | None,
        about_recording(
            "Append lengths and SLOs of finished requests to this file, for `adaserve simulate capacity`."
        ),
    ] = None,
    size: Size = "100M",
    cpu_weights: Weights = "auto",
    draft_weights: DraftWeights = "auto",
) -> None:
    """Serve a model with per-request SLOs: SGLang's HTTP API, plus AdaServe.

    Without --model-path it serves the embedded pair, which runs on any machine. Every flag that
    `python -m sglang.launch_server --help` shows is accepted too, including further flags of AdaServe.

    Try: curl localhost:30000/v1/completions -H 'x-slo-tpot-ms: 40' -H 'content-type: application/json'
    -d '{"model": "adaserve-embedded", "prompt": "def main(", "max_tokens": 64}'
    """
    from adaserve.server import require_free, require_models

    spec = server_spec(model, draft, size, tuple(context.args), host, port, **settings(context))
    require_models(spec)
    require_free(spec.host, spec.port)
    command = spec.command()
    say(
        console,
        "starting SGLang, which takes a minute, and longer the first time; "
        f"then {spec.url}/slo is the live page",
    )
    os.environ.update(spec.environment())
    sys.stdout.flush()
    # The server takes this process's place, so that signals reach SGLang itself.
    os.execv(command[0], command)


@app.command()
def demo(
    *,
    seconds: Annotated[float, typer.Option(min=5, help="Seconds of traffic.")] = 60.0,
    policy: Annotated[str, typer.Option(help="Policy to compare with plain decoding (none).")] = "priced",
    rps: Annotated[
        float | None,
        typer.Option(min=0.01, help="Requests per second.", show_default="from this host's speed"),
    ] = None,
    repetition: Annotated[
        bool,
        typer.Option(
            "--repetition", help="Use prompts whose answers repeat earlier text, and draft from it too."
        ),
    ] = False,
    size: Size = "100M",
    out: Annotated[Path, results_folder("demo")],
) -> None:
    """Show three classes of requests at three speeds, with AdaServe and without it.

    Starts a server with the embedded pair and sends the same mixed traffic under both policies, which take
    turns every few seconds. Prints a table and writes a report.
    """
    from adaserve.bench.demo import run_demo

    run_demo(seconds, policy, rps, size, out, console, repetition=repetition)


@app.command()
def profile(
    context: typer.Context,
    *,
    model: Model = None,
    draft: Draft = None,
    second_draft: SecondDraft = None,
    size: Size = "100M",
    cpu_weights: Weights = "auto",
    draft_weights: DraftWeights = "auto",
    flags: Annotated[
        str,
        typer.Option(
            help="More SGLang flags in one string, those that `serve` will have: --flags '--tp-size 2'.",
            show_default="none",
        ),
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(
            help="JSON file to write.", show_default="in the cache, where `serve` finds it", callback=new_file
        ),
    ] = None,
) -> None:
    """Measure how long drafting and verifying take on this host.

    Takes a minute or two with the embedded pair. After that `adaserve serve` uses the result.
    """
    spec = server_spec(model, draft, size, split(flags, "--flags"), **settings(context))
    with console.status("loading SGLang"):
        from adaserve.bench.profile import run_profile
    run_profile(spec, out, console)


@app.command()
def doctor(
    *, json_output: Annotated[bool, typer.Option("--json", help="Print findings as JSON.")] = False
) -> None:
    """Say what this host has, what is missing, and what to do. Exit code 3: something is missing."""
    from adaserve.doctor import doctor as examine

    raise typer.Exit(examine(json_output))


app.add_typer(bench, name="bench")
app.command("gpu-check")(gpu_check)
app.command("report")(loadgen.report)
app.add_typer(simulator, name="simulate")
app.add_typer(fleet, name="fleet")
app.add_typer(pair, name="pair")
app.add_typer(draft, name="draft")


def without_proxy(environ: MutableMapping[str, str]) -> None:
    """Servers of this machine are asked directly, whatever proxy ``environ`` names for others.

    SGLang, too, asks its server when it starts, and ends if a proxy answers.
    """
    direct = environ.get("no_proxy") or environ.get("NO_PROXY")
    if direct != "*":  # which stands for all, and only alone
        environ["no_proxy"] = ",".join([*filter(None, [direct]), "localhost", "127.0.0.1", "::1"])


def main() -> None:
    """Runs the command line."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    short_spins(os.environ)
    lead_libraries()
    without_proxy(os.environ)
    # What lies in the folder where a command is called, a queue.py say, is no module of its servers.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    # A mark in place of what the terminal's encoding lacks: no result is lost for a name in another script.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")
    # SGLang's, about hardware that is not here.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"sglang\.")
    # However a command ends, the servers that it started end too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    die_with_parent()  # a replica of a fleet, which becomes a server only after seconds, or minutes
    try:
        app()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
