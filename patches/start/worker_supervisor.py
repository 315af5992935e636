"""With several HTTP workers, too, a server ends when its scheduler dies, and finishes what runs when stopped.

Why: SGLang's processes tell the first of them by SIGQUIT that they died, and its handler ends the server.
With ``--tokenizer-worker-num`` above 1 uvicorn supervises the workers there; it takes over every signal, and
for this one it knows nothing to do. So the server would stay, answer nothing, and never be started again.

A worker that is told to stop waits for its own requests and then ends the scheduler, while others' still run.
Here the first process ends it, when all workers have ended.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook

logger = logging.getLogger("adaserve")


def register() -> None:
    target = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
    hook(target, _supervise, HookType.BEFORE)
    hook("sglang.srt.managers.scheduler.Scheduler.handle_shutdown", _not_for_one, HookType.AROUND)


def _supervise(*_: Any, **__: Any) -> None:
    from uvicorn.supervisors.multiprocess import Multiprocess

    Multiprocess.handle_quit = _end  # type: ignore[attr-defined]


def _end(_supervisor: Any) -> None:
    from sglang.srt.utils import kill_process_tree

    logger.error("AdaServe: a process of this server has died, so the server ends; the log says above why")
    kill_process_tree(os.getpid())


def _not_for_one(original: Callable[..., None], self: Any, request: Any) -> None:
    from sglang.srt.runtime_context import get_serving

    if get_serving().tokenizer_worker_num == 1:
        original(self, request)
