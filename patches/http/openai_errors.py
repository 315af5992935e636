"""Errors of OpenAI's routes, of Anthropic's and of Ollama's have their shape and speak of their fields.

Why: SGLang answers with the parts of an error, but not inside of ``error``, where OpenAI's clients look for
them. Those for JavaScript then say "400 status code (no body)". A wrong body is answered with what Pydantic
says about every type that it tried, twice and as Python writes it. Errors of Anthropic's route have its
shape, but OpenAI's types; with --fastapi-root-path SGLang takes the route for another one. Ollama's clients
look for a text in ``error``: that for JavaScript says "[object Object]" of anything else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from fastapi import HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sglang.srt.entrypoints.anthropic.serving import ERROR_TYPE_MAP
from sglang.srt.plugins.hook_registry import HookType

from adaserve.asgi import route_path
from adaserve.boundary.wording import as_sent, cut_short, not_json, wrong_fields
from adaserve.patches import hook

ANTHROPIC = "/v1/messages"
OLLAMA = "/api/"
"""What the paths of their routes begin with."""


def register() -> None:
    openai = "sglang.srt.entrypoints.openai"
    hook(f"{openai}.serving_base.OpenAIServingBase.handle_request", _told, HookType.AROUND)
    hook(f"{openai}.serving_responses.OpenAIServingResponses.create_responses", _told, HookType.AROUND)
    anthropic = "sglang.srt.entrypoints.anthropic.serving.AnthropicServing"
    hook(f"{anthropic}.handle_messages", _told, HookType.AROUND)


async def _told(
    original: Callable[..., Awaitable[Any]], self: Any, request: Any, raw_request: Any = None
) -> Any:
    sent = set(request.model_fields_set)  # SGLang sets some itself meanwhile
    response = await original(self, request, raw_request)
    return in_shape(response, sent, type(request).model_fields)


def mount(app: Any) -> None:
    """Puts the shape around the errors that SGLang's routes raise."""
    refused, wrong = app.exception_handlers[HTTPException], app.exception_handlers[RequestValidationError]

    async def on_refused(request: Any, error: HTTPException) -> Any:
        response = in_shape(await refused(request, error), path=route_path(request.scope))
        response.headers.update(error.headers or {})
        return response

    async def on_wrong(request: Any, error: RequestValidationError) -> Any:
        errors = list(error.errors())
        response = await wrong(request, RequestValidationError(cut_short(errors)))
        sent = error.body if isinstance(error.body, dict) else ()
        how = [request.headers.get(name, "") for name in ("content-type", "content-encoding")]
        message = not_json(errors, error.body, *how) or wrong_fields(errors, error.body)
        return in_shape(response, sent, message=message, path=route_path(request.scope))

    app.add_exception_handler(HTTPException, on_refused)
    app.add_exception_handler(RequestValidationError, on_wrong)


def in_shape(
    response: Any,
    sent: Collection[str] = (),
    known: Collection[str] = (),
    *,
    message: str | None = None,
    path: str = "",
) -> Any:
    """An error of SGLang's as OpenAI, Anthropic or Ollama writes it; other responses as they are.

    ``sent``: the fields of the request; ``known``: those of its route. ``message``: what is said in place of
    SGLang's words. ``path``: of the request, where its route did not write the error itself.
    """
    if not isinstance(response, JSONResponse) or response.status_code < 400:
        return response
    body = json.loads(bytes(response.body))
    given = body.get("error", body if body.get("object") == "error" else None)
    if not isinstance(given, dict):
        return response  # of other APIs
    message = message or as_sent(str(given.get("message")), sent, known)
    if path.startswith(OLLAMA):
        return _with(response, {"error": message})
    if body.get("type") == "error" or path.startswith(ANTHROPIC):
        kind = ERROR_TYPE_MAP.get(response.status_code, given.get("type"))
        return _with(response, {"type": "error", "error": {"type": kind, "message": message}})
    leading = re.match(r"\w+", message)
    about = leading[0] if leading and leading[0] in sent else None
    error = {
        "message": message,
        "type": given.get("type"),
        "param": given.get("param") or about,
        "code": given.get("code"),
    }
    return _with(response, {"error": error})


def _with(response: JSONResponse, body: dict[str, Any]) -> JSONResponse:
    response.body = response.render(body)
    response.headers["content-length"] = str(len(response.body))
    return response
