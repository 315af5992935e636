"""How much of this server's processors other programs use."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import NamedTuple

import psutil

from adaserve.host.cpu_times import CpuTimes, Look

SERVER_EVERY_S = 60.0
"""The server's processes are looked for this often: that reads something of every process of the host, which
takes as long as some tokens where there are many."""


class _State(NamedTuple):
    all: Look
    own_s: dict[int, float]  # by each process of this server


class OtherProcesses:
    """How much other programs use of the processors that this server may use."""

    def __init__(self) -> None:
        self._processors = CpuTimes()
        self._server, self._found_s = _server(), time.perf_counter()
        self._last = self._state()

    def share(self) -> float:
        """0 to 1, since the last call or the beginning; 0 where the host does not tell."""
        try:
            return self._since_last()
        except (psutil.Error, OSError):  # nobody's server ends because its load is not known
            return 0.0

    def _since_last(self) -> float:
        if time.perf_counter() > self._found_s + SERVER_EVERY_S:
            self._server, self._found_s = _server(), time.perf_counter()
        then, self._last = self._last, self._state()
        now = self._last
        own_s = sum(now.own_s[pid] - then.own_s[pid] for pid in now.own_s.keys() & then.own_s.keys())
        taken = self._processors.taken(then.all, now.all, own_s)
        return taken.others_s / max(taken.allowed_s, 1e-9)

    def _state(self) -> _State:
        return _State(self._processors.look(), _seconds_of(self._server))


def _server() -> list[psutil.Process]:
    """The process that started this one, and all that it has started: the server as a whole."""
    root = psutil.Process().parent() or psutil.Process()
    return [root, *root.children(recursive=True)]


def _seconds_of(processes: list[psutil.Process]) -> dict[int, float]:
    """By process id, of those that have not ended."""
    seconds = {}
    for process in processes:
        with suppress(psutil.Error):
            times = process.cpu_times()
            seconds[process.pid] = float(times.user + times.system)
    return seconds
