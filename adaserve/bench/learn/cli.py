"""The command ``adaserve bench learn``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from adaserve.bench.options import known, listed, results_folder, words


def bench_learn(
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
    block: Annotated[int, typer.Option(min=4, help="Requests per block; drafts take turns by blocks.")] = 32,
    every: Annotated[int, typer.Option(min=1, help="Compare in every Nth block only.")] = 1,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens generated per request.")] = 96,
    temperature: Annotated[float, typer.Option(min=0, help="Temperature of all requests.")] = 0.8,
    at_once: Annotated[int, typer.Option(min=1, help="Concurrent requests.")] = 8,
    against: Annotated[
        str,
        typer.Option(
            help="Compare with first (the original draft) or held (the learned draft, without learning)."
        ),
    ] = "first",
    rest: Annotated[
        float, typer.Option(min=0, help="Idle seconds per second of traffic, as spare capacity.")
    ] = 0.0,
    classes: Annotated[Any, listed(words, "SLO classes, which the requests take in turn.")] = "",
    policy: Annotated[
        str, typer.Option("--policy", help="Scheduling policy, as in `adaserve serve`.")
    ] = "chain-4",
    share: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share of the requests to learn from, 0 to 1; not with --offline."),
    ] = 1.0,
    loss: Annotated[
        str,
        typer.Option(help="What training minimises: jsd, forward, reverse, lk or hard (docs/learning.md)."),
    ] = "jsd",
    nice: Annotated[
        int,
        typer.Option(
            min=0, max=19, help="Priority of the trainer, as in nice; at 19 it gets spare time only."
        ),
    ] = 19,
    size: Annotated[
        str, typer.Option(help="Parameters of the embedded target; not with --offline.")
    ] = "100M",
    seed: Annotated[int, typer.Option(min=0, help="Seed of every random choice.")] = 0,
    out: Annotated[Path, results_folder("learn")],
) -> None:
    """Compare a draft that learns with one that does not, on the same texts, while the traffic shifts."""
    from adaserve.bench.learn.offline import VARIANTS, run_offline
    from adaserve.bench.learn.online import LearnPlan, run_learn
    from adaserve.bench.learn.texts import HOME, PATTERNS
    from adaserve.config import AdaServeConfig
    from adaserve.server import ServerSpec
    from adaserve.slo.classes import SLOConfig

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
