"""A server that is told to stop before it is ready, or a second time, ends at once.

Why: a second after its HTTP server listens, SGLang asks it in a thread whether it is there. Uvicorn, told to
stop in between, waits for that thread, which asks a closed port for two minutes and then kills the server.
Told to stop later, a server finishes what runs, and after SIGTERM nothing but SIGKILL would end that.

Of several HTTP processes the first one decides, which waits for the others. These may get one signal twice:
from it, and from whoever stops the server.
"""

from __future__ import annotations

import signal
from functools import partial
from types import FrameType
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.host.signals import stop, stop_cleanly
from adaserve.patches import hook, is_active, tokenizer_manager


def register() -> None:
    hook("uvicorn.server.Server.handle_exit", _exit, HookType.BEFORE, always=True)
    handler = "sglang.srt.managers.tokenizer_manager.SignalHandler"
    hook(f"{handler}.sigterm_handler", _drain, HookType.BEFORE)
    workers = "uvicorn.supervisors.multiprocess.Multiprocess"
    hook(f"{workers}.handle_int", partial(_all_exit, signal.SIGINT), HookType.BEFORE)
    hook(f"{workers}.handle_term", partial(_all_exit, signal.SIGTERM), HookType.BEFORE)


def _manager() -> Any | None:
    """The tokenizer manager of an HTTP process; None where another algorithm runs, or no HTTP server."""
    manager = tokenizer_manager()
    return manager if manager is not None and is_active() else None


def _exit(_: Any, sig: int, frame: FrameType | None) -> None:
    """Uvicorn's handler: of Ctrl-C, and of SIGTERM before SGLang has set its own."""
    from sglang.srt.entrypoints.http_server import ServerStatus

    if (manager := _manager()) is not None and manager.server_status == ServerStatus.Starting:
        stop(sig)
    _drain()


def _drain(*_: Any) -> None:
    """The next signal ends the server at once."""
    if (manager := _manager()) is not None and manager.server_args.tokenizer_worker_num == 1:
        stop_cleanly()


def _all_exit(sig: int, supervisor: Any) -> None:
    """The first of several HTTP processes. It takes signals from a queue, until it waits for the others."""
    if supervisor.should_exit.is_set():
        stop(sig)
    stop_cleanly()
