"""What a result was measured on: written beside every figure."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil


def describe_host() -> dict[str, Any]:
    """Hardware, versions and commit; JSON values."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("adaserve", "sglang", "torch", "numpy", "locust")},
        "git_sha": git_sha(),
    }


def cpu_name() -> str:
    """The processor's own name for itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def git_sha() -> str | None:
    """Commit of the working tree that this code runs from, with ``-dirty`` when it differs."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--match="]
    try:
        out = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return out.stdout.strip() or None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
