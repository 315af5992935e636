"""Running ``adaserve bench latency`` and showing what came out."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from adaserve.bench import latency as bench_latency
from adaserve.bench.latency import LatencyPlan
from adaserve.loadgen.results import new_results_dir
from adaserve.server import Server, ServerSpec


def run_latency(
    spec: ServerSpec,
    policies: str,
    batches: str,
    temperatures: str,
    rounds: int,
    tokens: int,
    out: Path | None,
    console: Console,
) -> None:
    """Starts a server, measures, prints a table, writes JSON. Raises ServerError, ValueError."""
    plan = LatencyPlan(
        policies=tuple(p for p in policies.split(",") if p and p != bench_latency.BASE),
        batches=tuple(int(b) for b in batches.split(",")),
        temperatures=tuple(float(t) for t in temperatures.split(",")),
        rounds=rounds,
        tokens=tokens,
    )
    path = out or new_results_dir(Path("results"), "latency") / "latency.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with start_server(spec, path.with_name("server.log"), console) as server, progress(console) as bar:
        task = bar.add_task("measuring", total=plan.steps)
        samples = bench_latency.run(server, plan, lambda what: bar.update(task, advance=1, description=what))
        state = server.report()
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    bench_latency.save(path, samples, plan, state, command)
    Console().print(_table(bench_latency.summarize(samples, plan)))
    console.print(f"written to {path}")


def start_server(
    spec: ServerSpec, log: Path, console: Console, env: dict[str, str] | None = None
) -> _Starting:
    """A ``Server`` that shows that it is starting."""
    return _Starting(spec, log, console, env or {})


class _Starting:
    def __init__(self, spec: ServerSpec, log: Path, console: Console, env: dict[str, str]) -> None:
        self._console = console
        self._status = console.status("starting the server")
        self._server = Server(spec, log, env, self._waiting)

    def _waiting(self, seconds: float) -> None:
        self._status.update(f"starting the server ({seconds:.0f} s)")

    def __enter__(self) -> Server:
        with self._status:
            return self._server.__enter__()

    def __exit__(self, *details: object) -> None:
        with self._console.status("stopping the server"):
            self._server.__exit__(*details)


def progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title="decode latency, interleaved with plain decoding"
    )
    heads = (
        "T",
        "batch",
        "policy",
        "TPOT ms",
        "speed-up",
        "(range)",
        "tok/iter",
        "worker",
        "other",
        "distinct",
    )
    for head in heads:
        table.add_column(head, justify="left" if head == "policy" else "right", no_wrap=True)
    for r in rows:
        low, high = r["speedup_range"]
        table.add_row(
            f"{r['temperature']:g}",
            str(r["batch"]),
            r["policy"],
            f"{r['tpot_ms']:.2f}",
            f"{r['speedup']:.2f}x",
            f"{low:.2f}-{high:.2f}",
            f"{r['accept_length']:.2f}",
            f"{r['python_share']:.0%}",
            f"{r['other_share']:.0%}",
            f"{r['distinct_8grams']:.0%}",
        )
    table.caption = (
        "worker: share of AdaServe's iteration outside both models; other: of the time from one "
        "iteration to the next, SGLang's own work included; distinct: 8-grams of the output that occur once"
    )
    return table
