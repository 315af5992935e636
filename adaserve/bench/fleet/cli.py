"""The command ``adaserve bench fleet``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from adaserve.bench.options import results_folder
from adaserve.commands import DOES_NOT_COUNT
from adaserve.terminal import say


def bench_fleet(
    *,
    out: Annotated[Path, results_folder("fleet")],
    replicas: Annotated[
        int, typer.Option(min=2, help="Servers to start; they share this machine's cores.")
    ] = 2,
    router: Annotated[str, typer.Option(help="Router: sglang-router or smg.")] = "sglang-router",
    size: Annotated[str, typer.Option(help="Parameters of the embedded target.")] = "100M",
    policy: Annotated[str, typer.Option(help="Policy of the replicas.")] = "priced",
    rps: Annotated[float, typer.Option(min=0.01, help="Requests per second of the load test.")] = 2.0,
    duration: Annotated[float, typer.Option(min=1.0, help="Seconds during which requests arrive.")] = 60.0,
    warmup: Annotated[float, typer.Option(min=0.0, help="First seconds, which are not judged.")] = 10.0,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same schedule.")] = 0,
) -> None:
    """Check what replicas tell a router about themselves: headroom, predicted TPOT, capacity.

    Exit code 4: the run is not valid."""
    from adaserve.bench.fleet.run import FleetPlan, run_fleet_bench, summary_text

    console = Console(stderr=True)
    plan = FleetPlan(out, replicas, router, size, rps, duration, warmup, seed, policy)
    result = run_fleet_bench(plan, console)
    print(summary_text(result, replicas))
    say(console, f"results: {out}")
    if not result["valid"]:
        raise typer.Exit(DOES_NOT_COUNT)
