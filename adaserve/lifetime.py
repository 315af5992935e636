"""A server ends with the command that started it, even when that command is killed."""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PARENT_ENV = "ADASERVE_PARENT"
"""Process id of the command that started a server."""

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Makes Linux end this process when the command that started it is gone.

    For the server's first process only: SGLang lets its own children follow it.
    """
    if sys.platform == "linux" and os.environ.get(PARENT_ENV) == str(os.getppid()):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":  # python -m adaserve.lifetime MODULE ARGUMENTS: a foreign command, made to do so
    die_with_parent()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
