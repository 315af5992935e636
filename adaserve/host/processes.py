"""The processes of a server, and what they leave behind."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from adaserve.errors import UserError

_SHARED = "/dev/shm/"
_LOADS = "sglang_loads_*.shm"
"""What SGLang's processes tell each other their load by; each server that is killed leaves one."""
_ARGUMENTS = "multi_tokenizer_args_"
"""What a server of several HTTP processes tells them when they start: its flags, the keys among them."""
_ROOM_BYTES = 4 << 20
"""More than a server writes to shared memory and, for its counters, to temporary files."""
_FIRST_PID_NAMESPACE = 0xEFFFFFFC
_STARTED_S = 600.0
"""A server has started by then, so that all of its processes that need such a file have mapped it."""
_AT_FIRST = dict(os.environ)
"""Before SGLang has changed it."""
_ROUNDED_S = 2.0
"""The kernel tells in whole seconds when it was started, and when a process was follows from that."""


def end_children(pid: int) -> None:
    """Kills what a process started, and removes the shared memory that this leaves behind."""
    process = psutil.Process(pid)
    started_s, children = process.create_time(), process.children(recursive=True)
    members = [pid, *(p.pid for p in children)]
    shared, folders = set().union(*map(shared_memory, members)), set().union(*map(metrics_folders, members))
    # A scheduler that refuses a model has ended by now, and nobody else had counters yet.
    folders |= {told_counters(os.environ)} - {told_counters(_AT_FIRST), Path()}
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=5.0)
    remove(left_behind(shared, started_s))
    remove_folders(folders)


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
    return named | {Path(line[line.index(_SHARED) :]) for line in _maps(pid) if _SHARED in line}


def metrics_folders(pid: int) -> set[Path]:
    """Folders of Prometheus' counters that SGLang has made among temporary files, where a process has some
    mapped. A server that is killed leaves 300 kB there. What users have named is none of them."""
    place = tempfile.gettempdir()
    found = (re.search(rf"({re.escape(place)}/tmp\w{{8}})/\w+\.db$", line) for line in _maps(pid))
    return {Path(folder[1]) for folder in found if folder} - {told_counters(_AT_FIRST)}


def told_counters(environ: Mapping[str, str]) -> Path:
    """The folder for counters that a server is told by its environment, and that others may use as well."""
    return Path(environ.get("PROMETHEUS_MULTIPROC_DIR", ""))


def _maps(pid: int) -> list[str]:
    """Files and memory that a process has mapped, as Linux lists them."""
    try:
        return Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return []


def left_behind(shared: Iterable[Path], started_s: float) -> set[Path]:
    """Those of these files that were made for a server which was started at ``started_s``, epoch seconds.

    People keep other things in shared memory, where they load fast: models, which are mapped while they are
    loaded, Python's packages, or the cache. They lie in folders, or were there before the server."""
    own = {path for path in shared if path.parent == Path(_SHARED)}
    return {path for path in own if path.match(_LOADS) or _changed_s(path) > started_s - _ROUNDED_S}


def remove_leftovers() -> None:
    """Removes what killed servers have left in shared memory: files that no process has mapped.

    Not in a container: it may have the host's shared memory, and cannot see who has mapped what is there."""
    if not _sees_all_processes():
        return
    there = {path for path in Path(_SHARED).glob(_LOADS) if _age_s(path) > _STARTED_S}
    remove(there.difference(*map(shared_memory, psutil.pids())) if there else there)


def require_room() -> None:
    """Raises UserError where SGLang's processes could not write to the files that they map: Linux ends a
    process that tries."""
    for place in (_SHARED, tempfile.gettempdir()):
        if Path(place).is_dir() and shutil.disk_usage(place).free < _ROOM_BYTES:
            raise UserError(
                f"{Path(place)} has no room left for files that the server's processes share: free some"
            )


def _sees_all_processes() -> bool:
    """Whether this is the PID namespace that Linux starts with, whose number is fixed."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:  # its server has just ended
        return 0.0


def _changed_s(path: Path) -> float:
    """Unlike the time of the last change of contents, nobody can set this one."""
    try:
        return path.stat().st_ctime
    except OSError:  # it is gone
        return 0.0


def remove_folders(folders: Iterable[Path]) -> None:
    """Removes folders of temporary files whose processes have ended."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def remove(shared: set[Path]) -> None:
    """Removes files of shared memory whose processes have ended."""
    for path in shared:
        with suppress(OSError):
            path.unlink()
