"""Errors in OpenAI's shape, and which grammars are SGLang's own."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.testclient import TestClient
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

from adaserve.patches.http.openai_errors import in_shape, mount
from adaserve.patches.http.validation import _grammar_of_tools, _keep_converted

FLAT = {
    "object": "error",
    "message": "sampling_params.max_new_tokens must be",
    "type": "BadRequest",
    "code": 400,
}


def test_an_error_gets_the_shape_and_the_names_of_openai() -> None:
    answer = in_shape(JSONResponse(FLAT, 400, {"retry-after": "1"}), {"max_tokens"}, ())
    error = {"message": "max_tokens must be", "type": "BadRequest", "param": "max_tokens", "code": 400}
    assert json.loads(answer.body) == {"error": error}
    assert answer.headers["content-length"] == str(len(answer.body)) and answer.headers["retry-after"] == "1"
    assert json.loads(in_shape(answer, {"max_tokens"}, ()).body) == {"error": error}


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_errors_of_anthropics_route_have_its_shape_below_a_prefix_too(prefix: str) -> None:
    """SGLang looks for the route at the beginning of the whole path, --fastapi-root-path included."""
    app = FastAPI()
    for kind in (HTTPException, RequestValidationError):
        app.add_exception_handler(kind, http_server.app.exception_handlers[kind])

    @app.post("/v1/messages")
    async def messages(request: AnthropicMessagesRequest) -> None:
        raise HTTPException(400, "stop is not served here", {"Retry-After": "1"})

    mount(app)
    client = TestClient(app, root_path=prefix)
    body = {"model": "m", "messages": [], "max_tokens": 5}
    responses = [client.post(f"{prefix}/v1/messages", json=sent) for sent in (body, {"model": "m"})]
    assert responses[0].headers["retry-after"] == "1"
    answers = [response.json() for response in responses]
    kinds = [(answer["type"], answer["error"]["type"]) for answer in answers]
    assert kinds == [("error", "invalid_request_error")] * 2
    assert answers[0]["error"]["message"] == "stop is not served here"


def test_an_error_of_anthropic_keeps_its_shape() -> None:
    told = {"type": "BadRequestError", "message": "sampling_params.stop takes at most 32 entries"}
    answer = in_shape(JSONResponse({"type": "error", "error": told}, 400), {"stop_sequences"}, ())
    error = {"type": "invalid_request_error", "message": "stop_sequences takes at most 32 entries"}
    assert json.loads(answer.body) == {"type": "error", "error": error}


def test_an_error_of_ollama_is_a_text() -> None:
    answer = in_shape(JSONResponse(FLAT, 400), path="/api/chat")
    assert json.loads(answer.body) == {"error": "max_new_tokens must be"}
    assert json.loads(in_shape(answer, path="/api/chat").body) == json.loads(answer.body)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"error": "Unauthorized"}, 401),
        ({"detail": [{"msg": "a"}]}, 422),
        ({"object": "error", "message": "what a model wrote"}, 200),
    ],
)
def test_what_is_no_error_of_openai_stays(body: dict[str, Any], status: int) -> None:
    assert json.loads(in_shape(JSONResponse(body, status)).body) == body


def test_what_is_no_json_stays() -> None:
    answer = Response("no", 400)
    assert in_shape(answer) is answer


TOOL = {"type": "function", "function": {"name": "f"}}
TAG = {"type": "structural_tag", "structures": [], "triggers": ["<"]}


@pytest.mark.parametrize(
    ("more", "own"),
    [
        ({"tools": [TOOL]}, True),
        ({}, False),
        ({"tools": [TOOL], "ebnf": "root ::= [a]"}, False),
        ({"tools": [TOOL], "response_format": TAG}, False),
        ({"tools": [TOOL], "response_format": {"type": "text"}}, True),
    ],
)
def test_a_grammar_of_a_client_is_never_taken_for_one_of_tools(more: dict[str, Any], own: bool) -> None:
    chat = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "a"}], **more})
    made, http = object(), SimpleNamespace(state=SimpleNamespace())
    _keep_converted((made, chat), None, chat, http)
    assert _grammar_of_tools(made, http) is own
    assert not _grammar_of_tools(object(), http) and not _grammar_of_tools(made, None)
