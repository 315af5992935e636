"""The processes of a server, and what they leave behind."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

_SHARED = "/dev/shm/"
_LOADS = "sglang_loads_*.shm"
"""What SGLang's processes tell each other their load by; each server that is killed leaves one."""
_ARGUMENTS = "multi_tokenizer_args_"
"""What a server of several HTTP processes tells them when they start: its flags, the keys among them."""
_STARTED_S = 600.0
"""A server has started by then, so that all of its processes that need such a file have mapped it."""


def end_children(pid: int) -> None:
    """Kills what a process started, and removes the shared memory that this leaves behind."""
    children = psutil.Process(pid).children(recursive=True)
    shared = {path for p in children for path in shared_memory(p.pid)} | shared_memory(pid)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=5.0)
    remove(shared)


def family(leader: int) -> list[psutil.Process]:
    """The processes of a group and what its leader started. The leader itself may be dead already."""
    found = {p for p in psutil.process_iter() if _group(p.pid) == leader}
    with suppress(psutil.NoSuchProcess):
        found.update(psutil.Process(leader).children(recursive=True))
    return list(found)


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def shared_memory(pid: int) -> set[Path]:
    """Files in Linux' shared memory that a process has mapped, or that SGLang names by its id."""
    named = {Path(_SHARED, f"{_ARGUMENTS}{pid}")}
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return named | {Path(line[line.index(_SHARED) :]) for line in lines if _SHARED in line}
    return named


def remove_leftovers(folder: Path = Path(_SHARED)) -> None:
    """Removes what servers that were killed have left in shared memory: files that nobody has mapped."""
    there = {path for path in folder.glob(_LOADS) if _age_s(path) > _STARTED_S}
    remove(there.difference(*map(shared_memory, psutil.pids())) if there else there)


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:  # its server has just ended
        return 0.0


def remove(shared: set[Path]) -> None:
    """Removes files of shared memory whose processes have ended."""
    for path in shared:
        with suppress(OSError):
            path.unlink()
