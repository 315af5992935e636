"""The command ``adaserve bench learn``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from adaserve.bench.options import known, listed, results_folder, words
from adaserve.commands import given, panel

SERVED = "Not with --offline"
_served = panel(SERVED)


def bench_learn(
    context: typer.Context,
    *,
    offline: Annotated[
        bool, typer.Option("--offline", help="Compare variants of the training, without a server.")
    ] = False,
    variants: Annotated[
        Any, listed(words, "Variants to compare, with --offline.", show_default="all")
    ] = None,
    order: Annotated[
        str,
        typer.Option(
            metavar="A,B",
            help="Parts of the stream: cpp, json, law or home. cpp+law takes turns; cpp:64 is 64 requests.",
        ),
    ] = "cpp,json,law,cpp",
    requests: Annotated[int, typer.Option(min=8, help="Requests per part without a number.")] = 256,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens generated per request.")] = 96,
    temperature: Annotated[float, typer.Option(min=0, help="Temperature of all requests.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of every random choice.")] = 0,
    out: Annotated[Path, results_folder("learn")],
    block: Annotated[int, _served("Requests per block; drafts take turns by blocks.", min=4)] = 32,
    every: Annotated[int, _served("Compare in every Nth block only.", min=1)] = 1,
    at_once: Annotated[int, _served("Concurrent requests.", min=1)] = 8,
    against: Annotated[
        str, _served("Compare with first (the original draft) or held (the learned draft, without learning).")
    ] = "first",
    rest: Annotated[float, _served("Idle seconds per second of traffic, as spare capacity.", min=0)] = 0.0,
    classes: Annotated[Any, _served("SLO classes, which the requests take in turn.", parser=words)] = "",
    policy: Annotated[str, _served("Scheduling policy, as in `adaserve serve`.")] = "chain-4",
    share: Annotated[float, _served("Share of the requests to learn from, 0 to 1.", min=0, max=1)] = 1.0,
    loss: Annotated[
        str, _served("Loss of the training: jsd, forward, reverse, lk or hard (docs/learning.md).")
    ] = "jsd",
    nice: Annotated[
        int,
        _served("Priority of the trainer, as in nice; at 19 it gets spare time only.", min=0, max=19),
    ] = 19,
    size: Annotated[str, _served("Parameters of the embedded target.")] = "100M",
) -> None:
    """Compare a draft that learns with one that does not, on the same texts, while the traffic shifts."""
    from adaserve.bench.learn.offline import VARIANTS, run_offline
    from adaserve.bench.learn.online import LearnPlan, run_learn
    from adaserve.bench.learn.texts import HOME, PATTERNS
    from adaserve.config import AdaServeConfig
    from adaserve.server import ServerSpec
    from adaserve.slo.classes import SLOConfig

    _refuse_unused(context, offline)
    console = Console(stderr=True)
    parts = tuple(w.strip() for w in order.split(","))
    known("--against", (against,), ("first", "held"))
    chosen = variants or tuple(VARIANTS)
    known("--variants", chosen, tuple(VARIANTS))
    known("--classes", classes, SLOConfig().labels)
    plan = LearnPlan(
        parts, requests, block, tokens, temperature, at_once, every=every, seed=seed,
        against="held" if against == "held" else "first", slo_classes=classes, rest=rest,
    )  # fmt: skip
    try:
        domains = {domain for _, domain in plan.blocks}
    except ValueError as error:
        raise typer.BadParameter(f"--order has {error}: write it as cpp+law:64") from None
    known("--order", tuple(domains), (*PATTERNS, HOME))
    settings: dict[str, Any] = {"learn": True, "learn_share": share, "learn_loss": loss, "learn_nice": nice}
    if offline:
        run_offline(plan, chosen, out, console)
    else:
        spec = ServerSpec(size=size, config=AdaServeConfig(policy=policy, **settings))
        run_learn(spec, plan, out, console)


def _refuse_unused(context: typer.Context, offline: bool) -> None:
    """Raises BadParameter on options that would change nothing."""
    asked = [p for p in context.command.params if p.name in given(context)]
    if offline and (unused := [p.opts[0] for p in asked if getattr(p, "rich_help_panel", "") == SERVED]):
        raise typer.BadParameter(f"--offline has no use for {', '.join(unused)}: leave out one or the other")
    if not offline and "variants" in given(context):
        raise typer.BadParameter("--variants are compared with --offline only: give both")
