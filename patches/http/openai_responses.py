"""``/v1/responses`` refuses with a status, and says why a response failed.

Why: this route makes its requests itself, later than others do and once more for each tool that it calls.
SGLang answers everything that goes wrong meanwhile with 400, logs a client's mistakes as its own faults, and
of a failed response in the background keeps only that it failed.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from sglang.srt.plugins.hook_registry import HookType

from adaserve.boundary import RequestError
from adaserve.boundary.values import integer
from adaserve.boundary.wording import wrong_fields
from adaserve.patches import hook
from adaserve.patches.http.stream_starts import start
from adaserve.patches.http.validation import check_fields, limits_of

KEPT_OUTPUT_TOKENS = 2
"""That SGLang takes off what a client of /v1/responses asks for; it would refuse 1 as -1."""


def register() -> None:
    responses = "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses"
    hook(f"{responses}._generate_with_builtin_tools", _keep_made, HookType.BEFORE)
    hook(f"{responses}.create_responses", _responses_stream, HookType.AROUND)
    hook(f"{responses}._make_request", _without_a_traceback, HookType.AROUND)
    hook(f"{responses}.responses_full_generator", _responses_status, HookType.AROUND)


def _keep_made(
    self: Any, request_id: str, prompt: Any, adapted: Any, *_: Any, raw_request: Any = None, **__: Any
) -> None:
    """Also raises RequestError for what runs in the background, while its status can still say so."""
    if raw_request is not None:
        raw_request.state.adaserve_converted = adapted
        raw_request.state.adaserve_of_tools = True  # nothing else on this route becomes such a grammar
        if adapted.background:
            check_fields(self.tokenizer_manager, adapted, raw_request)


async def _responses_stream(
    original: Callable[..., Awaitable[Any]], self: Any, request: Any, raw_request: Any = None
) -> Any:
    if (most := request.max_output_tokens) is not None:
        try:
            integer(KEPT_OUTPUT_TOKENS)("max_output_tokens", most, limits_of(self.tokenizer_manager))
        except RequestError as error:
            return self.create_error_response(str(error))
    response = await original(self, request, raw_request)
    if raw_request is not None and hasattr(response, "__anext__"):  # not run yet
        try:
            await start(self.tokenizer_manager, raw_request.state.adaserve_converted, raw_request)
        except ValueError as error:
            return self.create_error_response(str(error))
    return response


async def _responses_status(
    original: Callable[..., Awaitable[Any]], self: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """SGLang makes 400 of every error, also where a request was shed (429) or the server stops (503). As on
    OpenAI's other routes, the error's type is the status. A response that fails in the background says why,
    as OpenAI's do: SGLang keeps that it failed."""
    try:
        answer = await original(self, request, *args, **kwargs)
    except HTTPException as error:
        status = error.status_code
        answer = self.create_error_response(error.detail, err_type=str(status), status_code=status)
    kept = self.response_store.get(request.request_id) if request.background and not request.stream else None
    if kept is not None and kept.status != "cancelled" and isinstance(answer, JSONResponse):
        why = json.loads(bytes(answer.body))["error"]
        kept.error = {"code": str(why["code"]), "message": why["message"]}
    return answer


async def _without_a_traceback(
    original: Callable[..., Awaitable[Any]], self: Any, request: Any, before: Any, *rest: Any, **more: Any
) -> Any:
    """A response's prompt that cannot be made is the client's fault; SGLang logs all but one kind of these as
    faults of its own. What Pydantic finds wrong with the chat made of it is told as of other bodies."""
    from sglang.srt.entrypoints.openai.serving_responses import _MediaInputValidationError

    try:
        return await original(self, request, before, *rest, **more)
    except ValidationError as error:
        chat = {"messages": self._construct_input_messages(request, before, **more)}
        told = wrong_fields([{**one} for one in error.errors()], chat)
        raise _MediaInputValidationError(f"input cannot be made into a chat: {told}") from error
    except ValueError as error:
        raise _MediaInputValidationError(str(error)) from error
