"""The OpenAI Python SDK: streaming, chat, completions, tools, structured output, logprobs, errors."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from adaserve.server import ServerProcess
from tests.clients.conftest import MODEL, Counts

openai = pytest.importorskip("openai", reason="the OpenAI SDK is not installed (SGLang brings it)")

PROMPT = "def main(argv):\n"
MESSAGES: Any = [{"role": "user", "content": "How does a list differ from a tuple?"}]
FULL = {"ignore_eos": True}
"""The small model may end its answer early; tests that count tokens ask for all of them."""
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "strict": True,  # without it SGLang accepts any JSON value as arguments
        "parameters": {
            "type": "object",
            "properties": {"unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
            "required": ["unit"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def client(server: ServerProcess) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=120)


def test_models(client: Any) -> None:
    assert [m.id for m in client.models.list()] == [MODEL]


def test_completions_stream_as_they_answer_whole(client: Any, counted: Counts) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    options["extra_body"] = FULL
    headers = {"x-slo-tpot-ms": "50", "x-slo-class": "coding"}
    whole = client.completions.create(**options, extra_headers=headers)
    chunks = list(
        client.completions.create(
            **options, stream=True, stream_options={"include_usage": True}, extra_headers=headers
        )
    )
    text = "".join(c.choices[0].text for c in chunks if c.choices)
    assert text == whole.choices[0].text and text
    assert whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 40
    for answer in (whole, chunks[-1]):
        report = answer.metadata["slo"]
        assert report["class"] == "custom" and report["tpot_slo_ms"] == 50
        assert report["tpot_ms"] > 0 and report["met"] == (report["tpot_ms"] <= 50)
    assert counted() == {"custom": 2}


def test_slos_in_the_body(client: Any, counted: Counts) -> None:
    body = {"custom_params": {"slo_class": "summarization", "slo_tpot_ms": 123}}
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5, extra_body=body)
    assert answer.metadata["slo"]["tpot_slo_ms"] == 123
    assert counted() == {"custom": 1}


def test_chat_streams_as_it_answers_whole(client: Any) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 30, "temperature": 0}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content and text
    assert whole.choices[0].message.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_several_choices(client: Any) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=12, n=3, temperature=1.0, extra_body=FULL
    )
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == 36


@pytest.mark.parametrize("tpot_ms", [0.1, 60_000])
def test_several_choices_met_their_slo_if_each_did(client: Any, tpot_ms: float) -> None:
    headers = {"x-slo-tpot-ms": str(tpot_ms)}
    common: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "extra_body": FULL, "extra_headers": headers}
    ways = (
        (client.completions, {"prompt": [PROMPT, "import os"], "n": 2}, 4),
        (client.chat.completions, {"messages": MESSAGES, "n": 2}, 2),
    )
    for route, asked, answers in ways:
        whole = route.create(**common, **asked)
        *_, last = route.create(**common, **asked, stream=True, stream_options={"include_usage": True})
        for told in (whole.metadata["slo"], last.metadata["slo"]):
            assert [one["met"] for one in told["answers"]] == [tpot_ms == 60_000] * answers
            assert told["met"] is (tpot_ms == 60_000) and "answers" not in told["answers"][0]
            assert told["tpot_ms"] == max(one["tpot_ms"] for one in told["answers"])


def test_responses_say_whether_they_met_their_slo(client: Any) -> None:
    """Whole and as a stream, two at a time, each of its own SLO, beside what the client noted."""
    options: dict[str, Any] = {"model": MODEL, "input": "How?", "max_output_tokens": 12, "temperature": 0}
    options["metadata"] = {"trip": "7"}

    def told(tpot_ms: float, stream: bool) -> dict[str, Any]:
        answer = client.responses.create(
            **options, stream=stream, extra_headers={"x-slo-tpot-ms": str(tpot_ms)}
        )
        if stream:
            first, *_, last = answer
            assert first.response.metadata == {"trip": "7"}, "nothing is known at its start"
            answer = last.response
        assert answer.metadata["trip"] == "7"
        report: dict[str, Any] = json.loads(answer.metadata["slo"])  # OpenAI's metadata are texts
        return report

    for stream in (False, True):
        with ThreadPoolExecutor() as pool:
            fast, slow = pool.map(told, (0.1, 60_000), (stream, stream))
        assert (fast["tpot_slo_ms"], fast["met"]) == (0.1, False) and fast["tpot_ms"] > 0.1
        assert (slow["tpot_slo_ms"], slow["met"]) == (60_000, True)


def test_logprobs(client: Any) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=10, temperature=0, logprobs=3, extra_body=FULL
    )
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 10
    for logprob, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        # Greedy: the chosen token is the likeliest of the top ones.
        assert logprob == pytest.approx(max(top.values()), abs=1e-3) and logprob <= 0
    chat = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=6,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        extra_body=FULL,
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == 6 and all(len(t.top_logprobs) == 2 for t in content)
    assert all(math.exp(t.logprob) <= 1 + 1e-6 for t in content)


@pytest.mark.parametrize("stream", [False, True])
def test_tools(client: Any, stream: bool) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather?"}],
        tools=[WEATHER],
        tool_choice="required",
        temperature=0,
        max_tokens=200,
        stream=stream,
    )
    if stream:
        parts = [t for c in answer if c.choices for t in c.choices[0].delta.tool_calls or ()]
        calls = [t.function for t in parts if t.index == 0]
        name = "".join(c.name or "" for c in calls)
        arguments = "".join(c.arguments or "" for c in calls)
    else:
        call = answer.choices[0].message.tool_calls[0].function
        name, arguments = call.name, call.arguments
    assert name == "get_weather"
    assert json.loads(arguments)["unit"] in ("celsius", "fahrenheit")


def test_structured_output(client: Any) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        temperature=0,
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema}},
    )
    assert isinstance(json.loads(answer.choices[0].message.content)["ok"], bool)


@pytest.mark.parametrize("headers", [{"x-slo-tpot-ms": "fast"}, {"x-slo-class": "nobody"}])
def test_a_bad_slo_is_a_bad_request(client: Any, headers: dict[str, str], counted: Counts) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5, extra_headers=headers)
    assert next(iter(headers.values())) in str(error.value)
    assert counted() == {}
