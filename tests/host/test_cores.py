"""Threads follow what this process may use of the host."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from adaserve.host.cores import short_spins, usable_cores, usable_memory
from adaserve.server import ServerSpec

COUNT_IN_CHILD = "from adaserve.host.cores import usable_cores; print(usable_cores())"
V2 = "cgroup /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n"
V1 = (
    "cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n"
    "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\n"
)


def host(root: Path, cpus: int, mounts: str, groups: str, files: dict[str, str]) -> Path:
    """A file tree as a kernel would show it, one hardware thread a core."""
    topology = {f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": str(i) for i in range(cpus)}
    for name, text in {"proc/self/mounts": mounts, "proc/self/cgroup": groups, **topology, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


@pytest.mark.skipif(shutil.which("taskset") is None, reason="no taskset here")
def test_affinity_is_followed() -> None:
    first = min(os.sched_getaffinity(0))
    command = ["taskset", "-c", str(first), sys.executable, "-c", COUNT_IN_CHILD]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "1\n"


@pytest.mark.usefixtures("eight_cpus")
def test_hardware_threads_of_a_core_count_once(tmp_path: Path) -> None:
    siblings = {
        f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": f"{i % 4},{i % 4 + 4}\n"
        for i in range(8)
    }
    assert usable_cores(host(tmp_path, 8, "", "", {})) == 8
    assert usable_cores(host(tmp_path, 8, "", "", siblings)) == 4


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("300000 100000", 3), ("150000 100000", 1), ("20000 100000", 1)]
)
def test_quota_of_cgroup_v2(tmp_path: Path, quota: str, cores: int) -> None:
    root = host(tmp_path, 8, V2, "0::/job/step\n", {"sys/fs/cgroup/job/step/cpu.max": quota + "\n"})
    assert usable_cores(root) == cores


@pytest.mark.usefixtures("eight_cpus")
def test_quota_of_a_group_above(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
        "sys/fs/cgroup/job/cpu.max": "200000 100000\n",
    }
    assert usable_cores(host(tmp_path, 8, V2, "0::/job/step\n", files)) == 2


@pytest.mark.usefixtures("eight_cpus")
def test_quota_in_a_container_that_shows_the_path_of_the_host(tmp_path: Path) -> None:
    root = host(
        tmp_path, 8, V2, "0::/pod.slice:cri-containerd:0123\n", {"sys/fs/cgroup/cpu.max": "400000 100000\n"}
    )
    assert usable_cores(root) == 4


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("500000", 5)])
def test_quota_of_cgroup_v1(tmp_path: Path, quota: str, cores: int) -> None:
    folder = "sys/fs/cgroup/cpu,cpuacct/job/"
    others = "sys/fs/cgroup/cpu,cpuacct/elsewhere/"
    files = {folder + "cpu.cfs_quota_us": quota + "\n", folder + "cpu.cfs_period_us": "100000\n"}
    files |= {others + "cpu.cfs_quota_us": "100000\n", others + "cpu.cfs_period_us": "100000\n"}
    groups = "5:cpuset:/\n4:memory:/elsewhere\n3:cpu,cpuacct:/job\n0::/\n"
    assert usable_cores(host(tmp_path, 8, V1, groups, files)) == cores


def test_a_host_without_these_files_has_its_cores(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))


GIB = 1 << 30


@pytest.mark.parametrize(
    ("mounts", "groups", "files", "gib"),
    [
        (V2, "0::/job/step\n", {"job/step/memory.max": f"{3 * GIB}"}, 3),
        (V2, "0::/job/step\n", {"job/step/memory.max": "max", "job/memory.max": f"{2 * GIB}"}, 2),
        (V2, "0::/job/step\n", {"job/step/memory.max": "max", "elsewhere/memory.max": f"{GIB}"}, 64),
        (V2, "0::/pod.slice:cri:0123\n", {"memory.max": f"{4 * GIB}"}, 4),
        (V2, "0::/\n", {"memory.max": f"{128 * GIB}"}, 64),
        (V1, "4:memory:/job\n3:cpu,cpuacct:/\n", {"memory/job/memory.limit_in_bytes": f"{5 * GIB}"}, 5),
        (V1, "4:memory:/job\n", {"memory/job/memory.limit_in_bytes": "9223372036854771712"}, 64),
        ("", "", {}, 64),
    ],
)
def test_memory_ends_where_a_cgroup_does(
    mounts: str, groups: str, files: dict[str, str], gib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB))
    limits = {f"sys/fs/cgroup/{name}": text + "\n" for name, text in files.items()}
    assert usable_memory(host(tmp_path, 1, mounts, groups, limits)) == gib * GIB


def test_a_server_gets_as_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    first = min(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {first})
        assert ServerSpec("model", "draft").environment()["OMP_NUM_THREADS"] == "1"
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
    ids=["silent", "own-count", "own-policy"],
)
def test_torch_threads_spin_shortly_unless_told_otherwise(given: dict[str, str], spins: str | None) -> None:
    environ = dict(given)
    short_spins(environ)
    assert environ == given | ({} if spins is None else {"GOMP_SPINCOUNT": spins})


def test_torch_is_not_loaded_before_the_command_line_has_said_how_its_threads_wait() -> None:
    """GNU's OpenMP reads its environment when it is loaded."""
    code = "import sys, adaserve.cli; assert 'torch' not in sys.modules, 'torch came too early'"
    subprocess.run([sys.executable, "-c", code], check=True)
