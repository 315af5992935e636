"""How much of this host's processors other programs use."""

from __future__ import annotations

import time

import psutil

_WORKING = ("user", "nice", "system", "irq", "softirq", "steal")


class OtherProcesses:
    """How much other programs use the processors that this server may run on."""

    def __init__(self) -> None:
        self._cores = _own_cores()
        self._last = self._state()

    def share(self) -> float:
        """0 to 1, since the last call or the beginning."""
        before, self._last = self._last, self._state()
        at_s, all_s, own_s = (now - then for now, then in zip(self._last, before, strict=True))
        return min(1.0, max(0.0, (all_s - own_s) / max(at_s * len(self._cores), 1e-9)))

    def _state(self) -> tuple[float, float, float]:
        """Clock, seconds that these cores have worked, and those of them for this server."""
        cores = psutil.cpu_times(percpu=True)
        worked = sum(getattr(cores[i], kind, 0.0) for i in self._cores for kind in _WORKING)
        return time.perf_counter(), worked, sum(map(_seconds_of, _server()))


def _own_cores() -> list[int]:
    process, count = psutil.Process(), len(psutil.cpu_times(percpu=True))
    allowed = process.cpu_affinity() if hasattr(process, "cpu_affinity") else range(count)
    return [core for core in allowed if core < count]


def _server() -> list[psutil.Process]:
    """The process that started this one, and all that it has started: the server as a whole."""
    root = psutil.Process().parent() or psutil.Process()
    return [root, *root.children(recursive=True)]


def _seconds_of(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:  # ended meanwhile
        return 0.0
    return float(times.user + times.system)
