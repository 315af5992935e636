"""When a server's processes may be forks of its first one."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator

import pytest

from adaserve.host import FORK_ENV
from adaserve.patches.fork_children import _forking


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
