"""A server that is told to stop before it is ready ends at once.

Why: a second after its HTTP server listens, SGLang asks it in a thread whether it is there. Uvicorn, told to
stop in between, waits for that thread, which asks a closed port for two minutes and then kills the server.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.launch import stop
from adaserve.patches import hook
from adaserve.patches.boundary import applies


def register() -> None:
    hook("uvicorn.server.Server.handle_exit", _at_once, HookType.BEFORE)


def _at_once(_: Any, sig: int, frame: FrameType | None) -> None:
    from sglang.srt.entrypoints.http_server import ServerStatus, get_global_state

    state = get_global_state()
    if state is None or not applies(state.tokenizer_manager.server_args):
        return
    if state.tokenizer_manager.server_status == ServerStatus.Starting:
        stop(sig)
