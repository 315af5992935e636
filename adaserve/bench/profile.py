"""``adaserve profile``: a long measurement of this host, in the process that serves."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from pathlib import Path

from rich.console import Console

from adaserve.bench.display import progress
from adaserve.bench.fit import show_fit
from adaserve.bench.start_server import running_server
from adaserve.engine.costs.cost_cache import PROFILE_ENV
from adaserve.engine.costs.measure import profile_steps
from adaserve.server import ServerError, ServerSpec
from adaserve.terminal import say


def run_profile(spec: ServerSpec, out: Path | None, console: Console) -> None:
    """Starts a server that measures itself, saves the profile and shows fits. Raises ServerError, whose text
    names the server's log: that stays, and nothing else does."""
    folder = Path(tempfile.mkdtemp(prefix="adaserve-profile-"))
    ticks = folder / "ticks"
    ticks.touch()
    env = {PROFILE_ENV: json.dumps({"ticks": str(ticks), "out": None if out is None else str(out.resolve())})}
    stop = threading.Event()
    watcher = threading.Thread(target=_watch, args=(ticks, stop, console), daemon=True)
    watcher.start()
    failed = False
    try:
        with running_server(spec, folder / "server.log", env=env) as server:
            path = Path(server.report()["profile"])
    except ServerError:
        failed = True
        raise
    finally:
        stop.set()
        watcher.join()
        if not failed:
            shutil.rmtree(folder)
    show_fit(path)
    say(console, f"written to {path}")


def _watch(ticks: Path, stop: threading.Event, console: Console) -> None:
    """Shows one step per line that the server has written."""
    with progress(console) as bar:
        task = bar.add_task("starting the server", total=profile_steps())
        while not stop.wait(0.3):
            lines = ticks.read_text().splitlines()
            if lines:
                bar.update(task, completed=len(lines), description=lines[-1])
