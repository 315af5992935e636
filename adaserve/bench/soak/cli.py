"""The command ``adaserve bench soak``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from adaserve.bench.options import results_folder
from adaserve.commands import NO
from adaserve.terminal import say


def bench_soak(
    *,
    minutes: Annotated[
        float | None, typer.Option(min=0.1, help="Minutes to run.", show_default="10, without --requests")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many requests instead.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="HTTP processes of the server.")] = 4,
    clients: Annotated[int, typer.Option(min=1, help="Client processes.")] = 3,
    learn: Annotated[
        bool, typer.Option("--learn", help="Let the draft learn from all requests and be swapped meanwhile.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the mix.")] = 0,
    out: Annotated[Path, results_folder("soak")],
) -> None:
    """Send random requests of every kind to a real server, and check invariants while it runs.

    The server has little memory and several HTTP processes. Clients stream, leave, abort, read slowly and
    get killed, while the policy changes. Ctrl-C stops it cleanly. Exit code 3: an invariant was violated."""
    from adaserve.bench.soak.report import held
    from adaserve.bench.soak.run import SoakPlan, run_soak

    console = Console(stderr=True)
    if minutes is None and requests is None:
        minutes = 10.0
    plan = SoakPlan(
        minutes=minutes, requests=requests, workers=workers, clients=clients, learn=learn, seed=seed
    )
    good = held(run_soak(plan, out, console))
    verdict = "all invariants held" if good else "invariants were violated"
    say(console, f"{verdict}: {out}/README.md")
    raise typer.Exit(0 if good else NO)
