"""With several HTTP workers, too, a server whose scheduler has died ends.

Why: SGLang's processes tell the first of them by SIGQUIT that they died, and its handler ends the server.
With ``--tokenizer-worker-num`` above 1 uvicorn supervises the workers there; it takes over every signal, and
for this one it knows nothing to do. So the server would stay, answer nothing, and never be started again.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook
from adaserve.patches.boundary import applies

logger = logging.getLogger("adaserve")


def register() -> None:
    target = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
    hook(target, _supervise, HookType.BEFORE)


def _supervise(server_args: Any, *_: Any, **__: Any) -> None:
    from uvicorn.supervisors.multiprocess import Multiprocess

    if applies(server_args):
        Multiprocess.handle_quit = _end  # type: ignore[attr-defined]


def _end(_supervisor: Any) -> None:
    from sglang.srt.utils import kill_process_tree

    logger.error("adaserve: a process of this server has died, so the server ends; the log says above why")
    kill_process_tree(os.getpid())
