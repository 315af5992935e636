"""Bodies that cost too much, or ask for what is not served, are refused; null stands for what is not set.

Why: ``adaserve/boundary/bodies.py`` says what one request could do to the HTTP process,
``unsupported_fields.py`` what a client would believe. OpenAI's API takes null for everything that may be left
out; SGLang refuses it for many fields, such as penalties and ``n``. It waits for the rest of a body forever,
so clients that never send it could fill the memory, or take everybody's share of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException
from sglang.srt.plugins.hook_registry import HookType
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adaserve.asgi import put_around, route_path
from adaserve.boundary import RequestError
from adaserve.boundary.bodies import drop_nulls, require_few_values
from adaserve.boundary.limits import MAX_BODY_BYTES, MAX_PIECE_S, MAX_UNFINISHED_BYTES, MIN_PIECE_BYTES
from adaserve.boundary.unsupported_fields import require_supported_fields
from adaserve.patches import hook, tokenizer_manager

NULL_IS_UNSET = {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/invocations"}


def register() -> None:
    hook("sglang.srt.entrypoints.http_server.ORJSONRequest.json", _parsed, HookType.AROUND)


async def _parsed(original: Callable[..., Awaitable[Any]], request: Any) -> Any:
    parsed_before = hasattr(request, "_json")
    body = await original(request)
    if not parsed_before and isinstance(body, dict | list):
        path = route_path(request.scope)
        try:
            require_few_values(body, path, _context())
            if isinstance(body, dict):
                require_supported_fields(body, path)
        except RequestError as error:
            raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from error
        if isinstance(body, dict) and path in NULL_IS_UNSET:
            drop_nulls(body)
    return body


def mount(app: Any) -> None:
    """Limits the size of a body, and what has come of those that are not complete."""
    app.max_body_size = MAX_BODY_BYTES
    put_around(app, Unfinished)


class Unfinished:
    """ASGI app around another one. A body that comes in one piece is never refused."""

    def __init__(
        self, app: ASGIApp, most_bytes: int = MAX_UNFINISHED_BYTES, piece_s: float = MAX_PIECE_S
    ) -> None:
        self._app, self._most_bytes, self._piece_s = app, most_bytes, piece_s
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _Body(receive, self._piece_s)

        async def counted() -> Message:
            before_bytes = body.held_bytes
            message = await body.receive()
            self._held_bytes += body.held_bytes - before_bytes
            if not body.is_complete and self._held_bytes > self._most_bytes:
                why = "too many large requests have arrived only in part: try again later, or send it faster"
                raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, why, {"Retry-After": "1"})
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._held_bytes -= body.held_bytes


class _Body:
    """Of one request. ``held_bytes``: what has come of it while it is not complete."""

    def __init__(self, receive: Receive, piece_s: float) -> None:
        self._receive, self._piece_s = receive, piece_s
        self._due_s, self._missing_bytes = 0.0, 0
        self.held_bytes, self.is_complete = 0, False

    async def receive(self) -> Message:
        """The next message. Raises HTTPException where the client stalls before the end of the body."""
        if self.is_complete:
            return await self._receive()
        if self._missing_bytes <= 0:
            self._due_s = asyncio.get_running_loop().time() + self._piece_s
            self._missing_bytes = MIN_PIECE_BYTES
        try:
            async with asyncio.timeout_at(self._due_s):
                message = await self._receive()
        except TimeoutError:
            why = f"the body comes too slowly: send {MIN_PIECE_BYTES} bytes of it every {self._piece_s:g} s"
            raise HTTPException(HTTPStatus.REQUEST_TIMEOUT, why, {"Connection": "close"}) from None
        came_bytes = len(message.get("body", b""))
        self._missing_bytes -= came_bytes
        self.is_complete = not message.get("more_body", False)
        self.held_bytes = 0 if self.is_complete else self.held_bytes + came_bytes
        return message


def _context() -> int | None:
    """The most tokens of a prompt; None where it is cut to what fits."""
    manager = tokenizer_manager()
    if manager is None or manager.allow_auto_truncate:
        return None
    return int(manager.model_config.context_len)
