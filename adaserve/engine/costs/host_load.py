"""How much of this host's processors other programs use."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

_WORKING = ("user", "nice", "system", "irq", "softirq", "steal")
_ONLINE = Path("/sys/devices/system/cpu/online")

SERVER_EVERY_S = 60.0
"""The server's processes are looked for this often: that reads something of every process of the host, which
takes as long as some tokens where there are many."""


class _State(NamedTuple):
    at_s: float  # by the clock
    worked_s: dict[int, float]  # by each of these cores that is there
    own_s: dict[int, float]  # of those, by each process of this server


class OtherProcesses:
    """How much other programs use the processors that this server may run on."""

    def __init__(self) -> None:
        self._cores = _own_cores()
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
        cores = now.worked_s.keys() & then.worked_s.keys()  # a virtual machine may lose some
        worked_s = sum(now.worked_s[core] - then.worked_s[core] for core in cores)
        own_s = sum(now.own_s[pid] - then.own_s[pid] for pid in now.own_s.keys() & then.own_s.keys())
        all_s = max((now.at_s - then.at_s) * len(cores), 1e-9)
        return min(1.0, max(0.0, (worked_s - own_s) / all_s))

    def _state(self) -> _State:
        worked_s = {core: s for core, s in _worked_s().items() if self._cores is None or core in self._cores}
        return _State(time.perf_counter(), worked_s, _seconds_of(self._server))


def _worked_s() -> dict[int, float]:
    """What each core that is online has worked, by its number."""
    cores = psutil.cpu_times(percpu=True)
    return {
        number: sum(getattr(core, kind, 0.0) for kind in _WORKING)
        for number, core in zip(_numbers(len(cores)), cores, strict=True)
    }


def _numbers(count: int) -> list[int]:
    """Of the cores that psutil tells of: it leaves out those that are offline and numbers none."""
    with suppress(OSError):
        ranges = re.findall(r"(\d+)(?:-(\d+))?", _ONLINE.read_text())
        online = [core for a, b in ranges for core in range(int(a), int(b or a) + 1)]
        if len(online) == count:
            return online
    return list(range(count))


def _own_cores() -> set[int] | None:
    """Those that this process may run on, None = all."""
    process = psutil.Process()
    return set(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else None


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
