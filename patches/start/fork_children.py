"""On a CPU host the server's other processes are forked from its first one, and import nothing again.

Why: SGLang starts its scheduler and its detokenizer as new Python processes. Each imports SGLang and PyTorch
anew, which is most of a start on two cores. A fork has them, and shares their memory.

A fork is safe where no other thread can hold a lock, and where torch has read how its threads are to wait. So
it takes a process that has one thread and was started with ``FORK_ENV``, as `adaserve serve` starts it. What
the forked processes start themselves is new again.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import psutil
from sglang.srt.plugins.hook_registry import HookType
from tqdm import tqdm

from adaserve.host.device import FORK_ENV, on_cpu
from adaserve.patches import hook


def register() -> None:
    engine = "sglang.srt.entrypoints.engine.Engine"
    hook(f"{engine}._launch_scheduler_processes", _launch, HookType.AROUND, always=True)
    hook(f"{engine}._launch_detokenizer_subprocesses", _launch, HookType.AROUND, always=True)


def _launch(launch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What is started ignores Ctrl-C. A terminal sends it to all processes; the first one ends the others."""
    if threading.current_thread() is not threading.main_thread():
        return _forking(launch, *args, **kwargs)  # others may not say how signals are handled
    heeded = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return _forking(launch, *args, **kwargs)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if heeded is None else heeded)


def _forking(launch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not _can_fork():
        return launch(*args, **kwargs)
    usual = multiprocessing.get_start_method()
    os.register_at_fork(after_in_child=lambda: multiprocessing.set_start_method(usual, force=True))
    multiprocessing.set_start_method("fork", force=True)
    tqdm.get_lock()  # made in a process that spawns, it would stay in /dev/shm when a server is killed
    gc.freeze()  # a collection in a fork would copy the pages that it shares
    try:
        return launch(*args, **kwargs)
    finally:
        multiprocessing.set_start_method(usual, force=True)


def _can_fork() -> bool:
    asked = os.environ.get(FORK_ENV) == "1" and on_cpu()
    return asked and psutil.Process().num_threads() == 1
