"""Processes that a command starts end with it, even if it is killed."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import signal
import sys
from pathlib import Path

PARENT_ENV = "ADASERVE_PARENT"
"""Process id of the command that started a server, a router or a load test."""


_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Makes Linux end this process when the command that started it is gone, or ends it now where that has
    happened already: a server takes seconds to get here, and a replica minutes the first time.

    SGLang lets its own children follow the server's first process, but only once they have imported it. If
    that was killed by then, its detokenizer would stay forever: here they end as well.
    """
    started_by = os.environ.get(PARENT_ENV)
    if sys.platform != "linux":
        return
    if started_by == str(os.getppid()):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    parent = multiprocessing.parent_process()
    needed = [started_by, None if parent is None else str(parent.pid)]
    if not all(pid is None or _is_there(pid) for pid in needed):
        os.kill(os.getpid(), signal.SIGTERM)


def _is_there(pid: str) -> bool:
    """Whether a process runs, and is not only waited for."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return not Path("/proc/self/stat").exists()  # nobody can tell
    return state not in "ZX"


if __name__ == "__main__":  # python -m adaserve.host.lifetime MODULE ARGUMENTS: for a foreign command
    die_with_parent()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
