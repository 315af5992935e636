"""A request ends as soon as its client has disconnected.

Why: while it makes an answer that is sent whole, and while a stream waits for its first output, SGLang checks
for the client only every four seconds. Clients give up when a server is at its limit, and then all others
wait for the places and the KV memory that these requests still hold.

Two seconds after the end of a stream, SGLang aborts the request with its id, in case its client left early.
By then the id may belong to another request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType
from starlette.background import BackgroundTasks
from starlette.requests import Request

from adaserve.patches import hook

LEFT_S = 2.0
"""SGLang's own patience with a request whose stream is over."""

_watches: set[asyncio.Task[None]] = set()
"""The event loop alone would not keep them."""


def register() -> None:
    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    hook(f"{manager}._wait_one_response", _watch, HookType.AFTER)
    hook(f"{manager}.create_abort_task", _behind_a_stream, HookType.AROUND)


def _watch(_: Any, self: Any, obj: Any, request: Any = None) -> None:
    """``obj``: one prompt or one sample, which the scheduler has been sent."""
    if isinstance(request, Request) and not obj.background:
        watch = asyncio.create_task(_end_with_client(self, obj.rid, self.rid_to_state[obj.rid], request))
        _watches.add(watch)
        watch.add_done_callback(_watches.discard)


async def _end_with_client(manager: Any, rid: str, state: Any, request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    # Or the response is complete: then the request has ended, and another one may have its id.
    if manager.rid_to_state.get(rid) is state:
        manager.abort_request(rid)


def _behind_a_stream(_: Callable[..., BackgroundTasks], self: Any, obj: Any) -> BackgroundTasks:
    tasks = BackgroundTasks()
    tasks.add_task(_end_what_is_left, self, obj)
    return tasks


async def _end_what_is_left(manager: Any, obj: Any) -> None:
    rids = [obj.rid] if obj.is_single else obj.rid
    left = {rid: state for rid in rids if (state := manager.rid_to_state.get(rid)) is not None}
    await asyncio.sleep(LEFT_S)
    for rid, state in left.items():
        if manager.rid_to_state.get(rid) is state:
            manager.abort_request(rid)
