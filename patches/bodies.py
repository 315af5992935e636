"""Bodies that are costly to judge are refused, and what is wrong with a body is said in few words.

Why: ``adaserve/boundary/bodies.py`` says what one request could do to the HTTP process.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException
from fastapi.exceptions import RequestValidationError
from sglang.srt.plugins.hook_registry import HookType

from adaserve.asgi import route_path
from adaserve.boundary import RequestError
from adaserve.boundary.bodies import require_few_values, told
from adaserve.patches import hook


def register() -> None:
    hook("sglang.srt.entrypoints.http_server.ORJSONRequest.json", _parsed, HookType.AROUND)


async def _parsed(original: Callable[..., Awaitable[Any]], request: Any) -> Any:
    parsed_before = hasattr(request, "_json")
    body = await original(request)
    if not parsed_before and isinstance(body, dict | list):
        try:
            require_few_values(body, route_path(request.scope))
        except RequestError as error:
            raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from error
    return body


def shorten_errors(app: Any) -> None:
    """Hands SGLang's own answer to a wrong body less to tell."""
    answer = app.exception_handlers[RequestValidationError]

    async def short(request: Any, error: RequestValidationError) -> Any:
        return await answer(request, RequestValidationError(told(list(error.errors()))))

    app.add_exception_handler(RequestValidationError, short)
