"""One sentence, without a traceback, where the scheduler's process finds that a model cannot be served.

Why: some of it shows only once the models are built (their attention, their vocabularies, the room in the KV
cache), and SGLang logs a page of its own calls, with what to do in the last line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from sglang.srt.plugins.hook_registry import HookType

from adaserve.errors import UserError
from adaserve.patches import hook


def register() -> None:
    hook("sglang.srt.managers.scheduler.get_exception_traceback", _sentence, HookType.AROUND, always=True)


def _sentence(original: Callable[[], str]) -> str:
    """What the log says of the exception that ends the scheduler."""
    error = sys.exception()
    return str(error) if isinstance(error, UserError) else original()
