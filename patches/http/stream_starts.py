"""Sends a stream's status only when its first output exists.

Why: SGLang sends it before. Here all routes wait, so that a refusal is a status and not an event in a good
answer: also where the scheduler refuses, as a full queue or a grammar that cannot be compiled, which chat and
completions make an event of.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException
from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook, tokenizer_manager
from adaserve.patches.http.validation import REPEATS, STARTED, refusal


def register() -> None:
    openai = "sglang.srt.entrypoints.openai"
    for serving in ("serving_chat.OpenAIServingChat", "serving_completions.OpenAIServingCompletion"):
        hook(f"{openai}.{serving}._handle_streaming_request", _openai_stream, HookType.AROUND)
    messages = "sglang.srt.entrypoints.anthropic.serving.AnthropicServing._handle_streaming"
    hook(messages, _messages_stream, HookType.AROUND)


async def start(manager: Any, obj: Any, request: Any) -> None:
    """Runs a request up to its first output. Raises ValueError or HTTPException when it is refused."""
    outputs = manager.generate_request(obj, request)
    first = await anext(outputs)
    try:
        _raise_refusal(first)
    except HTTPException:
        await outputs.aclose()
        raise

    async def all_of_it() -> AsyncIterator[Any]:
        try:
            yield first
            async for out in outputs:
                yield out
        finally:
            await outputs.aclose()

    setattr(obj, STARTED, all_of_it())


def _raise_refusal(output: Any) -> None:
    """SGLang's scheduler refuses a streamed request by an output that says so."""
    meta = output.get("meta_info") if isinstance(output, dict) else None
    reason = (meta or {}).get("finish_reason")
    if isinstance(reason, dict) and reason.get("type") == "abort" and reason.get("status_code"):
        raise HTTPException(int(reason["status_code"]), reason.get("message"))


async def native_response(original: Callable[..., Awaitable[Any]], obj: Any, request: Any) -> Any:
    """``/generate``: a stream's response once its first output is there."""
    from sglang.srt.entrypoints.request_headers import apply_header_overrides
    from sglang.srt.environ import envs

    if not obj.stream:
        return await original(obj, request)
    manager = tokenizer_manager()
    if envs.SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES.get():
        apply_header_overrides(obj, request.headers)  # SGLang does so later, when the stream has begun
    repeats = REPEATS.set(not manager.incremental_streaming_output)
    try:
        await start(manager, obj, request)
    except ValueError as error:
        return refusal(str(error))
    finally:
        REPEATS.reset(repeats)  # the next request on this connection may inherit what this one has set
    return await original(obj, request)


async def _openai_stream(
    original: Callable[..., Awaitable[Any]], self: Any, adapted: Any, request: Any, raw_request: Any
) -> Any:
    try:
        await start(self.tokenizer_manager, adapted, raw_request)
    except HTTPException as error:
        if error.status_code != HTTPStatus.BAD_REQUEST:
            raise
        return self.create_error_response(error.detail)
    except ValueError as error:
        return self.create_error_response(str(error))
    return await original(self, adapted, request, raw_request)


async def _messages_stream(
    original: Callable[..., Awaitable[Any]], self: Any, chat: Any, request: Any, raw_request: Any
) -> Any:
    response = await original(self, chat, request, raw_request)
    if hasattr(response, "body_iterator"):  # not run yet
        try:
            manager = self.openai_serving_chat.tokenizer_manager
            await start(manager, raw_request.state.adaserve_converted, raw_request)
        except ValueError as error:
            return self._error_response(
                status_code=400, error_type="invalid_request_error", message=str(error)
            )
    return response
