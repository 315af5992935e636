"""Requests as well-known clients send them: served, or refused in words that the client knows."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from adaserve.server import ServerProcess
from tests.clients.conftest import MODEL

# ruff: noqa: E501 - tables read better with one case a line
CHAT, COMPLETIONS, RESPONSES, GENERATE, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/generate",
    "/v1/messages",
)
SHORT: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "How does a list differ from a tuple?"}], "max_tokens": 8, "ignore_eos": True},
    COMPLETIONS: {"prompt": "def main(argv):\n", "max_tokens": 8, "ignore_eos": True},
    RESPONSES: {"input": "What is a list?", "max_output_tokens": 12, "temperature": 0},
    GENERATE: {"text": "def main(argv):\n", "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}},
    MESSAGES: {"messages": [{"role": "user", "content": "What is a list?"}], "max_tokens": 8},
}  # fmt: skip


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def text(words: str = "What is a list?") -> dict[str, str]:
    return {"type": "text", "text": words}


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
PARAMETERS = {
    "$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "required": ["path"], "additionalProperties": False,
    "properties": {"path": {"type": "string", "enum": ["src", "docs"], "description": "Where to look. " * 20}, "lines": {"type": ["integer", "null"], "minimum": 1}},
}  # fmt: skip
ENDING = {
    "type": "object",
    "properties": {"a": {"enum": ["x"]}},
    "required": ["a"],
    "additionalProperties": False,
}
"""Arguments that come to an end, but for blanks: a tool's grammar allows these with the server's flag as well,
and one sample in seventeen wrote too many to finish."""


def tools(count: int, **more: Any) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": f"tool_{i}",
                "description": "Reads. " * 40,
                "parameters": PARAMETERS,
                **more,  # may replace them
            },
        }
        for i in range(count)
    ]


CALLED = [
    {"role": "system", "content": "Be short."}, {"role": "user", "content": "Look.", "name": "Ada"},
    {"role": "assistant", "content": None, "refusal": None, "function_call": None, "audio": None,
     "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "tool_0", "arguments": '{"path": "a"}'}}]},
    {"role": "tool", "tool_call_id": "call_1", "name": "tool_0", "content": [text("a file")]},
]  # fmt: skip
STRICT = {"type": "json_schema", "json_schema": {"name": "yes", "strict": True, "schema": {
    "type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}}}  # fmt: skip
NULLS = (
    "frequency_penalty", "presence_penalty", "n", "logprobs", "top_logprobs", "stop", "seed", "stream", "stream_options",
    "temperature", "top_p", "user", "tools", "tool_choice", "parallel_tool_calls", "response_format", "logit_bias",
    "max_completion_tokens", "metadata", "store", "service_tier", "reasoning_effort", "modalities", "prediction", "audio",
    "functions", "function_call", "top_k", "min_p", "repetition_penalty", "ignore_eos", "chat_template_kwargs",
)  # fmt: skip
"""Sent with `min_tokens`: a sample may end at its first token, and then nothing is written."""
CODEX = {
    "instructions": "You are a coding agent.", "stream": True, "store": False, "parallel_tool_calls": False, "tool_choice": "auto",
    "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0199", "reasoning": {"effort": "medium", "summary": "auto"},
    "text": {"verbosity": "low"},
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is a list?"}]}],
    "tools": [
        {"type": "function", "name": "shell", "description": "Runs a command", "strict": False, "parameters": PARAMETERS},
        {"type": "custom", "name": "apply_patch", "description": "Edits files",
         "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'}},
    ],
}  # fmt: skip

SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "null for everything": (CHAT, {"min_tokens": 4, **dict.fromkeys(NULLS)}),
    "null in completions": (COMPLETIONS, {"min_tokens": 4, **dict.fromkeys(("best_of", "echo", "suffix", *NULLS))}),
    "null for min_tokens": (CHAT, {"min_tokens": None}),
    "null in responses": (RESPONSES, dict.fromkeys(("service_tier", "tools", "tool_choice", "store", "metadata", "text", "stop", "top_p", "frequency_penalty"))),
    "LangChain": (CHAT, {"temperature": 0.7, "n": 1, "stream": False, "parallel_tool_calls": True, "tools": tools(3), "tool_choice": "auto"}),
    "LiteLLM": (CHAT, {"stream": True, "stream_options": {"include_usage": True}, "user": "u-1", "metadata": {"trace": "1"}, "top_k": 40, "min_p": 0}),
    "Vercel AI SDK": (CHAT, {"temperature": 0, "top_p": 1, "seed": -1, "response_format": {"type": "text"}, "reasoning_effort": "low", "verbosity": "low"}),
    "Open WebUI": (CHAT, {"stream": True, "stop": ["</s>", "</s>"], "temperature": 1e-6, "repetition_penalty": 1, "logit_bias": {str(i): -100 for i in range(300)}, "keep_alive": "5m"}),
    "Dify": (CHAT, {"stream": True, "temperature": 2, "frequency_penalty": 0, "presence_penalty": 0, "response_format": {"type": "text"}, "user": "a" * 64}),
    "n8n": (CHAT, {"n": 1, "temperature": 0.7, "top_p": 1, "frequency_penalty": 0, "presence_penalty": 0, "stream": True, "timeout": 60000, "max_retries": 2}),
    "Cline": (CHAT, {"messages": [{"role": "system", "content": "You code."}, user(text(), text("It is in a file."))], "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}),
    "aider": (CHAT, {"temperature": 0, "stream": True, "max_completion_tokens": 8, "cache_control": {"type": "ephemeral"}}),
    "continue.dev": (COMPLETIONS, {"suffix": "\n", "stream": True, "temperature": 0.01, "prompt": "for i in range(", "stop": ["<fim_prefix>", "/src/", "#- coding: utf-8", "```", "\nclass ", "\n\n\n"]}),
    "Codex": (RESPONSES, CODEX),
    "vLLM's extra body": (CHAT, {"guided_decoding_backend": "xgrammar", "best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "prompt_logprobs": None, "add_generation_prompt": True, "include_stop_str_in_output": False}),
    "after a tool": (CHAT, {"messages": CALLED, "tools": tools(1)}),
    "128 tools": (CHAT, {"tools": tools(128), "tool_choice": "auto", "parallel_tool_calls": False}),
    "a tool by name": (CHAT, {"tools": tools(2, strict=True, parameters=ENDING), "tool_choice": {"type": "function", "function": {"name": "tool_1"}}, "temperature": 0, "max_tokens": 200}),
    "no tool": (CHAT, {"tools": tools(1), "tool_choice": "none"}),
    "the developer": (CHAT, {"messages": [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "Hi", "name": "Ada"}]}),
    "an empty answer before": (CHAT, {"messages": [user(text()), {"role": "assistant", "content": ""}, user(text("And a tuple?"))]}),
    "what OpenAI stores": (CHAT, {"store": True, "metadata": {}, "service_tier": "auto", "modalities": ["text"], "prediction": {"type": "content", "content": "a"}, "safety_identifier": "x"}),
    "log probabilities": (CHAT, {"logprobs": True, "top_logprobs": 20}),
    "log probabilities of nothing else": (CHAT, {"logprobs": True, "top_logprobs": 0}),
    "stream options without a stream": (CHAT, {"stream_options": {"include_usage": True}}),
    "a JSON object": (CHAT, {"response_format": {"type": "json_object"}, "max_tokens": 60}),
    "a strict schema": (CHAT, {"response_format": STRICT, "max_tokens": 60}),
    "more than there are tokens": (CHAT, {"top_k": 1_000_000}),
    "a form's empty stop": (COMPLETIONS, {"stop": "", "stop_regex": ""}),
    "token ids": (COMPLETIONS, {"prompt": [5, 17, 33]}),
    "lists of token ids": (COMPLETIONS, {"prompt": [[5, 17], [33]], "logprobs": 0}),
    "several prompts": (COMPLETIONS, {"prompt": ["a b", "c d"], "n": 2, "echo": True, "best_of": 2}),
    "lm-evaluation-harness": (COMPLETIONS, {"prompt": [[5, 17, 33]], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}),
    "sgl.gen": (GENERATE, {"sampling_params": {
        "skip_special_tokens": True, "spaces_between_special_tokens": True, "max_new_tokens": 8, "min_new_tokens": 4, "n": 1, "stop": [],
        "stop_token_ids": [], "stop_regex": [], "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0,
        "presence_penalty": 0.0, "ignore_eos": False, "regex": None, "json_schema": None}}),
    "null in sampling parameters": (GENERATE, {"sampling_params": {"max_new_tokens": 8, "min_new_tokens": 4, **dict.fromkeys(("stop", "temperature", "top_p", "top_k", "min_p", "regex", "logit_bias", "sampling_seed"))}, "stream": False}),
}  # fmt: skip

REFUSED: dict[str, tuple[str, dict[str, Any], str | None, str]] = {
    "an image": (CHAT, {"messages": [user(text(), IMAGE)]}, None, "image"),
    "no messages": (CHAT, {"messages": []}, None, "Messages cannot be empty"),
    "no prompt": (COMPLETIONS, {"prompt": ""}, None, "Prompt cannot be empty"),
    "more than fits": (CHAT, {"max_tokens": 8190}, None, "maximum context length"),
    "more than any request has": (CHAT, {"max_tokens": 1_000_000}, "max_tokens", "max_tokens is too large: 1000000"),
    "a long text": (CHAT, {"messages": [user(text("the fox " * 100_000))]}, None, "longer than the model's context length"),
    "max_tokens -1": (CHAT, {"max_tokens": -1}, "max_tokens", "max_tokens must be an integer from 0 to 2147483647, got -1"),
    "max_completion_tokens": (CHAT, {"max_completion_tokens": -5}, "max_completion_tokens", "max_completion_tokens must be an integer from 0"),
    "a seed": (CHAT, {"seed": 2**63}, "seed", "seed must be an integer from -9223372036854775808 to 9223372036854775807"),
    "streamed": (CHAT, {"temperature": -1, "stream": True}, "temperature", "temperature must be a number from 0 to 1000, got -1"),
    "logprobs": (COMPLETIONS, {"logprobs": 5000}, "logprobs", "logprobs must be an integer from 0 to 1024, got 5000"),
    "a token id": (COMPLETIONS, {"prompt": [1_000_000]}, "prompt", "prompt[0] must be a token id from 0 to"),
    "output tokens": (RESPONSES, {"max_output_tokens": 1}, "max_output_tokens", "max_output_tokens must be an integer from 2 to 2147483647, got 1"),
    "stops": (CHAT, {"stop": ["a"] * 40}, "stop", "stop takes at most 32 entries, got 40"),
    "an empty stop among others": (CHAT, {"stop": ["a", ""]}, "stop", "stop[1] must be text of 1 to 512 characters, got ''"),
    "a wrong type": (CHAT, {"temperature": "hot"}, "temperature", "temperature: Input should be a valid number, unable to parse string as a number, got 'hot'"),
    "user content of null": (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages", "messages[0].content: Input should be a valid string, got None"),
    "an SLO": (CHAT, {"custom_params": {"slo_tpot_ms": -5}}, "custom_params", "custom_params.slo_tpot_ms is -5: expected a number from 0.1"),
    "JSON as vLLM has it": (CHAT, {"guided_json": {"type": "object"}}, None, "guided_json is not served: use response_format, regex or ebnf"),
    "a choice as vLLM has it": (COMPLETIONS, {"structured_outputs": {"choice": ["yes", "no"]}}, None, "structured_outputs is not served: use response_format"),
    "functions of old": (CHAT, {"functions": [{"name": "f", "parameters": {}}]}, None, "functions is not served: use tools"),
    "a grammar for responses": (RESPONSES, {"response_format": STRICT}, None, "response_format is not served: use text.format"),
}  # fmt: skip


def send(server: ServerProcess, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + path, json={"model": MODEL, **SHORT[path], **body}, timeout=120)


def written(path: str, answer: httpx.Response) -> str:
    """Everything that the model has written, tool calls included."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    else:
        events = answer.json() if isinstance(answer.json(), list) else [answer.json()]
    parts: list[str] = []
    for event in events:
        assert "error" not in event or event["error"] is None, event
        parts.append(event.get("text") if path == GENERATE else "")
        parts.append(event.get("delta") if event.get("type") == "response.output_text.delta" else "")
        parts += [part.get("text") for item in event.get("output", ()) for part in item.get("content") or ()]
        for choice in event.get("choices", ()):
            message = choice.get("message") or choice.get("delta") or {}
            parts += [choice.get("text"), message.get("content")]
            parts += [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
    return "".join(part or "" for part in parts)


@pytest.mark.parametrize("name", SERVED)
def test_a_real_request_is_served(server: ServerProcess, name: str) -> None:
    path, body = SERVED[name]
    answer = send(server, path, body)
    assert answer.status_code == 200, answer.text
    assert written(path, answer), answer.text


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_one_of_openai(server: ServerProcess, name: str) -> None:
    path, body, param, words = REFUSED[name]
    answer = send(server, path, body)
    assert answer.status_code == 400, answer.text
    assert answer.json().keys() == {"error"}
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert words in error["message"] and error["param"] == param and "sampling_params" not in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"stop_sequences": ["a"] * 40}, "stop_sequences takes at most 32 entries, got 40"),
        ({"temperature": -1}, "temperature must be a number from 0 to 1000, got -1"),
        ({"max_tokens": 2**40}, "max_tokens is too large: 1099511627776"),
        ({"temperature": "hot"}, "temperature: Input should be a valid number"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content: Input should be a valid string, got 5"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"$ref": "#"}}}}, "output_config: a $ref leads back to itself"),
        ({"output_format": {"type": "json_schema", "schema": {}}}, "output_format is not served: use output_config.format"),
    ],
)  # fmt: skip
def test_a_refusal_is_one_of_anthropic(
    server: ServerProcess, body: dict[str, Any], words: str, stream: bool
) -> None:
    answer = send(server, MESSAGES, {**body, "stream": stream})
    assert answer.status_code == 400, answer.text
    told = answer.json()
    assert told.keys() == {"type", "error"} and told["type"] == "error"
    assert told["error"].keys() == {"type", "message"} and told["error"]["type"] == "invalid_request_error"
    assert words in told["error"]["message"] and "sampling_params" not in told["error"]["message"]
