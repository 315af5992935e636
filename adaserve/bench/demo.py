"""``adaserve demo``: the same mixed traffic with AdaServe and without it, on one server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from adaserve.bench.servers import running
from adaserve.bench.terminal import table
from adaserve.config import AdaServeConfig
from adaserve.loadgen.arrivals import Arrivals
from adaserve.loadgen.bench import run_bench
from adaserve.loadgen.config import BenchConfig, Endpoint, default_classes
from adaserve.loadgen.results import new_results_dir
from adaserve.scheduler.latency import LatencyModel
from adaserve.server import ServerProcess, ServerSpec

PLAIN = "none"
UTILIZATION = 0.55
"""Share of the time that plain decoding, four requests at once, would be busy with the traffic."""


def run_demo(
    seconds: float, policy: str, rps: float | None, size: str, out: Path | None, console: Console
) -> dict[str, Any]:
    """Runs everything, prints the table, writes ``out``. Raises ServerError, LoadgenError."""
    folder = out or new_results_dir(Path("results"), "demo")
    folder.mkdir(parents=True, exist_ok=True)
    spec = ServerSpec(size=size, config=AdaServeConfig(policy=policy))
    _introduce(console, seconds, policy)
    with running(spec, folder / "server.log", console) as server:
        config = _traffic(server, seconds, rps)
        console.print(
            f"baseline {config.baseline_ms:.1f} ms per token; "
            f"{config.arrivals.rps:.2f} requests/s for {seconds:.0f} s"
        )
        summaries = {}
        for name in (policy, PLAIN):
            server.set_policy(name)
            server.drain()
            console.print(f"\n[bold]policy {name}[/]")
            summaries[name] = run_bench(config, folder / name, console=console)
            if "the run was interrupted" in summaries[name]["invalid_reasons"]:
                raise KeyboardInterrupt
    _show(summaries, folder)
    console.print(
        f"requests, summaries and figures: {folder}  (adaserve report {folder}/{policy} {folder}/{PLAIN})"
    )
    return summaries


def _introduce(console: Console, seconds: float, policy: str) -> None:
    console.print(
        f"[bold]AdaServe demo[/]: three classes of requests ask one SGLang server for three speeds.\n"
        f"The same {seconds:.0f} s of traffic runs with policy {policy} and with {PLAIN} (plain decoding); "
        f"about {2 * seconds / 60 + 1.5:.0f} minutes in all."
    )


def _traffic(server: ServerProcess, seconds: float, rps: float | None) -> BenchConfig:
    """Coding, chat and summarization requests on held-out text, as fast as this host can bear."""
    state = server.report()
    classes = default_classes()
    if rps is None:
        rps = _bearable_rps(LatencyModel.from_json(state["latency"]), classes)
    return BenchConfig(
        server=Endpoint(url=server.url, api="generate", ignore_eos=True, slo_headers="class"),
        classes={n: replace(c, temperature=0.7 if n == "chat" else 0.0) for n, c in classes.items()},
        arrivals=Arrivals(rps=rps),
        duration_s=seconds,
        baseline_ms=state["baseline_ms"],
    )


def _bearable_rps(latency: LatencyModel, classes: dict[str, Any]) -> float:
    """Requests/s that keep plain decoding busy for UTILIZATION of the time."""
    total = sum(c.share for c in classes.values())
    prompt = sum(c.share * c.prompt_tokens.median for c in classes.values()) / total
    output = sum(c.share * c.output_tokens.median for c in classes.values()) / total
    batch = 4
    per_token_s = (latency.verify_s(64.0) - latency.verify_s(32.0)) / 32
    decode_s = (latency.verify_s(float(batch), 256.0 * batch) + latency.overhead_s) / batch
    return UTILIZATION / (prompt * per_token_s + output * decode_s)


def _show(summaries: dict[str, dict[str, Any]], folder: Path) -> None:
    title = "who got the speed they asked for (TPOT in ms)"
    heads = ("class", "policy", "reqs", "SLO", "mean", "p99", "attained", "goodput/s", "tok/iter")
    made = table(title, heads, left=heads[:2])
    names = [*next(iter(summaries.values()))["by_class"], "all"]
    for name in names:
        for policy, summary in summaries.items():
            made.add_row(*_row(name, policy, summary if name == "all" else summary["by_class"][name]))
        made.add_section()
    console = Console()
    console.print(made)
    with open(folder / "table.txt", "w", encoding="utf-8") as file:
        Console(file=file, width=110).print(made)


def _row(name: str, policy: str, c: dict[str, Any]) -> list[str]:
    def show(value: Any, digits: int = 1) -> str:
        return f"{value:.{digits}f}" if isinstance(value, int | float) else "-"

    attained = c["slo_attainment"]
    return [
        name,
        policy,
        str(c.get("requests", "-")),
        show(c.get("slo_tpot_ms")),
        show(c["mean_tpot_ms"]),
        show(c["p99_tpot_ms"]),
        "-" if attained is None else f"{attained:.0%}",
        show(c["token_goodput"]),
        show(c["accept_length"], 2),
    ]
