"""Ollama's routes: what refusals say, how answers end, and what options mean."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.ollama.serving import OllamaServing
from sglang.srt.managers.io_struct import GenerateReqInput

from adaserve.boundary import Limits, RequestError, check_request
from adaserve.patches.http.ollama import _ollama, _ollama_options, _ollama_stream
from adaserve.patches.http.validation import STARTED


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("route", ["chat", "generate"])
def test_a_stream_for_ollama_holds_the_whole_text(incremental: bool, route: str) -> None:
    """SGLang drops what comes with the end: several tokens, where several are accepted at once."""
    parts = ["the quick", " fox", " jumps over"]

    async def generate(obj: Any, _: Any) -> Any:
        if (outputs := vars(obj).pop(STARTED, None)) is not None:
            async for out in outputs:
                yield out
            return
        for i, part in enumerate(parts):
            reason = {"type": "length"} if i == len(parts) - 1 else None
            text = part if incremental else "".join(parts[: i + 1])
            counts = {"prompt_tokens": 5, "completion_tokens": i + 1}
            yield {"text": text, "meta_info": {"finish_reason": reason, **counts}}

    manager = SimpleNamespace(incremental_streaming_output=incremental, generate_request=generate)
    original = getattr(OllamaServing, f"_stream_{route}_response")

    async def streamed() -> list[dict[str, Any]]:
        obj = GenerateReqInput(text="a", stream=True)
        response = await _ollama_stream(original, OllamaServing(manager), obj, None, "m")
        return [json.loads(line) async for line in response.body_iterator]

    events = asyncio.run(streamed())
    texts = [e["message"]["content"] if route == "chat" else e["response"] for e in events]
    assert texts == [*parts, ""] and [e["done"] for e in events] == [False, False, False, True]
    assert [e["done_reason"] for e in events] == [None, None, None, "length"], "it was cut"
    assert (events[-1]["prompt_eval_count"], events[-1]["eval_count"]) == (5, 3)


@pytest.mark.parametrize(("end", "reason"), [("length", "length"), ("stop", "stop"), ("abort", "stop")])
@pytest.mark.parametrize("route", ["chat", "generate"])
def test_an_answer_for_ollama_says_whether_it_was_cut(route: str, end: str, reason: str) -> None:
    """SGLang says of every answer that it ended by itself."""

    async def generate(obj: Any, _: Any) -> Any:
        if (outputs := vars(obj).pop(STARTED, None)) is not None:
            async for out in outputs:
                yield out
            return
        await asyncio.sleep(0.05)
        yield {"text": "a", "meta_info": {"finish_reason": {"type": end}}}

    manager = SimpleNamespace(generate_request=generate)
    original = getattr(OllamaServing, f"_generate_{route}_response")
    made = GenerateReqInput(text="a")
    answer = asyncio.run(_ollama(original, OllamaServing(manager), made, None, "m"))
    assert answer.done_reason == reason
    assert answer.total_duration > 25_000_000, "nanoseconds, with the 50 ms that it took"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_predict": -5}, "num_predict must be an integer from 0 to 2147483647, got -5"),
        ({"seed": "x"}, "seed must be an integer from"),
        ({"temperature": "hot"}, "temperature must be a number from 0 to 1000, got 'hot'"),
        ({"stop": 5}, "stop must be"),
        ({"min_p": 2}, "min_p must be a number from 0 to 1, got 2"),
        ({"repeat_penalty": 5}, "repeat_penalty must be a number from 0.01 to 2, got 5"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_ollamas_options_are_refused_by_their_own_names(
    stream: bool, options: dict[str, Any], told: str
) -> None:
    async def generate(obj: Any, _: Any) -> Any:
        check_request({"text": obj.text, "sampling_params": obj.sampling_params}, Limits(vocab_size=512))
        yield {}

    manager = SimpleNamespace(incremental_streaming_output=False, generate_request=generate)
    serving = OllamaServing(manager)
    params = serving._convert_options_to_sampling_params(options)
    _ollama_options(params, serving, options)
    obj = GenerateReqInput(text="a", sampling_params=params, stream=stream)
    hook, kind = (_ollama_stream, "stream") if stream else (_ollama, "generate")
    original = getattr(OllamaServing, f"_{kind}_generate_response")
    response = asyncio.run(hook(original, serving, obj, None, "m"))
    assert response.status_code == 400 and json.loads(response.body)["error"].startswith(told)


@pytest.mark.parametrize("prompt", ["messages", "prompt"])
def test_ollamas_prompt_is_refused_by_its_own_name(prompt: str) -> None:
    def generate(*_: Any) -> Any:
        raise RequestError("input_ids holds nothing" if prompt == "messages" else "text holds nothing")

    serving = OllamaServing(SimpleNamespace(generate_request=generate))
    obj = GenerateReqInput(**({"input_ids": [1]} if prompt == "messages" else {"text": "a"}))
    response = asyncio.run(_ollama(OllamaServing._generate_chat_response, serving, obj, None, "m"))
    assert json.loads(response.body) == {"error": f"{prompt} holds nothing"}


@pytest.mark.parametrize(("asked", "tokens"), [(-1, None), (-2, None), (7, 7), (-3, -3)])
def test_ollamas_options_have_their_own_meanings(asked: int, tokens: int | None) -> None:
    params = {"max_new_tokens": asked, "seed": 5}
    _ollama_options(params, None)
    assert params == {"max_new_tokens": tokens, "sampling_seed": 5}


@pytest.mark.parametrize(
    ("options", "passed"),
    [
        ({"min_p": 0.1, "repeat_penalty": 1.3}, {"min_p": 0.1, "repetition_penalty": 1.3}),
        ({"repeat_penalty": 1.3, "repeat_last_n": 64}, {"repetition_penalty": 1.3}),
        ({"repeat_penalty": 1.3, "repeat_last_n": 0}, {}),
        ({"num_ctx": 4096}, {}),
        (None, {}),
    ],
)
def test_ollamas_options_that_sglang_leaves_out_are_passed_on(
    options: dict[str, Any] | None, passed: dict[str, Any]
) -> None:
    params = OllamaServing(None)._convert_options_to_sampling_params(options)
    before = dict(params)
    _ollama_options(params, None, options)
    assert params == before | passed
