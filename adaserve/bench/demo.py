"""``adaserve demo``: the same mixed traffic with AdaServe and without it, on one server."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from adaserve.bench.display import table
from adaserve.bench.host_contention import BUSY
from adaserve.bench.interleaved import TURN_S, Interleaved
from adaserve.bench.repetition import OF_CLASS, repetitive
from adaserve.bench.start_server import running_server
from adaserve.config import AdaServeConfig, ConfigError
from adaserve.host.cores import usable_cores
from adaserve.loadgen.arrivals import Arrivals
from adaserve.loadgen.bench import COLUMNS, class_cells
from adaserve.loadgen.config import BenchConfig, Endpoint, TraceSpec, default_classes
from adaserve.loadgen.report import write_report
from adaserve.loadgen.run_folder import read_run
from adaserve.loadgen.schedule import build_schedule
from adaserve.scheduler.costs.latency import LatencyModel
from adaserve.scheduler.interface import Context
from adaserve.server import ServerProcess, ServerSpec
from adaserve.slo.trace import TraceRow, write_jsonl
from adaserve.terminal import say

PLAIN = "none"
TURN_OVERHEAD_S = 5.0  # a first guess: the load generator's start, and the last answers
TEMPERATURE = 0.8
"""For all classes, as in sweeps: a small model's greedy output repeats itself, which drafts guess easily."""
UTILIZATION = 0.55
"""Share of the time that plain decoding, four requests at once, would be busy with the traffic."""


def run_demo(
    seconds: float,
    policy: str,
    rps: float | None,
    size: str,
    folder: Path,
    console: Console,
    *,
    repetition: bool,
) -> None:
    """Runs everything, prints the table, writes ``folder``. Raises ServerError, LoadgenError.

    ``repetition``: prompts whose answers repeat what the text says, and drafts from that text as well.
    """
    if policy == PLAIN:
        raise ConfigError(f"{PLAIN} is what a policy is compared with: choose another --policy")
    if rps is not None:
        build_schedule(_config("http://127.0.0.1", seconds, rps, baseline_ms=30.0))  # refused now
    drafts = "model,suffix" if repetition else "model"
    spec = ServerSpec(size=size, config=AdaServeConfig(policy=policy, drafts=drafts))
    _introduce(console, seconds, policy)
    with running_server(spec, folder / "server.log", console) as server:
        config = _traffic(server, seconds, rps)
        if repetition:
            config = _repetitive(config, folder / "repetition.jsonl")
        say(
            console,
            f"baseline {config.baseline_ms:.1f} ms per token; {config.arrivals.rps:.2f} requests/s\n"
            f"watch it live: {server.url}/slo",
        )
        settings = {name: partial(server.set_policy, name) for name in dict.fromkeys((policy, PLAIN))}
        turns = Interleaved(server, settings, config, folder)
        summaries = turns.play(console)
    page = write_report([read_run(folder / name) for name in summaries], folder, png=False)
    _show(summaries, folder)
    say(console, f"requests and summaries: {folder}\nreport: {page}")


def _introduce(console: Console, seconds: float, policy: str) -> None:
    minutes = (2 * seconds + TURN_OVERHEAD_S * 2 * seconds / TURN_S) / 60 + 1
    console.print(
        f"[bold]AdaServe demo[/]: three classes of requests ask one SGLang server for three speeds.\n"
        f"The same {seconds:.0f} s of traffic runs with policy {policy} and with {PLAIN} (plain decoding),\n"
        f"in turns of about {TURN_S:.0f} s, so that other load on this machine disturbs both alike; "
        f"about {minutes:.0f} min in all."
    )


def _traffic(server: ServerProcess, seconds: float, rps: float | None) -> BenchConfig:
    """Coding, chat and summarization requests on held-out text, at a rate that this host can serve."""
    state = server.report()
    if rps is None:
        rps = _bearable_rps(LatencyModel.from_json(state["latency"]), default_classes())
    return _config(server.url, seconds, rps, state["baseline_ms"])


def _config(url: str, seconds: float, rps: float, baseline_ms: float) -> BenchConfig:
    return BenchConfig(
        server=Endpoint(url=url, api="generate", ignore_eos=True, slo_headers="class"),
        classes={n: c.changed(temperature=TEMPERATURE) for n, c in default_classes().items()},
        arrivals=Arrivals(rps=rps),
        duration_s=seconds,
        baseline_ms=baseline_ms,
    )


def _repetitive(config: BenchConfig, path: Path) -> BenchConfig:
    """The same arrivals and lengths of answers, greedy, with repetitive prompts; writes them to ``path``."""
    greedy = {name: load.changed(temperature=0.0) for name, load in config.classes.items()}
    planned = build_schedule(config).requests
    prompts = {name: iter(repetitive((kind,), len(planned))) for name, kind in OF_CLASS.items()}
    rows = [
        TraceRow(
            r.at_s, r.prompt_tokens, r.max_tokens, r.slo_class, text=str(next(prompts[r.slo_class]).prompt)
        )
        for r in planned
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(rows, path)
    return config.changed(classes=greedy, trace=TraceSpec(path=str(path), format="jsonl"))


def _bearable_rps(latency: LatencyModel, classes: dict[str, Any]) -> float:
    """Requests/s that keep plain decoding busy for UTILIZATION of the time."""
    total = sum(c.share for c in classes.values())
    prompt = sum(c.share * c.prompt_tokens.median for c in classes.values()) / total
    output = sum(c.share * c.output_tokens.median for c in classes.values()) / total
    batch = 4
    per_token_s = (latency.verify_s(64.0) - latency.verify_s(32.0)) / 32
    decode_s = (latency.verify_s(float(batch), Context(256.0 * batch, batch)) + latency.overhead_s) / batch
    return UTILIZATION / (prompt * per_token_s + output * decode_s)


def _show(summaries: dict[str, dict[str, Any]], folder: Path) -> None:
    title = "requests that got the speed they asked for (times in ms)"
    made = table(title, ("\nclass", "\npolicy", *COLUMNS), left=("\nclass", "\npolicy"))
    for name in [*next(iter(summaries.values()))["by_class"], "all"]:
        for policy, summary in summaries.items():
            made.add_row(name, policy, *class_cells(summary if name == "all" else summary["by_class"][name]))
        made.add_section()
    made.caption = _caption(summaries)
    with open(folder / "table.txt", "w", encoding="utf-8") as file:
        Console(file=file, width=110).print(made)
    Console().print(made)


def _caption(summaries: dict[str, dict[str, Any]]) -> str:
    """How it was compared, and what else ran on this machine."""
    shares = {name: summary["other_programs"] for name, summary in summaries.items()}
    told = " and ".join(f"{share:.0%} with {name}" for name, share in shares.items())
    busy = "This host was busy: other" if max(shares.values()) > BUSY else "Other"
    turns = next(iter(summaries.values()))["turns"]
    return (
        f"{turns} turn{'s' if turns > 1 else ''} each; the policy changes when all requests of a turn are "
        "answered. "
        f"{busy} programs used {told} of the {usable_cores()} cores that it may use."
    )
