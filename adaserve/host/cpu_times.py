"""How busy the processors are that this process may use, and how much of that is due to other processes."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from adaserve.host.cores import least_quota

_WORKING = ("user", "nice", "system", "irq", "softirq", "steal")
"""A guest's time is among its host's user time already."""
_ONLINE = Path("/sys/devices/system/cpu/online")


class Look(NamedTuple):
    """Seconds since some time in the past."""

    at_s: float  # by the clock
    worked_s: dict[int, float]  # by each of our processors that is online, for anybody
    group_s: float | None  # by all processes of the cgroup that has the least quota


class Taken(NamedTuple):
    """Between two looks, in seconds of a processor."""

    others_s: float  # 0 to allowed_s
    allowed_s: float


class CpuTimes:
    """Those that this process may run on, of which cgroups may let it keep fewer busy (cores.py)."""

    def __init__(self) -> None:
        self._own = _own_processors()
        self._quota = least_quota()

    def look(self) -> Look:
        """Raises OSError and psutil.Error where the host does not tell."""
        worked_s = {cpu: s for cpu, s in _worked_s().items() if self._own is None or cpu in self._own}
        return Look(time.perf_counter(), worked_s, None if self._quota is None else self._quota.used_s())

    def taken(self, then: Look, now: Look, own_s: float) -> Taken:
        """How much others took from this process, which with its relatives worked for ``own_s`` meanwhile.

        With a quota of 2 on a host of 64 others may keep 62 busy before we feel it, unless they share the
        quota: then we feel all of it.
        """
        both = now.worked_s.keys() & then.worked_s.keys()  # a virtual machine may lose some
        there_s = allowed_s = (now.at_s - then.at_s) * len(both)
        if self._quota is not None:
            allowed_s = min(there_s, (now.at_s - then.at_s) * self._quota.processors)
        worked_s = sum(now.worked_s[cpu] - then.worked_s[cpu] for cpu in both)
        others_s = worked_s - own_s - (there_s - allowed_s)
        if now.group_s is not None and then.group_s is not None:
            others_s = max(others_s, now.group_s - then.group_s - own_s)
        return Taken(min(max(0.0, others_s), allowed_s), allowed_s)


def _worked_s() -> dict[int, float]:
    """What each processor that is online has worked, by its number."""
    cpus = psutil.cpu_times(percpu=True)
    return {
        number: sum(getattr(cpu, kind, 0.0) for kind in _WORKING)
        for number, cpu in zip(_numbers(len(cpus)), cpus, strict=True)
    }


def _numbers(count: int) -> list[int]:
    """Of the processors that psutil tells of: it leaves out those that are offline and numbers none."""
    with suppress(OSError):
        ranges = re.findall(r"(\d+)(?:-(\d+))?", _ONLINE.read_text())
        online = [cpu for a, b in ranges for cpu in range(int(a), int(b or a) + 1)]
        if len(online) == count:
            return online
    return list(range(count))


def _own_processors() -> set[int] | None:
    """Those that this process may run on, None = all."""
    process = psutil.Process()
    return set(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else None
