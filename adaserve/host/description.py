"""How this host is described beside every figure: hardware, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from adaserve.host.cores import usable_cores, usable_memory

_PACKAGES = ("adaserve", "sglang", "torch", "numpy", "locust")


def describe_host() -> dict[str, Any]:
    """Hardware, versions and commit; JSON values. No names of machines or people."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_gib": round(usable_memory() / 2**30, 1),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version_of(name) for name in _PACKAGES},
        "git_sha": git_sha(),
    }


def cpu_name() -> str:
    """The processor's own name for itself; that of its architecture where it has none, as on Arm."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor()) or platform.machine()


def git_sha() -> str | None:
    """Commit of the working tree that this code runs from, with ``-dirty`` when it differs; None for an
    installed copy, which may lie below the tree of another project."""
    here = Path(__file__)
    is_tracked = ["git", "ls-files", "--error-unmatch", here.name]
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--match="]
    try:
        for command in (is_tracked, describe):
            out = subprocess.run(
                command, cwd=here.parent, capture_output=True, text=True, timeout=10, check=True
            )
    except (OSError, subprocess.SubprocessError):
        return None
    return out.stdout.strip() or None


def version_of(name: str) -> str | None:
    """Of an installed package; None where there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
