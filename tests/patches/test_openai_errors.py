"""Errors in OpenAI's shape, and which grammars are SGLang's own."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException
from fastapi.responses import JSONResponse, Response
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses

from adaserve.patches.boundary import _grammar_of_tools, _keep_converted, _responses_status
from adaserve.patches.openai_errors import in_shape

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


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_response_that_is_not_made_has_the_status_of_its_error(status: int) -> None:
    """SGLang says 400: that the client is to blame, and must not try again."""

    async def fails() -> Any:
        raise HTTPException(status, "late")
        yield

    def serving(algorithm: str | None) -> OpenAIServingResponses:
        made = OpenAIServingResponses.__new__(OpenAIServingResponses)
        args = SimpleNamespace(speculative_algorithm=algorithm)
        made.tokenizer_manager = SimpleNamespace(server_args=args)
        return made

    original = OpenAIServingResponses.responses_full_generator
    unused: Any = (None, None, fails(), None, "m", None, None)
    answer = asyncio.run(_responses_status(original, serving("ADASERVE"), *unused, require_reasoning=False))
    assert answer.status_code == status and json.loads(answer.body)["error"]["message"] == "late"
    unused = (None, None, fails(), None, "m", None, None)
    with pytest.raises(HTTPException):
        asyncio.run(_responses_status(original, serving(None), *unused, require_reasoning=False))


def test_an_error_of_anthropic_keeps_its_shape() -> None:
    told = {"type": "BadRequestError", "message": "sampling_params.stop takes at most 32 entries"}
    answer = in_shape(JSONResponse({"type": "error", "error": told}, 400), {"stop_sequences"}, ())
    error = {"type": "invalid_request_error", "message": "stop_sequences takes at most 32 entries"}
    assert json.loads(answer.body) == {"type": "error", "error": error}


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
