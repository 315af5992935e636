"""Responses that clients may ask for again take a limited amount of memory."""

from __future__ import annotations

import asyncio
from contextvars import copy_context
from types import MethodType, SimpleNamespace
from typing import Any

import orjson
import pytest
from sglang.srt.entrypoints.openai.protocol import ResponsesRequest
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses

from adaserve.boundary import RequestError
from adaserve.patches.http import response_store


def test_the_ones_that_were_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MAX_CHARACTERS", 1000)
    serving = SimpleNamespace()
    response_store._bound(None, serving)
    responses, messages = serving.response_store, serving.msg_store
    for number in range(6):
        messages[f"resp_{number}"] = ["m" * 200]
        responses[f"resp_{number}"] = "r" * 20
        assert messages["resp_0"], "it is the conversation that goes on"
    assert list(messages) == ["resp_3", "resp_4", "resp_5", "resp_0"]
    assert responses.keys() == messages.keys(), "a response without its conversation cannot be continued"
    assert responses.get("resp_1") is None and responses.get("resp_4") == "r" * 20


def test_storing_again_takes_no_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MAX_CHARACTERS", 1000)
    kept = response_store.Kept()
    for status in ("queued", "completed") * 50:
        kept["resp_0"] = status
        kept["resp_1"] = "r" * 900
    assert kept == {"resp_0": "completed", "resp_1": "r" * 900}
    kept["resp_2"] = "r" * 5000
    assert list(kept) == ["resp_2"], "the newest is kept in any case"


def test_what_is_nested_too_deeply_to_be_measured_is_refused() -> None:
    """orjson reads 1024 levels, and Python writes fewer. SGLang would keep it."""
    kept = response_store.Kept()
    with pytest.raises(RequestError, match="nested too deeply to be kept: send it with store=false"):
        kept["resp_0"] = [orjson.loads("[" * 1020 + "]" * 1020)]
    kept["resp_0"] = ["a"]
    assert kept == {"resp_0": ["a"]}


def with_history() -> Any:
    """SGLang's, of which only the hooked method is called."""
    made = OpenAIServingResponses.__new__(OpenAIServingResponses)
    response_store._bound(None, made)

    def hooked(self: Any, request: Any) -> Any:
        return response_store._as_read_first(OpenAIServingResponses._response_input_history, self, request)

    made._response_input_history = MethodType(hooked, made)
    return made


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_conversation_that_is_dropped_meanwhile_goes_on(
    elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``elsewhere``: the answer is made in another task, as a stream or in the background."""
    monkeypatch.setattr(response_store, "MAX_CHARACTERS", 1000)
    serving = with_history()
    serving.msg_store["resp_0"], serving.response_store["resp_0"] = ["hello"], "r"
    turn = ResponsesRequest(input=[{"role": "user", "content": "more"}], previous_response_id="resp_0")

    async def answered() -> list[Any]:
        serving._response_input_history(turn).append("not of the conversation")
        serving.msg_store["resp_1"] = ["m" * 2000]
        assert "resp_0" not in serving.msg_store

        async def at_the_end() -> list[Any]:
            history: list[Any] = serving._response_input_history(turn)
            return history

        return await (asyncio.create_task(at_the_end()) if elsewhere else at_the_end())

    assert asyncio.run(answered()) == ["hello", {"role": "user", "content": "more"}]


def test_each_request_has_its_own_conversation() -> None:
    """Requests that a client sends without waiting for answers can share a context."""
    history = with_history()._response_input_history
    said = copy_context().run(lambda read: [read(ResponsesRequest(input=text)) for text in "ab"], history)
    assert said == [[{"role": "user", "content": text}] for text in "ab"]
