"""Bodies that cost too much, or ask for what is not served, are refused; null stands for what is not set.

Why: ``adaserve/boundary/bodies.py`` says what one request could do to the HTTP process, ``unserved.py`` what
a client would believe. OpenAI's API takes null for everything that may be left out; SGLang refuses it for
many fields, such as penalties and ``n``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException
from sglang.srt.plugins.hook_registry import HookType

from adaserve.asgi import route_path
from adaserve.boundary import RequestError
from adaserve.boundary.bodies import drop_nulls, require_few_values
from adaserve.boundary.unserved import require_served
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
                require_served(body, path)
        except RequestError as error:
            raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from error
        if isinstance(body, dict) and path in NULL_IS_UNSET:
            drop_nulls(body)
    return body


def _context() -> int | None:
    """The most tokens of a prompt; None where it is cut to what fits."""
    manager = tokenizer_manager()
    if manager is None or manager.allow_auto_truncate:
        return None
    return int(manager.model_config.context_len)
