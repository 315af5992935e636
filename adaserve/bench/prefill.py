"""Prefills by slack against prefills first: TPOT and TTFT of the same traffic, in turns on one server.

python -m adaserve.bench.prefill --rate 1.5 --seconds 30 --rounds 2
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from adaserve.bench.client import Ask, send
from adaserve.bench.servers import running
from adaserve.bench.terminal import progress, table
from adaserve.config import PREFILLS, AdaServeConfig
from adaserve.loadgen.results import provenance
from adaserve.pair.prompts import load_prompts
from adaserve.server import ServerProcess, ServerSpec

MIX = {"coding": 0.6, "chat": 0.2, "summarization": 0.2}
Reports = list[dict[str, Any]]
"""What the server said about the SLO of each request."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests per second, seconds of arrivals and mean output tokens."""

    rate: float
    seconds: float
    tokens: int

    def replay(self, url: str, seed: int) -> Reports:
        """Sends Poisson arrivals of held-out prompts."""
        rng = random.Random(seed)
        prompts = {name: [p.text for p in load_prompts() if p.category == name] for name in MIX}
        asks, times = [], []
        at_s = rng.expovariate(self.rate)
        while at_s < self.seconds:
            name = rng.choices(list(MIX), list(MIX.values()))[0]
            length = rng.randint(self.tokens // 2, self.tokens * 3 // 2)
            asks.append(Ask(rng.choice(prompts[name]), length, 0.7, slo_class=name))
            times.append(at_s)
            at_s += rng.expovariate(self.rate)
        return [reply.meta["slo"] for reply in send(url, asks, at_s=times)]


def measure(
    server: ServerProcess, traffic: Traffic, rounds: int, seed: int, bar: Progress
) -> dict[str, Reports]:
    """Both modes in every round, each round in the other order."""
    task = bar.add_task("measuring", total=rounds * len(PREFILLS))
    reports: dict[str, Reports] = {mode: [] for mode in PREFILLS}
    Traffic(4.0, 4.0, 32).replay(server.url, 99)  # warms up both models and the estimates
    for turn in range(rounds):
        for mode in PREFILLS if turn % 2 else PREFILLS[::-1]:
            server.set_prefill(mode)
            server.drain()
            reports[mode] += traffic.replay(server.url, seed + turn)
            bar.advance(task)
    return reports


def figures(reports: Reports) -> dict[str, float]:
    """Figures of one set of requests."""
    ttft = sorted(r["ttft_ms"] for r in reports)
    return {
        "requests": len(reports),
        "attained": sum(r["met"] for r in reports) / len(reports),
        "tpot_mean_ms": statistics.mean(r["tpot_ms"] for r in reports),
        "ttft_p50_ms": ttft[len(ttft) // 2],
        "ttft_p95_ms": ttft[int(0.95 * (len(ttft) - 1))],
    }


def main(
    policy: str = "adaserve",
    rate: Annotated[float, typer.Option(help="requests per second")] = 1.5,
    seconds: Annotated[float, typer.Option(help="of arrivals, per round and mode")] = 30.0,
    tokens: Annotated[int, typer.Option(help="mean output length")] = 64,
    rounds: int = 2,
    seed: int = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file for the figures")] = None,
) -> None:
    """Prints TPOT and TTFT by class and mode of prefilling."""
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        spec = ServerSpec(config=AdaServeConfig(policy=policy))
        with running(spec, Path(folder) / "server.log", console) as server, progress(console) as bar:
            reports = measure(server, Traffic(rate, seconds, tokens), rounds, seed, bar)
    heads = ("class", "prefills", "requests", "attained", "TPOT mean", "TTFT p50", "TTFT p95")
    made, found = table("prefills by slack, and as SGLang does", heads, left=heads[:2]), {}
    for name in (*MIX, "all"):
        for mode, every in reports.items():
            if chosen := [r for r in every if name in ("all", r["class"])]:
                found[f"{name}/{mode}"] = f = figures(chosen)
                times = (f"{f[k]:.1f}" for k in ("tpot_mean_ms", "ttft_p50_ms", "ttft_p95_ms"))
                made.add_row(name, mode, str(f["requests"]), f"{f['attained']:.0%}", *times)
    console.print(made)
    if out:
        out.write_text(json.dumps({"made": provenance(), "figures": found}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
