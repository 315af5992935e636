"""Runs a load test in a Locust process of its own, with a progress bar; and the table of its outcome.

Locust patches the standard library for gevent when it is imported, which must not happen inside a
command that also uses asyncio: hence the separate process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from adaserve.host.cores import usable_cores
from adaserve.host.lifetime import PARENT_ENV
from adaserve.host.ports import free_port
from adaserve.loadgen.config import BenchConfig, secret_headers
from adaserve.loadgen.errors import LoadgenError
from adaserve.loadgen.preflight import preflight
from adaserve.loadgen.results import (
    COMMAND_VARIABLE,
    CONFIG,
    HEADERS_VARIABLE,
    KILLED,
    check_results_dir,
    command_line,
    make_results_dir,
    write_summary,
)
from adaserve.loadgen.schedule import Schedule, build_schedule, plan_figures
from adaserve.slo.run_summary import percent
from adaserve.slo.validity import INTERRUPTED

_FILE = Path(__file__).with_name("locustfile.py")
_LOCUST = (sys.executable, "-m", "adaserve.host.lifetime", "locust", "-f", str(_FILE))
_STOP_S = 60.0  # more than Locust's processes give each other
_START_S = 60.0


def run_bench(
    config: BenchConfig,
    out: Path,
    processes: int = 1,
    console: Console | None = None,
    checked: bool = False,
) -> dict[str, Any]:
    """Runs the load test to the end and returns its summary; everything is written to ``out``.

    Ctrl-C ends the run early: records so far are kept and the summary says that the run is not
    valid. ``checked``: the preflight was done. Raises LoadgenError for bad input, KeyboardInterrupt if
    Ctrl-C came before there was a record."""
    console = console or Console(stderr=True)
    check_results_dir(out)
    if not checked:
        with console.status("asking the server for its model and speed"):
            config = preflight(config)
    schedule = build_schedule(config)
    if processes > (cores := usable_cores()):
        console.print(f"[yellow]{processes} processes share {cores} cores: requests may leave late[/yellow]")
    make_results_dir(out)
    config.save(out / CONFIG)
    code = _run_locust(out, schedule, processes, console, secret_headers(config.server))
    try:
        summary = _summary(out, config, schedule, KILLED if code is not None else INTERRUPTED)
    except OSError as e:
        raise LoadgenError(f"cannot write the results to {out} ({e.strerror}): give another folder") from e
    if summary is None:
        if code is None:
            _leave_nothing(out)
            raise KeyboardInterrupt
        said = _tail((out / "locust.log").read_text(encoding="utf-8", errors="replace"))
        raise LoadgenError(f"the load test ended with code {code} before it sent anything:\n{said}")
    return summary


def _leave_nothing(out: Path) -> None:
    """Removes what a run has written that was interrupted before it sent anything, so that the same command
    may be given again. The folder was empty before."""
    with contextlib.suppress(OSError):
        for path in out.iterdir():
            path.unlink()
        out.rmdir()


def refuse_what_ended_early(summary: Mapping[str, Any]) -> None:
    """What ended early cannot be compared with other runs. Raises KeyboardInterrupt if the user ended it,
    LoadgenError if it was killed."""
    if INTERRUPTED in summary["invalid_reasons"]:
        raise KeyboardInterrupt
    if KILLED in summary["invalid_reasons"]:
        raise LoadgenError(KILLED)


def why_not_loaded() -> str | None:
    """What Locust says if it cannot load the load generator, as ``run_bench`` starts it; None if it
    can."""
    try:
        done = subprocess.run(
            [*_LOCUST, "--list"], capture_output=True, text=True, timeout=_START_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it was not loaded within {_START_S:.0f} s"
    return _tail(done.stdout + done.stderr) if done.returncode else None


def _command(out: Path, processes: int) -> list[str]:
    command = [*_LOCUST, "--headless", "--only-summary", "--skip-log-setup"]
    command += ["--bench-config", str(out / CONFIG), "--results", str(out), "--bench-checked"]
    if processes > 1:
        # Not at Locust's usual port, of which a host has one, and out of other machines' reach.
        port = str(free_port())
        command += ["--processes", str(processes), "--master-bind-host", "127.0.0.1"]
        command += ["--master-bind-port", port, "--master-port", port]
    return command


def _run_locust(
    out: Path, schedule: Schedule, processes: int, console: Console, secrets: Mapping[str, str]
) -> int | None:
    """Its exit code; None when it was interrupted."""
    # Keys travel in the environment, not in the files that stay with the results.
    # Locust ends with this process: else nobody would see what loads the server after a closed terminal.
    environment = {
        **os.environ,
        COMMAND_VARIABLE: command_line(),
        HEADERS_VARIABLE: json.dumps(secrets),
        PARENT_ENV: str(os.getpid()),
    }
    with open(out / "locust.log", "w", encoding="utf-8") as log:
        try:
            with _started(_command(out, processes), log, environment) as process:
                _show_progress(process, out, schedule, console)
                return process.wait()
        except KeyboardInterrupt:
            return None


@contextlib.contextmanager
def _started(command: list[str], log: IO[str], env: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Ends the process group whatever happens; politely first, so that records are written."""
    # Set for SIGINT too: a shell starts background jobs with Ctrl-C ignored, and so would Locust be,
    # which is why it gets SIGTERM.
    in_main = threading.current_thread() is threading.main_thread()
    signals = (signal.SIGINT, signal.SIGTERM) if in_main else ()
    # An interrupt while it is being started would lose it: it is noted, and raised when there is a process.
    noted = list[int]()
    previous = {number: signal.signal(number, lambda number, _: noted.append(number)) for number in signals}
    process = None
    try:
        # A session of its own: Ctrl-C reaches only this process, which then stops Locust in order.
        process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=env, start_new_session=True
        )
        for number in signals:
            signal.signal(number, _interrupt)
        if noted:
            raise KeyboardInterrupt
        yield process
    except KeyboardInterrupt:
        assert process is not None
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(_STOP_S)
        raise
    finally:
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _interrupt(_signum: int, _frame: Any) -> None:
    raise KeyboardInterrupt


def _show_progress(process: subprocess.Popen[bytes], out: Path, schedule: Schedule, console: Console) -> None:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} requests"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    # Elsewhere than on a terminal it would only be an empty line.
    shown = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with shown as progress:
        task = progress.add_task("load test", total=len(schedule), note="starting")
        while process.poll() is None:
            data = _read_progress(out)
            if data is not None:
                progress.update(task, completed=data["finished"], note=_note(data))
            time.sleep(0.2)


def _read_progress(out: Path) -> dict[str, Any] | None:
    try:
        data: dict[str, Any] = json.loads((out / "progress.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data


def _note(data: Mapping[str, Any]) -> str:
    rows = [r for r in data["by_class"] if r["attainment"] is not None and r["name"] != "all"]
    return "  ".join(f"{r['name']} {percent(r['attainment'], 0)}%" for r in rows)


def _summary(out: Path, config: BenchConfig, schedule: Schedule, why_not: str) -> dict[str, Any] | None:
    """The summary that Locust wrote, or one made from the records, of a run that is not valid. None if
    there are none: then a run that was interrupted has sent nothing, whatever it has summed up."""
    path, records = out / "summary.json", out / "requests.jsonl"
    if why_not == INTERRUPTED and not (records.exists() and records.stat().st_size):
        return None
    if path.exists():
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return data
    if not records.exists():
        return None
    return write_summary(out, config.warmup_s, plan_figures(config, schedule), [why_not])


def _tail(log: str) -> str:
    """The last lines of a log, without those that Locust writes about every run."""
    lines = [line for line in log.splitlines() if line.strip() and " INFO " not in line]
    return "\n".join(lines[-5:]) or "it printed nothing"


COLUMNS = (
    "\nreqs",
    "TPOT\nSLO",
    "TPOT\nmean",
    "TPOT\np99",
    "TTFT\np50",
    "met\n%",
    "goodput\ntok/s",
    "accept\nlength",
)


def class_table(summary: Mapping[str, Any]) -> Table:
    """The outcome per class, for a terminal of 80 columns. Times in ms. If it is narrower, names and
    counts of failures take several lines, because every figure stays whole. Columns without figures are left
    out."""
    rows = {escape(name): class_cells(c) for name, c in summary["by_class"].items()}
    last = class_cells(summary)
    shown = [k for k in range(len(COLUMNS)) if any(cells[k] != "-" for cells in (*rows.values(), last))]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("\nclass", overflow="fold", min_width=4)
    for k in shown:
        table.add_column(COLUMNS[k], justify="right", no_wrap=k > 0, overflow="fold", min_width=4)
    for name, cells in rows.items():
        table.add_row(name, *(cells[k] for k in shown))
    table.add_section()
    table.add_row("all", *(last[k] for k in shown), style="bold")
    return table


def _counts(c: Mapping[str, Any]) -> str:
    if not c["failed"]:
        return f"{c['requests']}"
    unsent = f",\n{c['never_sent']} never sent" if c.get("never_sent") else ""
    return f"{c['requests']} ({c['failed']} failed{unsent})"


def class_cells(c: Mapping[str, Any]) -> list[str]:
    """The cells of ``COLUMNS`` for one class of a summary, or for all of it."""

    def show(value: Any, digits: int = 1) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    slo = c["slo_tpot_ms"]
    return [
        _counts(c),
        "mixed" if isinstance(slo, list) else show(slo),
        show(c["mean_tpot_ms"]),
        show(c["p99_tpot_ms"]),
        show(c["median_ttft_ms"], 0),
        "-" if c["slo_attainment"] is None else percent(c["slo_attainment"]),
        show(c["token_goodput"]),
        show(c["accept_length"], 2),
    ]
