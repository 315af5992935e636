"""When a server's processes may be forks of its first one."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Iterator

import pytest

from adaserve.host import FORK_ENV
from adaserve.patches.fork_children import _forking, _launch


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
