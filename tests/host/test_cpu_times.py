"""What others take of the processors that a process may use."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from adaserve.host import cpu_times
from adaserve.host.cores import Quota, least_quota
from adaserve.host.cpu_times import CpuTimes, Look, Taken

V2 = "cgroup /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n"
V1 = "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\n"


@pytest.mark.parametrize(
    ("quota", "anybody_s", "own_s", "group_s", "taken_s"),
    [
        (None, 15.0, 5.0, None, 10.0),
        (None, 15.0, 16.0, None, 0.0),
        (2.0, 35.0, 5.0, None, 0.0),  # others have 60 s of 80 to themselves
        (2.0, 70.0, 5.0, None, 5.0),
        (2.0, 80.0, 0.0, None, 20.0),
        (2.0, 35.0, 5.0, 12.0, 7.0),  # but those that share the quota
        (2.0, 70.0, 5.0, 6.0, 5.0),
        (9.0, 15.0, 5.0, 6.0, 10.0),  # more than there is
    ],
)
def test_a_quota_is_felt_by_those_who_share_it(
    quota: float | None,
    anybody_s: float,
    own_s: float,
    group_s: float | None,
    taken_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of eight processors, in ten seconds."""
    monkeypatch.setattr(cpu_times, "least_quota", lambda: quota and Quota(quota, Path()))
    then = Look(100.0, dict.fromkeys(range(8), 50.0), group_s and 70.0)
    now = Look(110.0, dict.fromkeys(range(8), 50.0 + anybody_s / 8), group_s and 70.0 + group_s)
    assert CpuTimes().taken(then, now, own_s) == Taken(taken_s, 10.0 * min(8.0, quota or 8.0))


@pytest.mark.parametrize(
    ("mounts", "files"),
    [
        (V2, {"cpu.max": "200000 100000", "cpu.stat": "usage_usec 4500000\nuser_usec 1"}),
        (V1, {"cpu.cfs_quota_us": "200000", "cpu.cfs_period_us": "100000", "cpuacct.usage": "4500000000"}),
    ],
)
def test_a_group_counts_what_it_has_used(mounts: str, files: dict[str, str], tmp_path: Path) -> None:
    job = f"{mounts.split()[1].lstrip('/')}/job"
    shown = {"proc/self/mounts": mounts, "proc/self/cgroup": "3:cpu,cpuacct:/job\n0::/job\n"}
    for name, text in {**shown, **{f"{job}/{name}": text for name, text in files.items()}}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    quota = least_quota(tmp_path)
    assert quota is not None and (quota.processors, quota.used_s()) == (2.0, 4.5)


def test_processors_are_told_by_their_numbers_where_some_are_offline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a host with 0, 2, 3 and 6, this process may run on 2 and 6."""
    monkeypatch.setattr(cpu_times, "_ONLINE", tmp_path / "online")
    monkeypatch.setattr(cpu_times, "_own_processors", lambda: {2, 6})
    monkeypatch.setattr(cpu_times, "least_quota", lambda: None)
    now_s, looks, processors = 0.0, list[Look](), CpuTimes()
    monkeypatch.setattr(cpu_times.time, "perf_counter", lambda: now_s)
    for online, *worked_s in (
        ("0,2-3,6", 0.0, 0.0, 0.0, 0.0),
        ("0,2-3,6", 10.0, 4.0, 10.0, 1.0),
        ("0,2-3", 20.0, 9.0, 20.0),
        ("0,2-3,6", 30.0, 19.0, 30.0, 1.0),
    ):
        told = [SimpleNamespace(user=s) for s in worked_s]
        (tmp_path / "online").write_text(f"{online}\n")
        monkeypatch.setattr(psutil, "cpu_times", lambda percpu, told=told: told)
        looks.append(processors.look())
        now_s += 10.0
    taken = [processors.taken(then, now, 0.0) for then, now in pairwise(looks)]
    assert taken == [(5.0, 20.0), (5.0, 10.0), (10.0, 10.0)], "6 is gone, then back: nobody knows what it did"
