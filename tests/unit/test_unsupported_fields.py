"""Fields that change an answer elsewhere are refused where they would do nothing."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from pydantic import BaseModel
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, ResponsesRequest
from sglang.srt.managers.io_struct import GenerateReqInput

from adaserve.boundary import RequestError, unsupported_fields
from adaserve.boundary.unsupported_fields import (
    _OWN,
    _VARIABLES,
    CONSTRAINTS,
    INSTEAD,
    renamed,
    require_supported_fields,
)

CHAT, COMPLETIONS, RESPONSES, MESSAGES, GENERATE, VERTEX = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate",
    "/vertex_generate",
)  # fmt: skip
SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("path", "field", "use"),
    [
        (CHAT, {"guided_json": SCHEMA}, "guided_json is not served: use response_format, regex or ebnf"),
        ("/invocations", {"guided_json": SCHEMA}, "guided_json is not served: use response_format, regex"),
        (CHAT, {"guided_choice": ["yes", "no"]}, "guided_choice is not served: use response_format, regex"),
        (CHAT, {"structured_outputs": {"regex": "a"}}, "structured_outputs is not served: use resp"),
        (CHAT, {"json_schema": "{}"}, "json_schema is not served: use response_format"),
        (CHAT, {"functions": [{"name": "f"}]}, "functions is not served: use tools"),
        (CHAT, {"bad_words": ["a"]}, "bad_words is not served: use logit_bias"),
        (CHAT, {"use_beam_search": True}, "use_beam_search is not served: ADASERVE drafts trees"),
        (CHAT, {"response_format": "json"}, "response_format must be an object such as"),
        ("/invocations", {"response_format": ["json"]}, "response_format must be an object such as"),
        (CHAT, {"response_format": {"type": "json_schema", "schema": "{}"}}, "response_format.schema must"),
        (COMPLETIONS, {"guided_regex": "a"}, "guided_regex is not served: use response_format, json_schema"),
        (COMPLETIONS, {"grammar": "root ::= [a]"}, "grammar is not served: use response_format, json_schema"),
        (COMPLETIONS, {"prompt_logprobs": 1}, "prompt_logprobs is not served: use return_logprob"),
        (COMPLETIONS, {"best_of": 3, "n": 2}, "best_of is not served: ask for several answers with n"),
        (COMPLETIONS, {"best_of": 2}, "best_of is not served"),
        (COMPLETIONS, {"max_new_tokens": 500}, "max_new_tokens is not served here: use max_tokens"),
        (COMPLETIONS, {"max_completion_tokens": 5}, "max_completion_tokens is not served here: use max"),
        (COMPLETIONS, {"sampling_seed": 5}, "sampling_seed is not served here: use seed"),
        (COMPLETIONS, {"sampling_seed": 0}, "sampling_seed is not served here: use seed"),
        (CHAT, {"max_new_tokens": 0}, "max_new_tokens is not served here: use max_tokens"),
        (RESPONSES, {"max_tokens": 0}, "max_tokens is not served here: use max_output_tokens"),
        (COMPLETIONS, {"beam_width": 4}, "beam_width is not served: ADASERVE drafts trees"),
        (COMPLETIONS, {"sampling_params": {"temperature": 0}}, "sampling_params is not served here: put its"),
        (CHAT, {"max_output_tokens": 5}, "max_output_tokens is not served here: use max_tokens"),
        (CHAT, {"return_logprob": True}, "return_logprob is not served here: use logprobs"),
        (RESPONSES, {"max_tokens": 5}, "max_tokens is not served here: use max_output_tokens"),
        (MESSAGES, {"max_tokens": 5, "stop": ["a"]}, "stop is not served here: use stop_sequences"),
        (CHAT, {"session_params": {"id": "s"}}, "session_params is not served: continue the session on /g"),
        (COMPLETIONS, {"session_params": {"id": "s"}}, "session_params is not served: continue the session"),
        (RESPONSES, {"response_format": SCHEMA}, "response_format is not served: use text.format"),
        (RESPONSES, {"regex": "a"}, "regex is not served: use text.format"),
        (RESPONSES, {"conversation": "conv_1"}, "conversation is not served: send all of the input"),
        (MESSAGES, {"output_format": SCHEMA}, "output_format is not served: use output_config.format"),
        (GENERATE, {"json_schema": "{}"}, "json_schema is not served here: put it into sampling_params"),
        (GENERATE, {"temperature": 0}, "temperature is not served here: put it into sampling_params"),
        (GENERATE, {"guided_json": SCHEMA}, "guided_json is not served: use json_schema, regex or ebnf in"),
        (GENERATE, {"background": True}, "background is not served: stay connected until the answer is"),
        (VERTEX, {"parameters": {"background": True}}, "parameters.background is not served: stay connected"),
        ("/api/chat", {"format": "json"}, "format is not served: use response_format of /v1"),
        ("/api/chat", {"tools": [{"type": "function"}]}, "tools is not served: use tools of /v1/chat"),
        ("/api/chat", {"messages": [5, {"images": ["AAAA"]}]}, "messages[1].images is not served: use"),
        ("/api/generate", {"images": ["AAAA"]}, "images is not served: use image_url of"),
        ("/api/chat", {"options": {"mirostat": 1}}, "options.mirostat is not served: use temperature"),
        ("/api/generate", {"options": {"typical_p": 0.5}}, "options.typical_p is not served: use temp"),
        (CHAT, {"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens must be at least 1"),
        ("/api/generate", {"context": [5, 6]}, "context is not served: put all of the text into prompt"),
    ],
)  # fmt: skip
def test_what_would_be_ignored_is_refused(path: str, field: dict[str, Any], use: str) -> None:
    with pytest.raises(RequestError) as error:
        require_supported_fields({"model": "m", "stream": True, **field}, path)
    assert str(error.value).startswith(use)


@pytest.mark.parametrize(
    ("path", "field", "use"),
    [
        (CHAT, {"slo_class": "chat"}, "slo_class is not read here: put it into custom_params"),
        (COMPLETIONS, {"slo_tpot_ms": 40}, "slo_tpot_ms is not read here: put it into custom_params"),
        ("/invocations", {"slo_ttft_ms": 0}, "slo_ttft_ms is not read here: put it into custom_params"),
        (GENERATE, {"adaserve_learn": False}, "adaserve_learn is not read here: put it into custom_params o"),
        (GENERATE, {"custom_params": {}}, "custom_params is not served here: put it into sampling_params"),
        (CHAT, {"adaserve_speculation": 0}, "adaserve_speculation is not read here: put it into custom_p"),
        (RESPONSES, {"adaserve_learn": False}, "adaserve_learn is not read here: use the headers x-slo"),
        (RESPONSES, {"custom_params": {"slo_tpot_ms": 40}}, "custom_params is not read here: use the h"),
        (MESSAGES, {"nvext": {"router": {"itl_target": 40}}}, "nvext is not read here: use the headers"),
        ("/api/chat", {"custom_params": {"adaserve_learn": False}}, "custom_params is not read here: use th"),
        ("/api/generate", {"nvext": {}}, "nvext is not read here: use the headers"),
        ("/v1/score", {"slo_class": "chat"}, "slo_class is not read here: use the headers x-slo-class"),
        ("/v1/score", {"custom_params": {"slo_ttft_ms": 40}}, "custom_params is not read here: use the h"),
        ("/v1/decisions", {"nvext": {"router": {"ttft_target": 40}}}, "nvext is not read here: use the h"),
        (VERTEX, {"nvext": {"router": {"itl_target": 40}}}, "nvext is not read here: use the headers"),
        (VERTEX, {"sampling_params": {"top_k": 1}}, "sampling_params is not read here: put it into p"),
        (VERTEX, {"stream": True}, "stream is not read here: put it into parameters"),
        (VERTEX, {"instances": [{"text": "a"}, {"temperature": 0}]}, "instances[1].temperature is not read"),
        (VERTEX, {"instances": [{"slo_class": "chat"}]}, "instances[0].slo_class is not read here: use"),
        (VERTEX, {"custom_params": {"slo_tpot_ms": 40}}, "custom_params is not read here: use the headers"),
    ],
)  # fmt: skip
def test_wishes_are_stated_where_they_are_read(path: str, field: dict[str, Any], use: str) -> None:
    """Or a draft learns from what it must not, and a request gets another speed than it asks for."""
    with pytest.raises(RequestError) as error:
        require_supported_fields({"model": "m", **field}, path)
    assert str(error.value).startswith(use)
    require_supported_fields({"model": "m", **dict.fromkeys(field)}, path)


@pytest.mark.parametrize(
    ("variable", "path", "body", "use"),
    [
        ("AIP_PREDICT_ROUTE", "/a/1:predict", {"custom_params": {"adaserve_learn": False}}, "custom_"),
        ("AIP_PREDICT_ROUTE", "/predict", {"instances": [{"text": "a", "top_k": 1}]}, "instances[0].top_k"),
        ("SGLANG_OLLAMA_CHAT_ROUTE", "/chat", {"format": "json"}, "format is not served"),
        ("SGLANG_OLLAMA_GENERATE_ROUTE", "/ollama", {"nvext": {}}, "nvext is not read here"),
    ],
)  # fmt: skip
def test_a_route_is_known_by_the_path_that_the_environment_gives_it(
    variable: str, path: str, body: dict[str, Any], use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unsupported_fields, "_RENAMED", renamed({variable: path}))
    with pytest.raises(RequestError) as error:
        require_supported_fields(body, path)
    assert str(error.value).startswith(use)


def test_a_path_that_is_taken_keeps_its_meaning() -> None:
    """SGLang adds Vertex AI's route last, and serves the first of a path."""
    assert renamed({"AIP_PREDICT_ROUTE": COMPLETIONS}) == renamed({}) == {}
    source = inspect.getsource(http_server)
    for variable, path in _VARIABLES.items():
        assert f'@app.post(os.environ.get("{variable}", "{path}"))' in source


@pytest.mark.parametrize("name", ["custom_params", "nvext"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/invocations"])
def test_wishes_are_served_where_they_are_read(path: str, name: str) -> None:
    require_supported_fields({name: {"slo_tpot_ms": 40, "adaserve_learn": False}}, path)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"response_format": {"type": "json_object"}, "regex": None, "metadata": {"a": "b"}}),
        (CHAT, {"use_beam_search": False, "best_of": 1, "length_penalty": 1.0, "bad_words": []}),
        (CHAT, {"guided_json": None, "guided_decoding_backend": "xgrammar", "structured_outputs": {}}),
        (CHAT, {"add_generation_prompt": True, "include_stop_str_in_output": False, "prediction": {}}),
        (COMPLETIONS, {"json_schema": "{}", "best_of": 2, "n": 2, "suffix": "b", "min_tokens": 3}),
        (COMPLETIONS, {"best_of": "x"}),  # for the route to judge
        (COMPLETIONS, {"n": -1}),  # likewise
        (COMPLETIONS, {"max_tokens": 5, "max_new_tokens": 5, "sampling_seed": None}),
        (COMPLETIONS, {"max_tokens": 5, "max_new_tokens": 0, "min_new_tokens": 0, "return_logprob": False}),
        (CHAT, {"max_completion_tokens": 5, "max_output_tokens": 5, "min_tokens": 2, "min_new_tokens": 2}),
        (RESPONSES, {"text": {"format": {"type": "json_object"}}, "store": False}),
        (MESSAGES, {"output_config": {"effort": "low"}, "stop_sequences": ["a"], "thinking": {}}),
        (GENERATE, {"sampling_params": {"regex": "a"}, "temperature": None, "watermark": {}}),
        (GENERATE, {"session_params": {"id": "s"}}),
        (COMPLETIONS, {"session_params": {}, "session_id": "s"}),
        (GENERATE, {"background": False}),
        (RESPONSES, {"background": True, "store": True}),
        (VERTEX, {"parameters": {"background": None}}),
        (VERTEX, {"parameters": 5}),  # for the route to judge
        ("/v1/embeddings", {"format": "float"}),
        (VERTEX, {"instances": [{"text": "a", "id": 5, "stream": None}], "parameters": {"stream": True}}),
        (VERTEX, {"instances": 5}),  # for the route to judge
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": []}], "tools": []}),
        ("/api/chat", {"options": {"mirostat": 0, "typical_p": 1.0, "tfs_z": None, "num_ctx": 4096}}),
        ("/api/chat", {"options": 5}),  # for the route to judge
        ("/api/generate", {"images": None, "suffix": "b", "raw": True, "system": "a", "keep_alive": 0}),
    ],
)  # fmt: skip
def test_what_is_served_or_harmless_is_not(path: str, fields: dict[str, Any]) -> None:
    require_supported_fields(fields, path)


@pytest.mark.parametrize(
    ("path", "model"),
    [(CHAT, ChatCompletionRequest), (COMPLETIONS, CompletionRequest), (RESPONSES, ResponsesRequest),
     (MESSAGES, AnthropicMessagesRequest)],
)  # fmt: skip
def test_nothing_is_refused_that_sglang_serves(path: str, model: type[BaseModel]) -> None:
    names = model.model_fields.keys()
    assert "custom_params" not in names or path in (CHAT, COMPLETIONS)
    for name in {*CONSTRAINTS, *INSTEAD} & names:
        require_supported_fields({name: {"type": "text"}}, path)
    lengths, others = _OWN[path]
    assert {*lengths, *others.values()} <= names and not others.keys() & names
    for name in {*CONSTRAINTS, *INSTEAD} - names:
        with pytest.raises(RequestError):
            require_supported_fields({name: "x"}, path)


def test_no_field_of_a_native_request_is_taken_for_one_of_sampling() -> None:
    for name in GenerateReqInput.__dataclass_fields__.keys() - {"background"}:
        require_supported_fields({name: 1}, GENERATE)
