"""How many cores and how much memory this process may use, and how torch's threads wait: the one place that
decides it."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil

_SPINS = "2000"
"""About a tenth of a millisecond. Operators that follow one another still find the other threads awake."""
_SIBLINGS = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def usable_cores(root: Path = Path("/")) -> int:
    """Physical cores that this process may run on, no more than its cgroups let it keep busy; at least 1.

    Follows the CPU affinity (``taskset``, cpusets) and the CPU bandwidth of cgroups v1 and v2, as containers
    set it. Only whole cores count: a thread that outruns the quota stands still for the rest of each period,
    and its team with it. ``root`` is where ``/proc`` and ``/sys`` are found.
    """
    cores, quota = _cores_of_affinity(root), least_quota(root)
    return cores if quota is None else max(1, min(cores, int(quota.processors)))


class Quota(NamedTuple):
    """CPU bandwidth of a cgroup, with what counts the use of it."""

    processors: float  # that all processes of the group together may keep busy
    folder: Path

    def used_s(self) -> float | None:
        """Seconds of a processor that the group has used; None where cgroups v1 count that elsewhere."""
        in_us = dict(line.split() for line in _read(self.folder / "cpu.stat").splitlines()).get("usage_usec")
        in_ns = _read(self.folder / "cpuacct.usage").strip()
        return int(in_us) / 1e6 if in_us else int(in_ns) / 1e9 if in_ns else None


def least_quota(root: Path = Path("/")) -> Quota | None:
    """The tightest of this process's cgroups and those above them; None where none has a limit."""
    quotas = ((_quota_v2(folder) if v2 else _quota_v1(folder), folder) for folder, v2 in _groups("cpu", root))
    return min((Quota(limit, folder) for limit, folder in quotas if limit is not None), default=None)


def usable_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that this host has, no more than its cgroups let this process have: beyond that the
    kernel ends a server, however much is free."""
    files = (
        folder / ("memory.max" if v2 else "memory.limit_in_bytes") for folder, v2 in _groups("memory", root)
    )
    limits = [int(text) for text in map(str.strip, map(_read, files)) if text.isdigit()]
    return min([psutil.virtual_memory().total, *limits])


def short_spins(environ: MutableMapping[str, str]) -> None:
    """Lets torch's threads give up their cores soon after an operator, unless ``environ`` says how they wait.

    The threads of GNU's OpenMP spin for milliseconds when they have nothing to do. For as long as that lasts
    a thread of our kernels finds its core taken, and so do other processes. Must be called before torch is
    imported; processes started with ``environ`` have it too.
    """
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", _SPINS)


def _cores_of_affinity(root: Path) -> int:
    if not hasattr(os, "sched_getaffinity"):  # macOS, Windows
        return psutil.cpu_count(logical=False) or os.cpu_count() or 1
    # Two hardware threads of a core have the same list of siblings.
    return len({_read(root / _SIBLINGS.format(cpu)) or str(cpu) for cpu in os.sched_getaffinity(0)})


def _groups(controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """Folders of this process's cgroups and of those above them, and whether they are of v2."""
    mounts = [line.split() for line in _read(root / "proc/self/mounts").splitlines()]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for _, point, kind, *_ in mounts:
            v2 = kind == "cgroup2" and not controllers
            v1 = kind == "cgroup" and controller in controllers.split(",")
            if not (v1 or v2):
                continue
            own = PurePosixPath(path.lstrip("/"))
            # Inside a container the path may be the host's, of which only the root is mounted.
            for group in (own, *own.parents):
                yield root / point.lstrip("/") / group, v2


def _quota_v2(folder: Path) -> float | None:
    """Processors that a cgroup may keep busy; None where it has no limit."""
    quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
    return int(quota) / int(period) if period and quota != "max" else None


def _quota_v1(folder: Path) -> float | None:
    quota, period = _read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()
    return int(quota) / int(period) if quota and period and int(quota) > 0 else None


def _read(path: Path) -> str:
    """Empty where there is no such file, as on other kernels and below foreign cgroups."""
    try:
        return path.read_text()
    except OSError:
        return ""
