"""This host: whether AdaServe's CPU platform serves on it, and how it is described beside every figure.

Imports nothing of SGLang, and PyTorch only where it is asked for the platform: the load generator and the
commands describe hosts too, and must start at once.
"""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from adaserve.cores import usable_cores

ATTENTION_BACKEND = "adaserve_cpu"
_PACKAGES = ("adaserve", "sglang", "torch", "numpy", "locust")


def select() -> str | None:
    """Entry point ``sglang.srt.platforms``: our class where the host has nothing but a CPU.

    None where an accelerator is there or another CPU platform was asked for, so that a GPU host is
    never touched.
    """
    import torch

    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None  # SGLang's own CPU build was asked for
    if torch.cuda.is_available() or torch.xpu.is_available():
        return None
    if torch.backends.mps.is_available() or hasattr(torch, "npu"):
        return None
    return "adaserve.platform.AdaServeCpuPlatform"


PROFILE_ROUTES_ENV = "ADASERVE_PROFILE_ROUTES"
"""1: the server is started to be measured, as by `adaserve gpu-check`: see ``is_measured``."""

FORK_ENV = "ADASERVE_FORK"
"""1: a server on a CPU host may fork its scheduler and its detokenizer from its first process."""

DEVICE_PATH_ENV = "ADASERVE_DEVICE_PATH"
"""Set to 1 to run a GPU's parts on a CPU host: slower, but it exercises the GPU's code path."""


def on_device(device: object) -> bool:
    """Whether iterations run on a GPU's parts: the one place where that is decided."""
    return str(device).startswith("cuda") or os.environ.get(DEVICE_PATH_ENV) == "1"


def is_measured() -> bool:
    """Whether clients may record torch profiles, and ask for the server's state as often as they like."""
    return os.environ.get(PROFILE_ROUTES_ENV) == "1"


def describe_host() -> dict[str, Any]:
    """Hardware, versions and commit; JSON values. No names of machines or people."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version_of(name) for name in _PACKAGES},
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
