"""Bodies that cost too much, or ask for what is not served, are refused; null stands for what is not set.

Why: ``adaserve/boundary/bodies.py`` says what one request could do to the HTTP process,
``unsupported_fields.py`` what a client would believe. OpenAI's API takes null for everything that may be left
out; SGLang refuses it for many fields, such as penalties and ``n``. It waits for the rest of a body forever,
so clients that never send it could fill the memory.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException
from sglang.srt.plugins.hook_registry import HookType
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adaserve.asgi import put_around, route_path
from adaserve.boundary import RequestError
from adaserve.boundary.bodies import drop_nulls, require_few_values
from adaserve.boundary.limits import MAX_BODY_BYTES, MAX_UNFINISHED_BYTES
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

    def __init__(self, app: ASGIApp, most_bytes: int = MAX_UNFINISHED_BYTES) -> None:
        self._app, self._most_bytes = app, most_bytes
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        own_bytes = 0

        async def counted() -> Message:
            nonlocal own_bytes
            message = await receive()
            is_part = message.get("more_body", False)
            came = len(message.get("body", b"")) if is_part else -own_bytes
            own_bytes += came
            self._held_bytes += came
            if is_part and self._held_bytes > self._most_bytes:
                why = "too many large requests have arrived only in part: try again later, or send it faster"
                raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, why, {"Retry-After": "1"})
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._held_bytes -= own_bytes


def _context() -> int | None:
    """The most tokens of a prompt; None where it is cut to what fits."""
    manager = tokenizer_manager()
    if manager is None or manager.allow_auto_truncate:
        return None
    return int(manager.model_config.context_len)
