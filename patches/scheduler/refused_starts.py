"""One sentence and exit code 2 where the scheduler's process finds that a model cannot be served.

Why: some of it shows only once the models are built (their attention, their vocabularies, the room in the KV
cache), and SGLang logs a page of its own calls, with what to do in the last line. Then its first process
kills itself, so that a shell says "Killed" and 137, as it does where the host has no memory left.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.errors import UserError
from adaserve.host.processes import end_children
from adaserve.patches import hook, is_active


def register() -> None:
    hook("sglang.srt.managers.scheduler.get_exception_traceback", _sentence, HookType.AROUND, always=True)
    hook("sglang.srt.utils.common.kill_process_tree", _end, HookType.AROUND, always=True)


def _sentence(original: Callable[[], str]) -> str:
    """What the log says of the exception that ends the scheduler."""
    error = sys.exception()
    return str(error) if isinstance(error, UserError) else original()


def _end(
    original: Callable[..., None],
    parent_pid: int | None,
    include_parent: bool = True,
    *args: Any,
    **kwargs: Any,
) -> None:
    """A process that is to end with all it started; also where the scheduler dies later."""
    # SGLang also calls it where no settings are known yet, but not for the process itself.
    if parent_pid != os.getpid() or not include_parent or not is_active():
        original(parent_pid, include_parent, *args, **kwargs)
        return
    end_children(parent_pid)
    os._exit(2)
