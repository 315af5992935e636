"""A draft that learns goes on with it while nothing runs.

Why: the worker listens to its trainer between two iterations. On an idle server a better draft would wait for
the next request, and the trainer for the answer, just when it has the processors to itself.
"""

from __future__ import annotations

import time
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook
from adaserve.patches.scheduler.worker_interface import worker_of


def register() -> None:
    hook("sglang.srt.managers.scheduler.Scheduler.on_idle", _idle, HookType.BEFORE)


def _idle(self: Any) -> None:
    if (learner := worker_of(self).learner) is not None:
        learner.look((), time.perf_counter())
