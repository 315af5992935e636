"""Refusals name what a client of OpenAI's or Anthropic's has sent, its value and what is accepted."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, ResponsesRequest

from adaserve.boundary import Limits, RequestError, check_request
from adaserve.boundary.wording import MAX_ERRORS, as_sent, cut_short, not_json, wrong_fields

# ruff: noqa: E501 - tables read better with one case a line
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(
    ("model", "body", "message"),
    [
        (ChatCompletionRequest, {"max_tokens": -1}, "max_tokens must be an integer from 0 to 2147483647, got -1"),
        (ChatCompletionRequest, {"max_completion_tokens": -1}, "max_completion_tokens must be an integer from 0"),
        (ChatCompletionRequest, {"min_tokens": -1}, "min_tokens must be an integer from 0 to 2147483647, got -1"),
        (ChatCompletionRequest, {"min_tokens": 9, "max_tokens": 5}, "min_tokens must be at most max_tokens (5), got 9"),
        (ChatCompletionRequest, {"seed": 2**63}, "seed must be an integer from -9223372036854775808 to 9223372036854775807, got 9223372036854775808"),
        (ChatCompletionRequest, {"temperature": -0.5}, "temperature must be a number from 0 to 1000, got -0.5"),
        (ChatCompletionRequest, {"stop": ["a"] * 40}, "stop takes at most 32 entries, got 40"),
        (ChatCompletionRequest, {"logit_bias": {"999999": 1}}, "logit_bias needs keys from 0 to 511, written as text without leading zeros, got '999999'"),
        (ChatCompletionRequest, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}},
         "response_format: a $ref leads back to itself"),
    ],
)  # fmt: skip
def test_sampling_parameters_have_the_names_of_the_client(
    model: type[BaseModel], body: dict[str, Any], message: str
) -> None:
    request: Any = model.model_validate(HELLO | body)
    params = request.to_sampling_params(stop=request.stop or [], model_generation_config={})
    with pytest.raises(RequestError) as error:
        check_request({"text": "a", "sampling_params": params}, Limits(vocab_size=512))
    told = as_sent(str(error.value), request.model_fields_set, model.model_fields)
    assert told.startswith(message)


@pytest.mark.parametrize(
    ("own", "model", "sent", "told"),
    [
        ("text[1] must be text, got 5", CompletionRequest, {"prompt"}, "prompt[1] must be text, got 5"),
        ("text holds '\\ud800'", ChatCompletionRequest, {"messages"}, "messages holds '\\ud800'"),
        ("text holds '\\ud800'", ResponsesRequest, {"input"}, "input holds '\\ud800'"),
        ("input_ids[1] must be a token id", CompletionRequest, {"prompt"}, "prompt[1] must be a token id"),
        ("input_ids[1] must be a token id", ChatCompletionRequest, {"messages", "input_ids"}, "input_ids[1] must be a token id"),
        ("top_logprobs_num must be", CompletionRequest, {"prompt", "logprobs"}, "logprobs must be"),
        ("top_logprobs_num must be", ChatCompletionRequest, {"logprobs", "top_logprobs"}, "top_logprobs must be"),
        ("sampling_params.max_new_tokens must be", ResponsesRequest, {"input", "max_output_tokens"}, "max_output_tokens must be"),
        ("max_completion_tokens is too large: 9", ChatCompletionRequest, {"messages", "max_tokens"}, "max_tokens is too large: 9"),
        ("sampling_params.structural_tag.schema: $ref", ChatCompletionRequest, {"messages", "tools"}, "tools.schema: $ref"),
        ("what may be generated, up to max_new_tokens, may", CompletionRequest, {"prompt"}, "what may be generated, up to max_tokens, may"),
        ("image_data is refused: this model takes text only", ChatCompletionRequest, {"messages"}, "messages is refused: this model takes text only"),
        ("the prompt must hold at least 1 token", CompletionRequest, {"prompt"}, "the prompt must hold at least 1 token"),
        ("sampling_params.stop takes at most 32", ChatCompletionRequest, {"stop"}, "stop takes at most 32"),
        ("sampling_params.stop takes at most 32", AnthropicMessagesRequest, {"stop_sequences"}, "stop_sequences takes at most 32"),
        ("sampling_params.max_new_tokens must be", AnthropicMessagesRequest, {"max_tokens"}, "max_tokens must be"),
        ("sampling_params.json_schema: $ref", AnthropicMessagesRequest, {"output_config", "tools"}, "output_config: $ref"),
        ("schema_ is required for", ChatCompletionRequest, {"response_format"}, "response_format.json_schema.schema is required for"),
        ("text holds '\\ud800'", AnthropicMessagesRequest, {"messages"}, "messages holds '\\ud800'"),
    ],
)  # fmt: skip
def test_every_route_has_names_of_its_own(
    own: str, model: type[BaseModel], sent: set[str], told: str
) -> None:
    assert as_sent(own, sent, model.model_fields) == told


def wrong(model: type[BaseModel], body: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as error:
        model.model_validate(body)
    errors: list[Any] = [{**e, "loc": ("body", *e["loc"])} for e in error.value.errors()]
    return wrong_fields(errors, body)


@pytest.mark.parametrize(
    ("model", "body", "told"),
    [
        (ChatCompletionRequest, HELLO | {"temperature": "hot"}, "temperature: Input should be a valid number, unable to parse string as a number, got 'hot'"),
        (ChatCompletionRequest, {}, "messages: Field required"),
        (ChatCompletionRequest, {"messages": "hello"}, "messages: Input should be a valid list, got 'hello'"),
        (CompletionRequest, {"prompt": "a", "max_tokens": 0}, "max_tokens: max_tokens must be positive, got 0"),
        (CompletionRequest, {"model": "m"}, "prompt: Field required"),
        (CompletionRequest, {"prompt": "a", "logit_bias": {"5": "x"}}, "logit_bias.5: Input should be a valid number"),
        (ChatCompletionRequest, {"messages": [HELLO["messages"][0], {"role": "user", "content": None}]},
         "messages[1].content: Input should be a valid string, got None; messages[1].content: Input should be a valid list, got None"),
        (ChatCompletionRequest, {"messages": [{"role": "assistant", "content": 5}]}, "messages[0].content: Input should be a valid string, got 5"),
        (ChatCompletionRequest, {"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role: 'role' must be one of"),
        (ChatCompletionRequest, HELLO | {"tools": [{"type": "function"}]}, "tools[0].function: Field required"),
        (ChatCompletionRequest, HELLO | {"response_format": {"type": "xml"}}, "response_format.type: Input should be 'text', 'json_object' or 'json_schema', got 'xml'"),
        (CompletionRequest, {"prompt": "a", "response_format": "json"}, "response_format: Input should be an object, got 'json'"),
        (ChatCompletionRequest, HELLO | {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name: Field required"),
        (ChatCompletionRequest, HELLO | {"response_format": {"type": "json_schema", "json_schema": "x"}}, "response_format.json_schema: Input should be an object, got 'x'"),
        (ResponsesRequest, {"input": "a", "text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name: Field required"),
        (ResponsesRequest, {"input": "a", "text": {"format": "json"}}, "text.format: Input should be an object, got 'json'"),
        (ChatCompletionRequest, HELLO | {"tool_choice": {"type": 5, "function": {}}}, "tool_choice.type: Input should be 'function', got 5"),
    ],
)  # fmt: skip
def test_a_wrong_body_is_told_by_its_fields(model: type[BaseModel], body: dict[str, Any], told: str) -> None:
    assert wrong(model, body).startswith(told)


def test_what_kinds_of_a_format_lack_is_told_of_its_own_kind_only() -> None:
    told = wrong(
        CompletionRequest, {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {}}}
    )
    assert told == "response_format.json_schema.name: Field required"
    told = wrong(CompletionRequest, {"prompt": "a", "response_format": {"type": "json"}})
    assert "'json_object'" in told and "structures" not in told


def test_a_part_of_a_message_is_told_as_what_it_says_that_it_is() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url"}]
    told = wrong(ChatCompletionRequest, {"messages": [{"role": "user", "content": parts}]})
    assert told == "messages[0].content[1].image_url: Field required"
    told = wrong(ChatCompletionRequest, {"messages": [{"role": "user", "content": [{"type": "page"}]}]})
    assert "Input should be 'text', got 'page'" in told and "required" not in told


def test_what_is_no_json_is_told_with_its_place() -> None:
    error = {
        "type": "json_invalid",
        "loc": ("body", 5),
        "msg": "JSON decode error",
        "input": {},
        "ctx": {"error": "Expecting value"},
    }
    assert wrong_fields([error], "{") == "the body: JSON decode error: Expecting value"


def test_a_parameter_of_the_query_is_not_looked_for_in_the_body() -> None:
    error = {
        "type": "int_parsing",
        "loc": ("query", "level"),
        "msg": "Input should be an integer",
        "input": "x",
    }
    assert wrong_fields([error], None) == "level of the query: Input should be an integer, got 'x'"


def test_errors_are_few_and_short() -> None:
    errors = [{"loc": ("body",), "msg": "wrong", "input": "x" * 10_000_000}] * 1000
    assert len(str(cut_short(errors))) < 2000
    assert cut_short([{"msg": "wrong"}]) == [{"msg": "wrong"}]


def test_very_many_errors_are_told_in_a_line() -> None:
    told = wrong(ChatCompletionRequest, {"messages": [{"role": "nobody", "content": 5}] * 20_000})
    assert told.count("; ") == MAX_ERRORS and told.endswith("; and more") and len(told) < 1000


JSON = "application/json"
NOT_JSON = {"type": "json_invalid", "loc": ("body", 0), "msg": "JSON decode error", "ctx": {"error": "x"}}
NO_DICT = {"type": "dict_type", "loc": ("body",), "msg": "Input should be a valid dictionary", "input": b"{}"}
MEDIA = {"type": "value_error", "loc": ["header", "content-type"], "msg": "Unsupported Media Type"}


@pytest.mark.parametrize(
    ("error", "body", "kind", "encoding", "told"),
    [
        (NO_DICT, b"{}", "application/x-www-form-urlencoded", "", "the body must be JSON, with the header content-type: application/json, got 'application/x-www-form-urlencoded'"),
        (NO_DICT, b"{}", "", "", "the body must be JSON, with the header content-type: application/json, which is missing"),
        (MEDIA, None, "text/plain", "", "the body must be JSON, with the header content-type: application/json, got 'text/plain'"),
        (NOT_JSON, "", JSON, "gzip", "the body is encoded as 'gzip': send it as it is, without content-encoding"),
        (NOT_JSON, "", JSON, "identity", None),
        (NOT_JSON, "", JSON, "", None),
        (NO_DICT, [], JSON, "gzip", None),
    ],
)  # fmt: skip
def test_a_body_that_was_sent_wrongly_is_told_how_to_be_sent(
    error: dict[str, Any], body: Any, kind: str, encoding: str, told: str | None
) -> None:
    assert not_json([error], body, kind, encoding) == told
