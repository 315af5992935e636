"""``adaserve profile``: a long measurement of this host, in the process that serves."""

from __future__ import annotations

import json
import tempfile
import threading
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from adaserve.bench.report import progress, start_server
from adaserve.engine.measure import PROFILE_ENV, profile_steps
from adaserve.scheduler.fit import fit_latency
from adaserve.scheduler.latency import load_profile
from adaserve.server import ServerSpec


def run_profile(spec: ServerSpec, out: Path | None, console: Console) -> None:
    """Starts a server that measures itself, saves the profile and shows fits. Raises ServerError."""
    with tempfile.TemporaryDirectory() as folder:
        ticks, log = Path(folder) / "ticks", Path(folder) / "server.log"
        ticks.touch()
        env = {
            PROFILE_ENV: json.dumps({"ticks": str(ticks), "out": None if out is None else str(out.resolve())})
        }
        stop = threading.Event()
        watcher = threading.Thread(target=_watch, args=(ticks, stop, console), daemon=True)
        watcher.start()
        try:
            with start_server(spec, log, Console(quiet=True), env) as server:
                path = Path(server.report()["profile"])
        finally:
            stop.set()
            watcher.join()
    _show(path, console)


def _watch(ticks: Path, stop: threading.Event, console: Console) -> None:
    """Shows one step per line that the server has written."""
    with progress(console) as bar:
        task = bar.add_task("starting the server", total=profile_steps())
        while not stop.wait(0.3):
            lines = ticks.read_text().splitlines()
            if lines:
                bar.update(task, completed=len(lines), description=lines[-1])


def _show(path: Path, console: Console) -> None:
    fit = fit_latency(load_profile(path))
    table = Table(box=SIMPLE_HEAD, title="relative error of the fitted latency models")
    for name in ("phase", "form", "mean", "worst", "held out"):
        table.add_column(name)
    for phase, forms in fit.errors.items():
        for form, error in forms.items():
            mark = " *" if fit.chosen[phase] == form else ""
            table.add_row(
                phase, form + mark, f"{error.mean:.1%}", f"{error.worst:.1%}", f"{error.held_out:.1%}"
            )
    Console().print(table)
    model = fit.model
    console.print(
        f"one token {model.verify_s(1.0, 256) * 1e3:.1f} ms, budget B {model.knee_tokens()} tokens (knee)"
    )
    console.print(f"written to {path}")
