"""A parser that takes long is given up; one that only waited is not."""

from __future__ import annotations

import json
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.openai import serving_chat
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, ChatCompletionResponse
from sglang.srt.entrypoints.openai.protocol import Tool as ChatTool
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.managers.io_struct import Function, Tool

from adaserve.boundary import RequestError
from adaserve.patches.http import parsers
from adaserve.patches.http.parsers import _checked, _complete_tools, _limited, _objects_only


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsers, "PATIENCE_S", 0.05)


def endless(text: str) -> object:
    """A search that would take years, in a parser that catches what goes wrong."""
    try:
        return re.match("(a+)+b", text)
    except Exception:
        return "caught"


def test_a_search_that_takes_long_is_given_up() -> None:
    with pytest.raises(RequestError, match="not parsed"):
        _limited(endless, "a" * 60)


def test_a_text_that_is_nested_too_deeply_is_given_up() -> None:
    with pytest.raises(RequestError, match="nested too deeply"):
        _limited(json.loads, "[" * 100_000)


def test_what_is_short_or_only_waits_is_not() -> None:
    assert _limited(lambda text: text.upper(), "a") == "A"
    _limited(time.sleep, 0.1)
    end_s = time.process_time() + 0.1
    while time.process_time() < end_s:  # no timer is left behind
        pass


def test_tools_of_the_route_are_like_those_of_a_chat() -> None:
    given = Tool(function=Function(name="f", parameters={"type": "object"}))
    for tools in ([given], [ChatTool(function={"name": "f", "parameters": {"type": "object"}})]):
        seen: list[ChatTool] = []
        _complete_tools(lambda _, got, seen=seen: seen.extend(got), None, tools)
        assert seen[0].function.strict is None and seen[0].function.parameters == {"type": "object"}


@pytest.mark.parametrize("arguments", ['{"a": 1}', '"a"', "[1]", "null", "{", "", None])
def test_a_message_calls_a_tool_with_an_object(arguments: str | None) -> None:
    """Whatever the model has written."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    response = ChatCompletionResponse(id="1", model="m", choices=[choice], usage=usage)
    serving: Any = object.__new__(AnthropicServing)
    _objects_only(serving, response)
    (block,) = serving._convert_response(response).content
    assert (block.type, block.input) == ("tool_use", {"a": 1} if arguments == '{"a": 1}' else {})


def chat(schema: Any) -> ChatCompletionRequest:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return ChatCompletionRequest.model_validate(
        {"messages": [{"role": "user", "content": "a"}], "tools": [tool]}
    )


def wide(properties: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(properties)}}


def test_tools_that_cannot_be_checked_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's check of 4,000 properties takes a second."""
    monkeypatch.setattr(serving_chat, "get_model", lambda: SimpleNamespace(context_length=256))
    serving: Any = object.__new__(OpenAIServingChat)
    serving.is_minimax_m3 = False
    serving.tokenizer_manager = SimpleNamespace(model_config=SimpleNamespace(is_multimodal=False))
    original = OpenAIServingChat._validate_request
    started_s = time.process_time()
    told = _checked(original, serving, chat(wide(4000)))
    assert told is not None and told.startswith("tools are refused, send fewer or smaller ones")
    assert time.process_time() - started_s < 0.5
    assert _checked(original, serving, chat(wide(10))) is None
    assert _checked(original, serving, chat(None)) is None
    assert "the parameters of 'f' must be" in (_checked(original, serving, chat(True)) or "")
