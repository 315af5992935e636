"""When a server's processes may be forks of its first one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from adaserve.host.device import FORK_ENV
from adaserve.patches.start.fork_children import _forking, _launch


@pytest.fixture
def spawning(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a server: SGLang has every process spawned."""
    monkeypatch.setenv(FORK_ENV, "1")
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(None, force=True)


@pytest.mark.usefixtures("spawning")
def test_a_process_with_threads_is_not_forked() -> None:
    """One of them could hold a lock, which nobody would release in the fork."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert _forking(multiprocessing.get_start_method) == "spawn"
    finally:
        end.set()
        thread.join()


def test_what_is_started_ignores_an_interruption() -> None:
    """A terminal sends it to all processes; the first one ends the others."""
    before = signal.getsignal(signal.SIGINT)
    assert _launch(lambda: signal.getsignal(signal.SIGINT)) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is before


FORKING = """
import multiprocessing
from multiprocessing import resource_tracker

from tqdm import tqdm

from adaserve.patches.start.fork_children import _forking


def load():
    for _ in tqdm(range(3)):
        pass
    raise SystemExit(resource_tracker._resource_tracker._pid is not None)


multiprocessing.set_start_method("spawn")
process = multiprocessing.Process(target=load)
_forking(process.start)
process.join()
print(process.exitcode)
"""


def test_progress_bars_of_forks_need_nothing_in_shared_memory(tmp_path: Path) -> None:
    """A semaphore there stays when a server is killed with the process that looks after it."""
    (tmp_path / "forking.py").write_text(FORKING)
    done = subprocess.run(
        [sys.executable, "forking.py"],
        cwd=tmp_path, env={**os.environ, FORK_ENV: "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout == "0\n", done.stderr
