"""A request ends as soon as its client has gone.

Why: while an answer that is sent whole is made, and while a stream waits for its first output, SGLang looks
for the client every four seconds. Clients give up where a server is at its limit, and there everybody else
waits for the places and the KV memory that their requests go on to hold.
"""

from __future__ import annotations

import asyncio
from typing import Any

from sglang.srt.plugins.hook_registry import HookType
from starlette.requests import Request

from adaserve.patches import hook
from adaserve.patches.boundary import applies

_watches: set[asyncio.Task[None]] = set()
"""The event loop alone would not keep them."""


def register() -> None:
    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    hook(f"{manager}._wait_one_response", _watch, HookType.AFTER)


def _watch(_: Any, self: Any, obj: Any, request: Any = None) -> None:
    """``obj``: one prompt or one sample, which the scheduler has been sent."""
    if isinstance(request, Request) and not obj.background and applies(self.server_args):
        watch = asyncio.create_task(_end_with_client(self, obj.rid, self.rid_to_state[obj.rid], request))
        _watches.add(watch)
        watch.add_done_callback(_watches.discard)


async def _end_with_client(manager: Any, rid: str, state: Any, request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    # Or the response is complete: then the request has ended, and another one may have its id.
    if manager.rid_to_state.get(rid) is state:
        manager.abort_request(rid)
