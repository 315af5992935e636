"""A stream starts before its response is made, with all that its headers say."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException, Request
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.request_headers import apply_header_overrides
from sglang.srt.managers.io_struct import GenerateReqInput

from adaserve.boundary import RequestError
from adaserve.patches.http.stream_starts import _openai_stream, native_response
from adaserve.patches.http.validation import REPEATS, _every_request


def serve_natively(generate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``generate``: what answers the requests of ``/generate``."""
    manager = SimpleNamespace(incremental_streaming_output=False, generate_request=generate)
    monkeypatch.setattr(http_server, "get_global_state", lambda: SimpleNamespace(tokenizer_manager=manager))


def test_headers_that_override_fields_are_read_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router names the request so, to abort it by that name."""
    started: list[tuple[Any, Any]] = []

    async def generate(obj: Any, _: Any) -> Any:
        started.append((obj.rid, obj.priority))
        yield {"text": "a", "meta_info": {"finish_reason": None}}

    async def original(obj: Any, request: Any) -> str:
        apply_header_overrides(obj, request.headers)
        return "streamed"

    serve_natively(generate, monkeypatch)
    monkeypatch.setenv("SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES", "1")
    headers = [(b"x-override-rid", b"routed"), (b"x-override-priority", b"7")]
    request = Request({"type": "http", "path": "/generate", "headers": headers, "state": {}})
    obj = GenerateReqInput(text="a", rid="own", stream=True)
    assert asyncio.run(native_response(original, obj, request)) == "streamed"
    assert started == [("routed", 7)]


@pytest.mark.parametrize("refused", [False, True])
def test_the_next_request_of_a_connection_is_not_taken_for_such_a_stream(
    refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it was sent before the answer to this one, uvicorn begins it in the context of this one."""
    during: list[bool] = []

    async def generate(*_: Any) -> Any:
        during.append(REPEATS.get())
        if refused:
            raise RequestError("refused")
        yield {"text": "a", "meta_info": {"finish_reason": None}}

    async def original(*_: Any) -> str:
        return "streamed"

    serve_natively(generate, monkeypatch)
    request = Request({"type": "http", "path": "/generate", "headers": [], "state": {}})

    async def pipelined() -> bool:
        await native_response(original, GenerateReqInput(text="a", stream=True), request)
        return REPEATS.get()

    assert (asyncio.run(pipelined()), during) == (False, [True])


@pytest.mark.parametrize(("status", "message"), [(400, "the grammar is wrong"), (503, "the queue is full")])
def test_a_stream_of_openai_that_the_scheduler_refuses_has_the_status(status: int, message: str) -> None:
    """SGLang makes an event of it, in an answer with status 200."""
    reason = {"type": "abort", "status_code": HTTPStatus(status), "message": message}

    async def generate(*_: Any) -> Any:
        yield {"text": "", "meta_info": {"finish_reason": reason}}

    async def unreached(*_: Any) -> None:
        raise AssertionError("it is not streamed")

    manager = SimpleNamespace(generate_request=generate)
    serving = SimpleNamespace(tokenizer_manager=manager, create_error_response=lambda said: (400, said))
    made = GenerateReqInput(text="a", stream=True)
    try:
        told = asyncio.run(_openai_stream(unreached, serving, made, None, None))
    except HTTPException as error:
        told = error.status_code, error.detail
    assert told == (status, message)


def test_a_server_that_stops_takes_no_more_requests() -> None:
    def unreached(*_: Any) -> Any:
        raise AssertionError("it is not asked")

    with pytest.raises(HTTPException, match="503: this server is stopping"):
        _every_request(unreached, SimpleNamespace(gracefully_exit=True), GenerateReqInput(text="a"))
