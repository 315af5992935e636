"""What SIGINT, SIGTERM and SIGUSR1 do to our processes: they end at once, or say where they hang."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from adaserve.host.lifetime import PARENT_ENV

STACK_DUMP_SIGNAL = signal.SIGUSR1
"""Makes each process of such a server write to its log where its threads are, whatever they wait for."""


def stop(number: int) -> NoReturn:
    """Ends this process and what it started, as that signal does: with one line and exit code 130 or 143."""
    from adaserve.host.processes import end_children

    end_children(os.getpid())
    print(f"adaserve: stopped by {signal.Signals(number).name}", file=sys.stderr, flush=True)
    os._exit(128 + number)


def stop_cleanly() -> None:
    """Makes SIGINT and SIGTERM end this process and what it started at once. SGLang and uvicorn put handlers
    of their own in the place of these when they serve."""
    own = os.getpid()

    def heed(number: int, _: FrameType | None) -> None:
        if os.getpid() == own:
            stop(number)
        signal.signal(number, signal.SIG_DFL)  # forked from this process: nobody's to stop but itself
        os.kill(os.getpid(), number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, heed)


def dump_stacks_on_signal() -> None:
    """For the processes of servers that a command of ours has started: elsewhere the signal is not ours."""
    if PARENT_ENV in os.environ and sys.__stderr__ is not None:
        faulthandler.register(STACK_DUMP_SIGNAL, file=sys.__stderr__)
