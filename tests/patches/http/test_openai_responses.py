"""Responses of ``/v1/responses`` that are refused, or fail, say so with a status and a reason."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, ResponsesRequest
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses

from adaserve.boundary import RequestError
from adaserve.patches.http import openai_responses
from adaserve.patches.http.openai_responses import _keep_made, _responses_status, _without_a_traceback


def serving() -> Any:
    made = OpenAIServingResponses.__new__(OpenAIServingResponses)
    made.tokenizer_manager = SimpleNamespace()
    return made


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_response_that_is_not_made_has_the_status_of_its_error(status: int) -> None:
    """SGLang says 400: that the client is to blame, and must not try again."""

    async def fails() -> Any:
        raise HTTPException(status, "late")
        yield

    original, request = OpenAIServingResponses.responses_full_generator, ResponsesRequest(input="a")
    unused: Any = (request, None, fails(), None, "m", None, None)
    answer = asyncio.run(_responses_status(original, serving(), *unused, require_reasoning=False))
    assert answer.status_code == status and json.loads(answer.body)["error"]["message"] == "late"


def test_a_response_that_failed_in_the_background_says_why() -> None:
    """SGLang keeps that it failed. Its client has had an answer with status 200 before."""

    async def fails() -> Any:
        raise ValueError("too long")
        yield

    made, request = serving(), ResponsesRequest(input="a", background=True)
    kept = SimpleNamespace(status="queued", error=None)
    made.response_store, made.response_store_lock = {request.request_id: kept}, asyncio.Lock()

    async def full(*args: Any, **more: Any) -> Any:
        return await _responses_status(OpenAIServingResponses.responses_full_generator, made, *args, **more)

    made.responses_full_generator = full
    unused: Any = (None, fails(), None, "m", None, None)
    asyncio.run(made._run_background_request(request, *unused, require_reasoning=False))
    assert kept.status == "failed" and kept.error == {"code": "400", "message": "too long"}


def test_a_response_that_its_client_cancelled_has_no_error() -> None:
    """SGLang ends its task by what it takes for a client that has gone, and says so."""
    made, request = serving(), ResponsesRequest(input="a", background=True)
    made.tokenizer_manager.abort_request = lambda rid: None
    made.enable_response_store = True
    kept = SimpleNamespace(status="queued", error=None)
    made.response_store, made.response_store_lock = {request.request_id: kept}, asyncio.Lock()

    async def full(*args: Any, **more: Any) -> Any:
        return await _responses_status(OpenAIServingResponses.responses_full_generator, made, *args, **more)

    async def waits(started: asyncio.Event) -> Any:
        started.set()
        await asyncio.Event().wait()
        yield

    async def cancelled() -> Any:
        started = asyncio.Event()
        unused: Any = (None, waits(started), None, "m", None, None)
        runs = asyncio.create_task(made._run_background_request(request, *unused, require_reasoning=False))
        made.background_tasks = {request.request_id: runs}
        await started.wait()
        return await made.cancel_responses(request.request_id)

    made.responses_full_generator = full
    assert asyncio.run(cancelled()) is kept
    assert (kept.status, kept.error) == ("cancelled", None)


def test_a_response_in_the_background_is_checked_while_it_has_a_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(*_: Any) -> None:
        raise RequestError("refused")

    monkeypatch.setattr(openai_responses, "check_fields", refuses)
    http = SimpleNamespace(state=SimpleNamespace())
    _keep_made(serving(), "resp_a", "a", SimpleNamespace(background=False), raw_request=http)
    with pytest.raises(RequestError):
        _keep_made(serving(), "resp_a", "a", SimpleNamespace(background=True), raw_request=http)


def test_input_that_makes_no_chat_is_told_in_a_line() -> None:
    """Pydantic's own words have a line for each type that it tried, and a link to its website."""
    made = serving()
    made._construct_input_messages = lambda *_, **__: [{"role": "user", "content": 5}]

    async def make(self: Any, request: Any, before: Any, **more: Any) -> None:
        ChatCompletionRequest(messages=self._construct_input_messages(request, before, **more))

    with pytest.raises(
        ValueError, match=r"^input cannot be made into a chat: messages\[0\].content"
    ) as error:
        asyncio.run(_without_a_traceback(make, made, None, None, tool_adapter=None))
    assert "\n" not in str(error.value) and "http" not in str(error.value)
