"""The command ``adaserve gpu-check``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

from adaserve.bench.display import table
from adaserve.bench.options import counts, floats, listed, results_folder
from adaserve.commands import COULD_NOT, NO, fail, new_folder
from adaserve.commands import flags as split
from adaserve.terminal import say

if TYPE_CHECKING:
    from rich.table import Table

    from adaserve.bench.gpu_check.findings import CheckPlan
    from adaserve.bench.gpu_check.shapes import Cost, Draft


def gpu_check(
    *,
    device: Annotated[
        Literal["cuda", "cpu"], typer.Option(help="cuda, or cpu for a small dry run of the same code.")
    ] = "cuda",
    model: Annotated[
        str | None,
        typer.Option("--model-path", help="Target model.", show_default="the embedded one, widened"),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option("--draft-model-path", help="Draft model.", show_default="the embedded one, widened"),
    ] = None,
    size: Annotated[
        Literal["small", "large"] | None,
        typer.Option(
            help="Embedded pair: small (as shipped) or large (8B and 1B).",
            show_default="large; small on a CPU",
        ),
    ] = None,
    draft_kind: Annotated[
        Literal["model", "eagle3"],
        typer.Option(help="Embedded draft: a draft model, or an EAGLE-3 head, against SGLang's EAGLE3."),
    ] = "model",
    batches: Annotated[
        Any, listed(counts, "Numbers of concurrent requests.", show_default="1,8,32,64")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=2, help="Output tokens per request.", show_default="64")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Repetitions.", show_default="3")] = None,
    loads: Annotated[
        Any,
        listed(
            floats,
            "Mixed SLOs: requests offered, as shares of what plain decoding serves.",
            show_default="0.5,0.9,1.3",
        ),
    ] = None,
    mixed_seconds: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds of each run with mixed SLOs; 0 = none.", show_default="60"),
    ] = None,
    flags: Annotated[str, typer.Option(help="More SGLang flags for every server, in one string.")] = "",
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SERVER[:STAGE]",
            help="Run only this server, or this stage of it; may be repeated.",
            show_default="all",
        ),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Measure again what is done: what --only names, or all of it.")
    ] = False,
    together: Annotated[
        bool,
        typer.Option(
            "--together",
            help="Start all servers side by side, then measure one after the other. Takes more memory.",
        ),
    ] = False,
    stage_limit: Annotated[
        float, typer.Option(min=1, help="Seconds that one stage, or a server's start, may take.")
    ] = 900.0,
    out: Annotated[Path, results_folder("gpu-check", new_folder)],
) -> None:
    """Check a GPU host: exactness, TPOT and mixed SLOs against SGLang without and with its own speculation.

    Takes about 40 minutes with a pair of the size of 8B and 1B models, which is made without downloads.
    Writes gpu-check.json and figures after every stage. A stage that fails does not stop the others; the same
    command with the same --out runs it again. Exit code 3: a target was missed. 2: a stage could not be done.
    """
    from adaserve.bench.gpu_check.check import Check
    from adaserve.bench.gpu_check.shapes import widened_pair
    from adaserve.bench.gpu_check.systems import Pair
    from adaserve.checkpoints.draft_kind import kind_at
    from adaserve.server import ServerError, ServerSpec, on_cpu, require_models

    console = Console(stderr=True)
    dry = device == "cpu"
    try:
        if dry != on_cpu():
            raise ServerError(
                "this host has no GPU: use --device cpu"
                if not dry
                else "--device cpu needs a host without a GPU"
            )
        if (model is None) != (draft is None):
            raise ServerError("give both --model-path and --draft-model-path, or neither")
        if model is not None:
            require_models(ServerSpec(model, draft))
            if draft_kind != "model":
                raise ServerError("--draft-kind chooses among embedded drafts: leave it out")
        plan = _plan(dry, batches=batches, tokens=tokens, rounds=rounds, loads=loads, mixed_s=mixed_seconds)
        unmade = Pair(model or "", draft or "", device, _common(plan, split(flags, "--flags")))
        # Refuses now what it does not know: to widen a pair takes minutes.
        check = Check(unmade, plan, out, console, only or (), stage_limit, again, together)
        if model is None or draft is None:
            model, draft = map(str, widened_pair(*_costs(dry, size, draft_kind)))
        check.pair = replace(unmade, target=model, draft=draft, kind=kind_at(draft))
        report = check.run()
    except ValueError as error:
        fail(str(error))
    _show(report, Console())
    for sentence in report["does_not_show"]:
        say(console, f"not shown: {sentence}")
    say(console, f"written to {out}")
    if check.undone:
        said = f"not done: {', '.join(check.undone)} (the same command with --out {out} runs them again)"
        console.print(f"[red]{escape(said)}[/]", highlight=False, soft_wrap=True)
        raise typer.Exit(COULD_NOT)
    if any(t["met"] is False for t in report["targets"]):
        raise typer.Exit(NO)


def _common(plan: CheckPlan, given: tuple[str, ...]) -> tuple[str, ...]:
    """SGLang's flags for every server: of two that differ, the last counts."""
    stated = {word.partition("=")[0] for word in given}
    length = () if "--context-length" in stated else ("--context-length", "4096")
    return ("--max-running-requests", str(max(64, *plan.batches)), *given, *length)


def _costs(dry: bool, size: str | None, kind: str = "model") -> tuple[Cost, Draft]:
    """Of the target, and the draft; a dry run has the shipped target. Raises ServerError."""
    from adaserve.bench.gpu_check.facts import gpu
    from adaserve.bench.gpu_check.shapes import (
        LARGE_DRAFTS,
        LARGE_GIB,
        LARGE_TARGET,
        SHIPPED_DRAFTS,
        Cost,
    )
    from adaserve.server import ServerError

    if (size or ("small" if dry else "large")) == "large":
        if (found := gpu()) is not None and found["memory_gib"] < LARGE_GIB:
            has = f"this GPU has {found['memory_gib']:g} GiB"
            raise ServerError(f"{has}, and servers of the large pair need {LARGE_GIB}: give --size small")
        return LARGE_TARGET, LARGE_DRAFTS[kind]
    return Cost("8M" if dry else "100M", 0), SHIPPED_DRAFTS[kind]


def _plan(dry: bool, **given: Any) -> CheckPlan:
    """The plan of a GPU, or a small one, with what was given."""
    from adaserve.bench.gpu_check.findings import CheckPlan

    plan = CheckPlan()
    if dry:
        plan = CheckPlan(batches=(1, 4), tokens=24, rounds=1, exact_prompts=6, mixed_s=6.0, loads=(0.4,))
    return replace(plan, **{name: value for name, value in given.items() if value is not None})


def _show(report: dict[str, Any], console: Console) -> None:
    from adaserve.bench.prompts import DISTINCT

    who = "server or policy"
    sizes = sorted({int(b) for row in report["tpot_ms"].values() for b in row})
    title = "ms per output token, and tokens per verification (greedy)"
    speed = table(title, (who, *(f"batch {b}" for b in sizes)), left=(who,))
    for name, row in report["tpot_ms"].items():
        cells = {int(b): f"{v:.2f}" for b, v in row.items()}
        for b, v in report["accept_length"].get(name, {}).items():
            cells[int(b)] += f" ({v:.2f})"
        speed.add_row(name, *(cells.get(b, "-") for b in sizes))
    heads = (who, "requests", "identical", "ties", "widest", "below", "different")
    exact = table("outputs against SGLang without speculation", heads, left=(who,))
    for name, row in report["exact"].items():
        values = (*(row[k] for k in ("requests", "identical", "ties", "widest_tie", "tie_margin")),)
        exact.add_row(name, *("-" if n is None else f"{n:g}" for n in (*values, len(row["different"]))))
    met = table("targets", ("target", "value", "met"), left=("target", "met"))
    for row in report["targets"]:
        unjudged = "not measured" if row["missing"] else "no claim"
        value = "-" if row["value"] is None else f"{row['value']:g}"
        met.add_row(row["target"], value, {True: "yes", False: "no", None: unjudged}[row["met"]])
    for made in (speed, exact, *([_mixed(report["mixed"])] if report["mixed"] else []), met):
        console.print(made)
    missing = sorted({what for row in report["targets"] for what in row["missing"]})
    if missing:
        say(console, f"not measured: {', '.join(missing)}")
    if (share := report["distinct_8grams"]) is not None and share < DISTINCT:
        said = f"TPOT was measured on text that loops ({share:.0%} of its 8-grams are distinct)"
        say(console, f"{said}, which drafts guess better than other text")
    if report["other_code"]:
        said = f"measured, or in part, with other code than this: {', '.join(report['other_code'])}"
        say(console, said)
    for name, reason in report["skipped"].items():
        say(console, f"skipped {name}: {reason}")
    for name, reason in report["failed"].items():
        say(console, f"failed {name}: {reason}")


def _mixed(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Table:
    """The runs with mixed SLOs. Where no request was answered, there is no mean."""
    from adaserve.slo.run_summary import percent

    columns: dict[str, tuple[str, Callable[[float], str]]] = {
        "TPOT\nmet": ("slo_attainment", lambda share: f"{percent(share, 0)}%"),
        "goodput\ntok/s": ("token_goodput", "{:.0f}".format),
        "all\ntok/s": ("output_throughput", "{:.0f}".format),
        "TPOT\nmean": ("mean_tpot_ms", "{:.1f}".format),
        "TPOT\np99": ("p99_tpot_ms", "{:.1f}".format),
        "TTFT\nmean": ("mean_ttft_ms", "{:.0f}".format),
        "TTFT\np99": ("p99_ttft_ms", "{:.0f}".format),
    }
    heads = ("load", "server or policy")
    made = table("mixed SLOs (ms; TTFT has no SLO)", (*heads, *columns), left=heads)
    for load, runs in found.items():
        for name, run in runs.items():
            values = [(run[key], shown) for key, shown in columns.values()]
            made.add_row(load, name, *("-" if v is None else shown(v) for v, shown in values))
    return made
