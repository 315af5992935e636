"""Each kind of value that a request may not hold, with the field and the range in the message."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from adaserve.boundary import Limits, RequestError, check_logprobs, check_prompt, check_request
from adaserve.boundary.ambiguity import _Automaton, require_few_ways
from adaserve.boundary.ebnf import as_regex
from adaserve.boundary.errors import TooLargeError, shown
from adaserve.boundary.grammar import _require_matchable
from adaserve.boundary.grammar_check_budget import CHARACTERS, GRAMMAR, MAX_GRAMMAR_BUDGET, GrammarBudget
from adaserve.boundary.limits import MAX_SAMPLES, MAX_TOP_LOGPROBS
from adaserve.boundary.sampling import without_empty_stops

V = 512
LIMITS = Limits(vocab_size=V)
NAN, INF = float("nan"), float("inf")


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def schema(**properties: Any) -> str:
    return json.dumps({"type": "object", **properties})


# ruff: noqa: E501 - tables read better with one case a line
REFUSED_SAMPLING: list[tuple[dict[str, Any], str]] = [
    *(({"stop_token_ids": [bad]}, r"stop_token_ids\[0\] must be a token id from 0 to 511")
      for bad in (-1, V, 2**31, 2**70, True, 1.0, "5")),
    ({"stop_token_ids": 5}, "stop_token_ids must be a list"),
    *(({"stop_regex": bad}, "stop_regex.* must be text of 1 to 256 characters") for bad in (5, 10**5000, [""], ["a", [10**5000]])),
    *(({"logit_bias": {bad: 1.0}}, "logit_bias needs keys from 0 to 511")
      for bad in ("-1", str(V), "x", "", " 1", "1_0", "٣", "9" * 5000, "01", "0000000005")),
    *(({"logit_bias": {"3": bad}}, r"logit_bias\[3\] must be a number from -1e\+06 to 1e\+06")
      for bad in (NAN, INF, 1e300, "1", None, True)),
    *(({"top_k": bad}, "top_k must be an integer from 1 to 2147483647, or -1")
      for bad in (0, -2, 2**31, 2**64, 1.0, True, "5")),
    *(({"n": bad}, f"n must be an integer from 1 to {MAX_SAMPLES}") for bad in (0, -1, 129, 10**9, 1.0, True, None)),
    *(({"max_new_tokens": bad}, "max_new_tokens must be an integer from 0 to 2147483647")
      for bad in (-1, 2**31, 1.5, True, "7")),
    *(({"min_new_tokens": bad}, "min_new_tokens must be an integer from 0 to 2147483647")
      for bad in (-1, 2**31, NAN)),
    ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens must be at most max_new_tokens"),
    *(({"stream_interval": bad}, "stream_interval must be an integer from 1") for bad in (0, -1, 2**31)),
    *(({"sampling_seed": bad}, "sampling_seed must be an integer") for bad in (2**63, -(2**63) - 1, 1.0, "x")),
    *(({"temperature": bad}, "temperature must be a number from 0 to 1000")
      for bad in (NAN, INF, -INF, -0.1, 1e39, 10**40, "1", True, [1])),
    *(({"top_p": bad}, "top_p must be") for bad in (NAN, INF, 0, 0.0, -1, 1.01)),
    *(({"min_p": bad}, "min_p must be a number from 0 to 1") for bad in (NAN, -0.1, 1.1)),
    *(({"repetition_penalty": bad}, "repetition_penalty must be a number from 0.01 to 2")
      for bad in (NAN, 0, 1e-300, 2.1)),
    *(({name: bad}, f"{name} must be a number from -2 to 2")
      for name in ("frequency_penalty", "presence_penalty") for bad in (NAN, INF, 2.1, -3)),
    ({"stop": 5}, "stop must be text"),
    ({"stop": ["a", 5]}, r"stop\[1\] must be text"),
    ({"stop": ["a", ""]}, r"stop\[1\] must be text of 1 to 512 characters, got ''"),
    ({"stop": ["a"] * 33}, "stop takes at most 32"),
    ({"stop": "\ud800"}, "not a character of UTF-8"),
    ({"ignore_eos": 1}, "ignore_eos must be true or false"),
    ({"beam_width": 2}, "beam_width is refused"),
    ({"watermark": True}, "watermark is refused"),
    ({"is_normalized": True}, "has no field 'is_normalized'"),
    ({"seed": 3}, "has no field 'seed'"),
    ({"custom_params": 5}, "custom_params must be an object"),
    ({"custom_params": nested(9)}, "nested too deeply"),
    ({"custom_params": {"a": "x" * 70_000}}, "at most 65536 characters"),
    ({"custom_params": {"a": 2**63}}, r"custom_params.a must be from -2\^63"),
    ({"custom_params": {"thinking_budget": "x"}}, "thinking_budget must be an integer"),
]  # fmt: skip


@pytest.mark.parametrize(("params", "words"), REFUSED_SAMPLING)
def test_sampling_parameters_that_are_refused(params: dict[str, Any], words: str) -> None:
    for fields in (
        {"input_ids": [1], "sampling_params": params},
        {"text": ["a", "b"], "sampling_params": [{}, params]},
    ):
        with pytest.raises(RequestError, match=words):
            check_request(fields, LIMITS)


REFUSED_FIELDS: list[tuple[dict[str, Any], str]] = [
    *(({"input_ids": [1, bad]}, r"input_ids\[1\] must be a token id from 0 to 511")
      for bad in (-1, V, 2**31, 2**70, True, 1.0, "5", None)),
    ({"input_ids": [[1], [V]]}, r"input_ids\[1\]\[0\]"),
    ({"input_ids": [[1], 2]}, r"input_ids\[1\] must be a list"),
    ({"input_ids": []}, "at least 1 token id"),
    ({"input_ids": [[1], []]}, r"input_ids\[1\] must hold at least 1 token id"),
    ({"input_ids": "abc"}, "input_ids must be a list"),
    ({"text": []}, "at least 1 prompt"),
    ({"text": "a", "input_ids": [[1], [2]]}, "text and input_ids must hold as many prompts"),
    ({"text": ["a", "b"], "input_ids": [1, 2]}, "text and input_ids must hold as many prompts"),
    ({"text": ["a", "b"], "input_ids": [[1]]}, "text and input_ids must hold as many prompts"),
    ({"text": ["a", None]}, r"text\[1\] must be text"),
    ({"text": ["a", 5]}, r"text\[1\] must be text"),
    ({"text": 5}, "text must be text"),
    ({"text": "a\udc00"}, "not a character of UTF-8"),
    *(({"rid": bad}, "rid must be text of 1 to 256 characters") for bad in ("", 5, True, {}, "x" * 257)),
    ({"rid": ["a"]}, "rid must be one value for one prompt"),
    *(({"rid": bad}, "rid may hold printable characters only") for bad in ("a\n[ERROR] b", "\x00", "\u202ea")),
    ({"session_id": "a\rb"}, "session_id may hold printable characters only"),
    ({"input_ids": [[1], [2]], "rid": ["a"]}, "rid must have 2 entries"),
    ({"input_ids": [[1], [2]], "rid": ["a", 5]}, r"rid\[1\] must be text"),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params must have 2 entries"),
    ({"text": ["a", "b"], "return_logprob": [True]}, "return_logprob must have 2 entries"),
    ({"sampling_params": [{}]}, "sampling_params must be one value"),
    ({"return_hidden_states": [False]}, "return_hidden_states must be one value for one prompt"),
    ({"text": ["a", "b"], "return_hidden_states": [False]}, "return_hidden_states must have 2 entries"),
    ({"return_hidden_states": 5}, "return_hidden_states must be false"),
    ({"return_hidden_states": "last"}, "return_hidden_states must be false: ADASERVE returns none"),
    ({"sampling_params": 5}, "sampling_params must be an object"),
    *(({"top_logprobs_num": bad}, "top_logprobs_num must be an integer from 0 to 512")
      for bad in (-1, V + 1, 100_000, 2**31, True, 1.0)),
    *(({"logprob_start_len": bad}, "logprob_start_len must be an integer from -1 to 2147483647")
      for bad in (-2, 2**31, 1.5)),
    *(({"token_ids_logprob": bad}, "token_ids_logprob")
      for bad in ([-1], [V], [True], [1.0], V, "x", [[1]], [[1], [2]], [1, [2]])),
    ({"text": ["a", "b"], "token_ids_logprob": [[1], [V]]}, r"token_ids_logprob\[1\]\[0\]"),
    *(({"priority": bad}, "priority must be an integer from -2147483648") for bad in (2**31, -(2**31) - 1, 0.5)),
    *(({"received_time": bad}, "received_time must be a finite number") for bad in (NAN, INF, "x", True, 10**310)),
    *(({name: 1}, f"{name} must be true or false") for name in ("stream", "require_reasoning", "no_logs")),
    ({"input_embeds": [[0.1]]}, "input_embeds is refused"),
    ({"image_data": "x"}, "image_data is refused: this model takes text only"),
    ({"image_data": [[None, {"url": 1}]]}, "image_data is refused"),
    ({"audio_data": ["x"]}, "audio_data is refused"),
    ({"lora_path": "x"}, "lora_path is refused"),
    *(({"kv_hints": hints}, "kv_hints is refused: the hierarchical cache") for hints in ({}, {"a": 1})),
    ({"http_worker_ipc": "tcp://x"}, "http_worker_ipc is refused"),
    ({"positional_embed_overrides": {}}, "positional_embed_overrides is refused"),
    ({"multi_item_delimiter_indices": [1]}, "multi_item_delimiter_indices is refused"),
    ({"token_indices_to_pool": [1]}, "token_indices_to_pool is refused"),
    ({"need_wait_for_mm_inputs": True}, "need_wait_for_mm_inputs is refused"),
    ({"session_params": {"id": 5}}, "session_params.id must be text"),
    ({"session_params": {"id": ""}}, "session_params.id must be text"),
    *(({"session_params": nobody, **prompt}, "session_params.id must name the session")
      for nobody in ({"rid": "x"}, {"id": None}, {"id": None, "replace": True})
      for prompt in ({"text": ""}, {"text": ["a", ""]}, {"input_ids": []}, {"input_ids": [[]]}, {"input_ids": [1]})),
    ({"session_params": {"id": "s", "offset": 2**31}}, "session_params.offset must be an integer"),
    ({"session_params": {"nope": 1}}, "session_params has no field 'nope'"),
    ({"bootstrap_room": 2**63}, "bootstrap_room must be an integer"),
    ({"custom_labels": {5: "x"}}, "custom_labels must be an object"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "words"), REFUSED_FIELDS)
def test_fields_that_are_refused(fields: dict[str, Any], words: str) -> None:
    prompt = {} if fields.keys() & {"text", "input_ids"} else {"input_ids": [1, 2]}
    with pytest.raises(RequestError, match=words):
        check_request({**prompt, **fields}, LIMITS)


ACCEPTED: list[dict[str, Any]] = [
    {"input_ids": [0, V - 1]},
    {"input_ids": list(np.arange(3)), "sampling_params": {"top_k": np.int64(5)}},  # of an engine's caller
    {"input_ids": [[0], [V - 1, 3]], "rid": ["a", "b"], "sampling_params": [{}, {"temperature": 1}]},
    {"text": "", "sampling_params": None},  # whether it holds a token only the tokenizer knows
    *({"text": a, "input_ids": b} for a, b in (("a", [0]), (["a", "b"], [[0], [1, 2]]))),
    {"text": ["a", "b"], "sampling_params": {"n": 3}, "top_logprobs_num": [2, None], "stream": True},
    {"input_ids": [], "session_params": {"id": "s"}},
    {"input_ids": [1], "session_params": {}},
    {"input_ids": [1], "session_params": {"id": "s", "rid": "r", "replace": True, "offset": 0}},
    {"input_ids": [1], "session_params": {"id": "s", "rid": None, "replace": True, "offset": -1}},
    {"input_ids": [1], "top_logprobs_num": V, "logprob_start_len": -1, "token_ids_logprob": [0, V - 1]},
    {"text": ["a", "b"], "token_ids_logprob": [[1], None]},
    {"input_ids": [1], "token_ids_logprob": 5},
    {"input_ids": [1], "image_data": [None], "video_data": [], "audio_data": [[None]]},
    {"input_ids": [1], "sampling_params": {
        "max_new_tokens": 2**31 - 1, "min_new_tokens": 0, "stop": ["a", "x"], "stop_token_ids": [0, None],
        "stop_regex": ["[0-9]{1,20}x", "a|b"], "temperature": 0, "top_p": 1, "top_k": V, "min_p": 0.5,
        "frequency_penalty": -2, "presence_penalty": 2, "repetition_penalty": 2, "n": MAX_SAMPLES,
        "ignore_eos": True, "stream_interval": 1, "logit_bias": {"0": -100, str(V - 1): 5.5},
        "sampling_seed": -(2**63), "custom_params": {"slo_class": "chat", "x": [1, {"a": None}], "f": 0.5},
    }},
    *({"input_ids": [1], "sampling_params": {name: nothing}} for name in ("stop", "stop_regex") for nothing in ("", [])),
    *({"input_ids": [1], "sampling_params": {"top_k": k}} for k in (-1, V + 1, 2**31 - 1)),
    {"input_ids": [1], "sampling_params": {"top_k": 1 << 30, "top_p": 5e-324, "json_schema": "$$ANY$$"}},
]  # fmt: skip


@pytest.mark.parametrize("fields", ACCEPTED)
def test_what_is_served_passes(fields: dict[str, Any]) -> None:
    check_request(fields, LIMITS)


def test_a_model_with_a_large_vocabulary_gives_at_most_so_many_logprobs() -> None:
    limits = Limits(vocab_size=100_000)
    check_request({"input_ids": [1], "top_logprobs_num": MAX_TOP_LOGPROBS}, limits)
    with pytest.raises(RequestError, match=f"from 0 to {MAX_TOP_LOGPROBS}"):
        check_request({"input_ids": [1], "top_logprobs_num": MAX_TOP_LOGPROBS + 1}, limits)


def test_media_pass_for_a_model_that_takes_them() -> None:
    check_request({"text": "a", "image_data": "x"}, Limits(V, takes_media=True))


def test_an_answer_holds_so_many_log_probabilities() -> None:
    check_logprobs(0, 131_072, 21)
    with pytest.raises(RequestError, match=r"generated.*at most 4194304 .* got 1025 at each of 8192"):
        check_logprobs(0, 8192, 1025)
    with pytest.raises(RequestError, match=r"prompt.*at most 262144 .* got 101 at each of 8000"):
        check_logprobs(8000, 1, 101)
    with pytest.raises(RequestError, match="token_ids_logprob takes at most 1024"):
        check_request({"text": "a", "token_ids_logprob": [5] * 1025}, LIMITS)


def test_labels_are_those_of_the_metrics() -> None:
    """Any other ends SGLang's HTTP process where the first token is counted."""
    labelled = Limits(V, labels=frozenset({"tenant", "team"}))
    check_request({"text": "a", "custom_labels": {"tenant": "x"}}, labelled)
    check_request({"text": "a", "custom_labels": {}}, LIMITS)
    for labels in ({"other": "x"}, {"tenant": 5}, {"model_name": "x"}):
        with pytest.raises(RequestError, match="custom_labels"):
            check_request({"text": "a", "custom_labels": labels}, labelled)
    with pytest.raises(RequestError, match="it knows none"):
        check_request({"text": "a", "custom_labels": {"tenant": "x"}}, LIMITS)


def test_messages_without_pickle_carry_flat_parameters_only() -> None:
    flat = Limits(V, flat_params=True)
    body = {"input_ids": [1], "sampling_params": {"custom_params": {"a": [1, "x"], "b": {"c": 1}}}}
    check_request(body, flat)
    body["sampling_params"] = {"custom_params": {"a": [[1]]}}
    check_request(body, LIMITS)
    with pytest.raises(RequestError, match="nested too deeply"):
        check_request(body, flat)


@pytest.mark.parametrize(("tokens", "start"), [(0, -1), (0, None), (3, 4)])
def test_prompts_that_are_refused(tokens: int, start: int | None) -> None:
    with pytest.raises(RequestError, match=r"at least 1 token|from -1 to 3, the prompt's tokens, got 4"):
        check_prompt(tokens, start, continues=False)


def test_prompts_that_pass() -> None:
    check_prompt(3, 3, continues=False)
    check_prompt(3, -1, continues=False)
    check_prompt(0, 7, continues=True)


DEFS = {"item": {"type": "integer"}}
REFUSED_SCHEMAS: list[tuple[str, str]] = [
    ('{"$ref": "#"}', "leads back to itself"),
    (schema(properties={"a": {"anyOf": [{"$ref": "#/properties/a"}, {"type": "null"}]}}), "leads back to itself"),
    (json.dumps({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}}),
     "leads back to itself"),
    (json.dumps({"$defs": {"a": {"items": {"$ref": "#/$defs/b"}}, "b": {"oneOf": [{"$ref": "#/$defs/b"}]}}, "items": {"$ref": "#/$defs/a"}}),
     "leads back to itself"),
    (schema(properties={"definitions": {"pattern": "([a-z]?){0,99}"}}), "at least one character"),
    (schema(properties={"a": {"$ref": "#/nowhere"}}), "points to nothing"),
    (schema(properties={"a": {"$ref": "#anchor"}}), "must be # or start with #/"),
    (schema(properties={"a": {"$ref": "http://127.0.0.1/x"}}), "must be # or start with #/"),
    (schema(properties={"a": {"$ref": 5}}), "must be # or start with #/"),
    ('{"items": ' * 80 + "{}" + "}" * 80, "at most 64 levels"),
    ('{"items": ' * 5000, "at most 64 levels|must be JSON"),
    ("{", "must be JSON"),
    ("[1]", "must be a JSON schema"),
    ("5", "must be a JSON schema"),
    (schema(maxItems=2**63), r"maxItems must be from 0 to 2\^63 - 1"),
    (schema(minLength=-1), "minLength must be from 0"),
    ('{"title": "' + "]" * 200 + '", "items": ' + '{"items": ' * 80 + "{}" + "}" * 81, "at most 64 levels"),
    ('{"title": "' + "]" * 5000 + '", "items": ' + "[" * 5000 + "]" * 5000 + "}", "at most 64 levels"),
    (schema(pattern="((a{99}){99}){99}"), "at most 20000 terms"),
    (schema(properties={str(i): {} for i in range(300)}), "at most 256 properties"),
    ("x" * 600_000, "0 to 524288 characters"),
    (schema(pattern="([a-z ]?){0,99}[.]"), "at least one character"),
    (schema(patternProperties={"([a-z ]{1,9}){0,99}": {}}), "too many ways"),
    (schema(properties={str(i): {"pattern": "^[a-z]{1,999}$"} for i in range(30)}), "at most 20000 terms in all"),
    (schema(anyOf=[{"type": "string", "maxLength": i} for i in range(100)]), "anyOf may offer at most 32"),
    (schema(anyOf=[{"type": "string", "maxLength": i, "properties": {}} for i in range(100)]), "at most 32"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), REFUSED_SCHEMAS)
def test_schemas_that_are_refused(text: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        check_request({"input_ids": [1], "sampling_params": {"json_schema": text}}, LIMITS)


@pytest.mark.parametrize(
    "text",
    [
        "{}", "true", "", schema(properties={"a": {"$ref": "#/$defs/item"}, "b": {"$ref": "#/$defs/item"}}, **{"$defs": DEFS}),
        schema(properties={"pattern": {"type": "string"}, "maxItems": {"type": "integer"}}),
        schema(anyOf=[{"$ref": "#/definitions/a~1b"}], definitions={"a/b": {"enum": [1, 2]}}),
        schema(prefixItems=[{"$ref": "#/prefixItems/1"}, {}]),
        schema(anyOf=[{"properties": {"tool": {"const": str(i)}}} for i in range(100)]),
        schema(patternProperties={"^[a-z]{1,20}$": {}}, properties={str(i): {"pattern": "^[A-Z]{1,99}$"} for i in range(99)}),
    ],
)  # fmt: skip
def test_schemas_that_pass(text: str) -> None:
    check_request({"input_ids": [1], "sampling_params": {"json_schema": text}}, LIMITS)


def test_a_schema_of_doubling_references_is_walked_once() -> None:
    defs = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
    text = json.dumps({"$ref": "#/$defs/d0", "$defs": {**defs, "d40": {}}})
    check_request({"input_ids": [1], "sampling_params": {"json_schema": text}}, LIMITS)


def test_schemas_inside_a_structural_tag_are_checked() -> None:
    tagged = {
        "type": "structural_tag",
        "structures": [{"begin": "<a>", "schema": {"$ref": "#"}, "end": "</a>"}],
    }
    with pytest.raises(RequestError, match="leads back to itself"):
        check_request({"input_ids": [1], "sampling_params": {"structural_tag": json.dumps(tagged)}}, LIMITS)
    for bad in ("[]", "{", "5"):
        with pytest.raises(RequestError, match="must be"):
            check_request({"input_ids": [1], "sampling_params": {"structural_tag": bad}}, LIMITS)


def tag(**part: Any) -> str:
    return json.dumps({"type": "structural_tag", "format": part})


TAGS_REFUSED = [
    (tag(type="regex", pattern="([a-z ]?){0,99}[.]"), "at least one character"),
    (
        tag(type="sequence", elements=[{"type": "grammar", "grammar": "root ::= ([a-z]?){0,99}"}]),
        "at least one",
    ),
    (tag(type="repeat", min=0, max=99, content={"type": "any_text"}), "at most 32"),
    (tag(type="star", content={"type": "optional", "content": {"type": "any_text"}}), "may not hold another"),
    (
        tag(type="sequence", elements=[{"type": "optional", "content": {"type": "any_text"}}] * 40),
        "at most 32",
    ),
]


@pytest.mark.parametrize(("text", "words"), TAGS_REFUSED)
def test_structural_tags_that_are_refused(text: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        check_request({"input_ids": [1], "sampling_params": {"structural_tag": text}}, LIMITS)


def test_a_structural_tag_of_ordinary_parts_passes() -> None:
    call = {
        "type": "tag",
        "begin": "<a>",
        "content": {"type": "regex", "pattern": "[a-z]{1,9}"},
        "end": "</a>",
    }
    named_star = {"type": "star", "content": {"type": "const_string", "value": "star"}}
    text = tag(
        type="sequence", elements=[{"type": "star", "content": call}, named_star, {"type": "any_text"}]
    )
    check_request({"input_ids": [1], "sampling_params": {"structural_tag": text}}, LIMITS)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"text": ["a"] * 65_000, "sampling_params": {"n": 128}}, "at most 4096 answers"),
        ({"input_ids": [[1]] * 4097}, "at most 4096 answers"),
        ({"text": ["a"] * 40, "sampling_params": [{}] * 39 + [{"n": 128}]}, "at most 4096 answers"),
        ({"input_ids": [1], "sampling_params": {"stop": ["x" * 20] * 30}}, "at most 512 characters in all"),
        (
            {"input_ids": [1], "sampling_params": {"stop_regex": ["[a-z]{1,50}[.]{0,9}"] * 3}},
            "at most 1000 ways",
        ),
    ],
)
def test_what_is_small_by_itself_is_bounded_together(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        check_request(fields, LIMITS)


WIDE = Limits(vocab_size=150_000)
BIASES = {"logit_bias": {str(i): 1.5 for i in range(150_000)}}
SCHEMA = {"json_schema": schema(description="x" * 500_000)}


@pytest.mark.parametrize(
    ("prompts", "fields", "refused"),
    [
        (1, {"sampling_params": {"n": 13, **BIASES}}, False),
        (1, {"sampling_params": {"n": 14, **BIASES}}, True),
        (4096, {"sampling_params": BIASES}, True),
        (128, {"sampling_params": [{"n": 2, **BIASES}] * 7 + [{"n": 2}] * 121}, True),
        (128, {"sampling_params": [BIASES] * 13 + [{}] * 115}, False),
        (4096, {"sampling_params": SCHEMA}, True),
        (512, {"sampling_params": SCHEMA}, False),
        (4096, {"sampling_params": {"json_schema": schema(description="x" * 50_000), "stop": ["a"] * 32}}, False),
        (64, {"sampling_params": {"n": 64, "stop_token_ids": list(range(1500))}}, True),
        (2, {"sampling_params": {"n": 128, "custom_params": {"a": ["x" * 1000] * 60}}}, False),
        (256, {"custom_logit_processor": "x" * (1 << 20)}, True),
        (256, {"custom_logit_processor": "x" * 1_000_000}, False),
        (256, {"custom_logit_processor": ["x" * 1_000_000, *[None] * 255], "sampling_params": {"n": 16}}, False),
    ],
)  # fmt: skip
def test_what_each_answer_gets_a_copy_of_is_bounded(
    prompts: int, fields: dict[str, Any], refused: bool
) -> None:
    """Biases of a body of 2 MB took 13 MB of each of 4096 answers."""
    with pytest.raises(RequestError, match="268435456 bytes in all answers") if refused else nullcontext():
        check_request({"text": ["a"] * prompts, **fields}, WIDE)


STOPS_REFUSED = [
    "(a+)+$", "(a|a)*b", "a*b", ".+", "(a", r"(a)\1", "(?=a)b", "(?<!a)b", "(a{2}){3}", "a?" * 12, "(a|aa)" * 12,
    "[a-z]{1,50}[0-9]{1,50}", "a{5,2000}", "x" * 257, "(?(1)a|b)", "*",
]  # fmt: skip


@pytest.mark.parametrize("pattern", STOPS_REFUSED)
def test_stop_expressions_that_are_refused(pattern: str) -> None:
    with pytest.raises(RequestError, match="stop_regex"):
        check_request({"input_ids": [1], "sampling_params": {"stop_regex": pattern}}, LIMITS)


@pytest.mark.parametrize("pattern", ["abc", r"\n\d{1,3}\.", "[.!?][ ]{0,5}$", "(yes|no)", "a{3}", "(ab)?c"])
def test_stop_expressions_that_pass(pattern: str) -> None:
    check_request({"input_ids": [1], "sampling_params": {"stop_regex": [pattern]}}, LIMITS)


@given(st.text(alphabet="ab.?|(){},0123[]^$\\", max_size=30))
def test_a_stop_expression_that_passes_is_matched_fast(pattern: str) -> None:
    """Against text that gives a backtracking matcher the most to try: a bad one would not end."""
    try:
        check_request({"input_ids": [1], "sampling_params": {"stop_regex": pattern}}, LIMITS)
    except RequestError:
        return
    re.search(pattern, "a" * 2000)


EXPLODING = [
    "((a{999}){999}){9}", "a{30000}", "(" * 70 + ")" * 70, "(x{10}){9999}", "(x{1000}" * 9 + "){1000}" * 9,
]  # fmt: skip


@pytest.mark.parametrize("text", EXPLODING)
def test_expressions_that_explode_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"regex may|regex is too large|too many ways"):
        check_request({"input_ids": [1], "sampling_params": {"regex": text}}, LIMITS)


MANY_WAYS = [
    "([a-z ]?){0,99}[.]", "(([a-z ]?){0,99}){0,99}[.]", "([a-z ]{0,99}){0,99}[.]", "([a-z ]{1,30}){0,30}[.]",
    "(([a-z ]?)+)+[.]", "((ab)?){0,99}", "([a-z ]|[a-z ][a-z ]){0,40}[.]", "[a-z ]?" * 100 + "[.]",
    "(?<n>a)(([a-z ]?){0,99}){0,99}", "x" * 5000 + "([a-z ]|[a-z ]x){0,99}", "(a|b|[ab][ab]){40}",
]  # fmt: skip
"""To mask one token by most of them takes xgrammar seconds."""


@pytest.mark.parametrize("text", MANY_WAYS)
def test_expressions_that_one_text_can_match_in_many_ways_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"too many ways|at least one character"):
        check_request({"input_ids": [1], "sampling_params": {"regex": text}}, LIMITS)


ORDINARY = [
    "", "[a-z ]*[.]", "([a-z]{1,10} ){1,50}[.]", r"(\d{1,3}\.){3}\d{1,3}", r"(?<year>\d{4})-(?<month>\d\d)",
    r"[\w.%+-]+@[\w.-]+\.[a-zA-Z]{2,}", "^([a-z0-9]+(-[a-z0-9]+)*)$", "(.*foo){3}", ".{0,2000}", "[^\n]{1,9000}",
    r"(([01]?\d|2[0-3]):[0-5]\d(:[0-5]\d)?,?){1,20}", "(yes|no|maybe|never|always){1,20}", "((a|b)+c)*",
    r"(\+?\d{1,3}[- ]?)?(\(?\d{3}\)?[- ]?){2}\d{4}", r"https?://[\w.-]+(/[\w./-]*)?(\?[\w=&%-]*)?",
    r'\{"a": "[^"]{0,300}", "b": (true|false|null|-?\d+(\.\d+)?), "c": \[("[^"]*"(, "[^"]*")*)?\]\}',
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T([0-9]{2}:){2}[0-9]{2}", r"-?(\d*\.?\d*)?",
]  # fmt: skip


def batch_of(params: list[dict[str, Any]]) -> dict[str, Any]:
    return {"text": ["a"] * len(params), "sampling_params": params}


COSTLY = "(a|b)*a(a|b){8}"
"""Thousands of steps of the search, in fifteen characters."""


@pytest.mark.parametrize(
    "fields",
    [
        batch_of([{"regex": f"{COSTLY}{i}"} for i in range(1000)]),
        batch_of([{"json_schema": json.dumps({"enum": [i, "x" * 1000]})} for i in range(1000)]),
        batch_of([{"ebnf": f'root ::= "{i}" [a-z]{{0,1000}}'} for i in range(1000)]),
        batch_of([{"stop_regex": [f"{i}", "[0-9]{1,20}"]} for i in range(1000)]),
        {
            "text": "a",
            "sampling_params": {
                "json_schema": json.dumps({"items": [{"pattern": f"{COSTLY}{i}"} for i in range(900)]})
            },
        },
    ],
    ids=["regex", "json_schema", "ebnf", "stop_regex", "patterns"],
)
def test_many_grammars_do_not_keep_the_server_from_answering(fields: dict[str, Any]) -> None:
    start_s = time.process_time()
    with pytest.raises(RequestError, match="fewer different ones at a time"):
        check_request(fields, LIMITS)
    assert time.process_time() - start_s < 5.0, "everybody else has waited for so long"


@pytest.mark.parametrize(
    "params",
    [
        {"regex": COSTLY}, {"json_schema": json.dumps({"enum": ["x" * 1000]})}, {"ebnf": 'root ::= "x" root'},
        {"stop_regex": ["[0-9]{1,20}"]},
        {"structural_tag": json.dumps({"format": {"type": "regex", "pattern": COSTLY}})},
    ],
)  # fmt: skip
def test_a_grammar_of_a_whole_batch_is_judged_once(params: dict[str, Any]) -> None:
    check_request(batch_of([params] * 1000), LIMITS)


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_expressions_pass(text: str) -> None:
    check_request({"input_ids": [1], "sampling_params": {"regex": text}}, LIMITS)


def test_effort_counts_each_grammar_once_with_its_characters_and_may_be_used_up() -> None:
    budget, text = GrammarBudget(), "a" * 2 * CHARACTERS
    budget.spend(MAX_GRAMMAR_BUDGET - GRAMMAR - 2)
    assert [budget.is_new("regex", text) for _ in range(2)] == [True, False]
    with pytest.raises(RequestError):
        budget.spend(1)


@pytest.mark.parametrize(
    ("expression", "size"),
    [("", 0), ("abc", 3), ("a{5}", 5), ("(ab){3}", 6), ("(a{2}b){2}", 6), ("[a-z]{4}", 4), (r"\{5}", 2), ("a{2,7}", 7),
     ("[\\]{}]b", 2), ("a{0}", 0)],
)  # fmt: skip
def test_terms_are_counted_as_they_are_written_out(expression: str, size: int) -> None:
    assert size <= require_few_ways("regex", expression, GrammarBudget()) <= 2 * size


def deep(open_: str, close: str, levels: int) -> str:
    return open_ * levels + "a" + close * levels


@pytest.mark.parametrize(
    "expression",
    [
        deep("(", ")", 65),
        deep("(", ")", 9000),
        deep(r"(\)", ")", 380),
        deep("([)]", ")?", 380),
        deep("(?:[^)]", ")", 380),
        deep(r"([\])]", ")", 380),
        "[^]" + deep("(", ")", 380) + "]",  # a class for Python, and groups for xgrammar
        "[]" + deep("(", ")", 380) + "]",
        "[]]" + deep("(", ")", 380),
    ],
)
def test_groups_are_counted_whatever_stands_between_them(expression: str) -> None:
    with pytest.raises(RequestError, match="regex may be nested at most 64 levels deep"):
        check_request({"input_ids": [1], "sampling_params": {"regex": expression}}, LIMITS)


def test_rules_may_use_each_other_64_deep() -> None:
    deepest = "".join(f"r{i} ::= r{i + 1}\n" for i in range(1, 63)) + 'r63 ::= "a"'
    params = {"ebnf": f"root ::= r1\n{deepest}"}
    check_request({"input_ids": [1], "sampling_params": params}, LIMITS)
    params = {"ebnf": f"root ::= r0\nr0 ::= r1\n{deepest}"}
    with pytest.raises(RequestError, match="at most 64 rules inside of each other"):
        check_request({"input_ids": [1], "sampling_params": params}, LIMITS)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("regex", "(" + "|".join(rf"f{i}\(" for i in range(70)) + r")x\)"),
        ("regex", "(" + "|".join(rf"{chr(0x4E00 + i)}[(\[{{]" for i in range(70)) + ")x"),
        ("regex", deep("(", ")", 64)),
        ("ebnf", "root ::= (" + " | ".join(f'"f{i}("' for i in range(70)) + ') [a-z] ")"'),
    ],
)
def test_brackets_of_the_text_are_no_groups(field: str, text: str) -> None:
    check_request({"input_ids": [1], "sampling_params": {field: text}}, LIMITS)


@pytest.fixture
def usual_recursion_limit() -> Iterator[None]:
    """Python's. What other tests compile with torch leaves a higher one behind."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.parametrize("levels", [330, 2000])
def test_what_is_nested_too_deeply_for_python_is_refused(levels: int, usual_recursion_limit: None) -> None:
    """Its parser steps over comments in such an expression, and uses fewer frames than the automaton."""
    with pytest.raises(RequestError, match="regex is nested too deeply"):
        require_few_ways("regex", "(?x)" + "(#)\n" * levels + ")?" * levels, GrammarBudget())


def test_the_name_of_a_group_holds_no_group() -> None:
    """Looking for its end behind every ``(?<`` takes time with the square of the text."""
    require_few_ways("regex", "(?<name>a)", GrammarBudget())
    for expression in ("(?<na(me>a)", "(?<na)me>a", "(?<)" * 1000):
        with pytest.raises(RequestError, match="regex is not a valid regular expression"):
            require_few_ways("regex", expression, GrammarBudget())


@given(st.text(alphabet="ab.?|(){},0123[]^*+", max_size=16), st.text(alphabet="ab", max_size=8))
@example("ab*", "a")
@example("(ab){0,2}b{2}", "abbb")
def test_the_automaton_takes_every_text_that_the_expression_matches(expression: str, text: str) -> None:
    """Or places would be missed."""
    try:
        pattern = re.compile(expression)
        automaton = _Automaton("regex")
        end = automaton.branch(())
        here = {automaton.add(re._parser.parse(expression), end, counted=False)}  # type: ignore[attr-defined]
    except (RequestError, re.error):
        return

    def reached(nodes: set[int]) -> set[int]:
        further = {to for node in nodes if automaton._reads[node] is None for to in automaton._next[node]}
        return nodes if further <= nodes else reached(nodes | further)

    for character in map(ord, text):
        reading = [n for n in reached(here) if any(a <= character <= b for a, b in automaton._reads[n] or ())]
        here = {automaton._next[n][0] for n in reading}
    if pattern.fullmatch(text):
        assert end in reached(here)


JSON_EBNF = r"""
root ::= value
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" ws (pair ("," ws pair)*)? "}" ws
pair ::= string ":" ws value
array ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,15})? ws
ws ::= [ \t\n]{0,20}  # comments may hold ( and " as well
"""

EBNFS = [
    JSON_EBNF, 'root ::= "yes" | "no"', "root ::= [a-z]+ root | [.]", 'root ::= (item ", "){0,20} item\nitem ::= [a-z]+',
    'root ::= ["] [^"]{1,200} ["]', 'root ::= expr\nexpr ::= term (("+" | "-") term)*\n'
    'term ::= factor (("*" | "/") factor)*\nfactor ::= [0-9]+ | "(" expr ")"', 'root ::= "\\u00e9\\"" [\\]]',
    'root ::= "SELECT " column " from " table " where " condition\ncolumn ::= "a" | "b"\ntable ::= "t1" | "t2"\n'
    'condition ::= column "=" number\nnumber ::= "1 " | "2 "',
]  # fmt: skip


@pytest.mark.parametrize("text", EBNFS)
def test_ordinary_grammars_pass(text: str) -> None:
    check_request({"input_ids": [1], "sampling_params": {"ebnf": text}}, LIMITS)


EBNFS_REFUSED = [
    ('root ::= "["  (("a"{999}){999}) "]"', "at most|too large"),
    ('root ::= ["] (("a"{999}){999}) ["]', "at most|too large"),  # the class holds no beginning of a string
    ('root ::= [#] (("a"{999}){999})', "at most|too large"),
    ("root ::= ([a-z]?){0,99}", "at least one character"),
    ("root ::= b{0,99}\nb ::= c{1,99}\nc ::= [a-z]", "too many ways"),
    ("root ::= a a a a a a\na ::= b b b b b b\nb ::= [a-z]?", "too many ways"),
    ("root ::= " + "[a-z]? " * 100, "too many ways"),
    (
        "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(99)) + "\nr99 ::= ([a-z]?){0,99}",
        "at most 64",
    ),
    ("root ::= a", "no rule named 'a'"),
    ("start ::= [a]", "named root"),
    ('"a"', "begin with a rule"),
    ("root ::= /a/", "not understood"),
    ("root ::= []a]", "not understood"),
]


def padded(text: str) -> str:
    """A grammar that is too large to be judged with all of its lists written out."""
    lists = [f'{a} ::= {b} ("," {b})* "{a}"' for a, b in pairwise(["root_", *"abcdefghijklmnop"])]
    return "\n".join([text, *lists, 'p ::= "p"'])


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ('root ::= many root_\nmany ::= item (", " item)*\nitem ::= [a-z]+', False),
        (
            'root ::= block root_\nblock ::= many{1,40}\nmany ::= item (", " item)*\nitem ::= [a-z, ]{1,40}',
            True,
        ),
        ('root ::= many root_\nmany ::= item ("," item)*\nitem ::= ([a-z]?){0,99}', True),
        ('root ::= many root_\nmany ::= item (blank item)*\nitem ::= [a-z]{1,40}\nblank ::= " "?', True),
    ],
)
def test_a_list_of_a_large_grammar_is_judged_as_a_loop(text: str, refused: bool) -> None:
    with pytest.raises(RequestError, match=r"too many ways|at least one") if refused else nullcontext():
        check_request({"input_ids": [1], "sampling_params": {"ebnf": padded(text)}}, LIMITS)
    with pytest.raises(TooLargeError):
        _require_matchable(
            "ebnf", as_regex("ebnf", padded(text.replace("{0,99}", "{0,2}")), 1), GrammarBudget()
        )


@pytest.mark.parametrize(
    ("written", "character"),
    [(r'"\x41"', "A"), (r'"\u00e9"', "é"), (r'"\U0001f600"', "😀"), (r'"\UFFFFFFFF"', "\U0010ffff"), (r'"\n"', "\n"),
     (r'"\""', '"'), (r'"."', "."), (r"[\x41-\x43]", "B"), (r"[\]]", "]"), ("[^]", "x")],
)  # fmt: skip
def test_characters_of_ebnf_stand_for_themselves(written: str, character: str) -> None:
    assert re.fullmatch(as_regex("ebnf", f"root ::= {written}", 1), character)


def test_the_sign_of_a_list_in_a_text_is_a_character() -> None:
    for text in (
        "\ue001*",
        "(a)(?:\ue001)*",
        "(\ue001)*",
        "(a)(?:b\ue001)*",
        "((a)(b\ue001)*)+",
        "a\ue001{0,9}",
    ):
        check_request({"input_ids": [1], "sampling_params": {"regex": text}}, LIMITS)
    check_request({"input_ids": [1], "sampling_params": {"ebnf": 'root ::= ("a" "\ue001")*'}}, LIMITS)


@pytest.mark.parametrize(("text", "words"), EBNFS_REFUSED)
def test_grammars_that_are_refused(text: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        check_request({"input_ids": [1], "sampling_params": {"ebnf": text}}, LIMITS)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
                    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))  # fmt: skip
def test_no_value_of_any_field_brings_anything_but_a_refusal(value: Any) -> None:
    """No TypeError, RecursionError, OverflowError, ...: those would be answered with 500."""
    from adaserve.boundary.request import EACH, WHOLE
    from adaserve.boundary.sampling import FIELDS

    bodies = [
        {"input_ids": [1], name: value} for name in (*EACH, *WHOLE, "token_ids_logprob", "input_ids", "text")
    ]
    bodies += [{"text": ["a", "b"], name: [value, value]} for name in EACH]
    bodies += [{"input_ids": [1], "sampling_params": {name: value}} for name in FIELDS]
    for body in bodies:
        try:
            check_request(body, LIMITS)
        except RequestError as error:
            assert 0 < len(str(error)) < 2000


def test_a_value_is_shown_in_a_few_words() -> None:
    for value in (10**5000, -(10**5000), "x" * 10**6, [0] * 10**6, nested(5), NAN, None, object()):
        assert 0 < len(shown(value)) < 100
    assert [shown(value) for value in (None, True, 0.5)] == ["None", "True", "0.5"]


def test_min_p_is_refused_where_sglang_draws_by_seeds() -> None:
    """Its seeded draw asserts that there is none, and an assertion in the scheduler ends the server."""
    request = {"input_ids": [1, 2], "sampling_params": {"min_p": 0.1}}
    check_request(request, LIMITS)
    seeded = Limits(vocab_size=V, seeded=True)
    with pytest.raises(RequestError, match=r"min_p must be 0 on this server, got 0\.1"):
        check_request(request, seeded)
    check_request({"input_ids": [1, 2], "sampling_params": {"min_p": 0}}, seeded)


def test_a_stop_of_nothing_is_no_stop() -> None:
    """SGLang finds it in every text, and the answer would be empty."""
    empty, given = {"stop": "", "stop_regex": "", "n": 2}, {"stop": "a", "stop_regex": ["b"], "n": 2}
    assert without_empty_stops([empty, given]) == [{"n": 2}, given]
    assert without_empty_stops(empty) == {"n": 2} and empty["stop"] == "", "the caller's own is changed"
    for nothing in (None, {}, {"stop": None}, {"stop": []}):
        assert without_empty_stops(nothing) == nothing


def test_biases_are_judged_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, the millions that a batch may have held up everybody for three seconds."""
    monkeypatch.setattr("adaserve.boundary.sampling._bias", None)
    biases = {str(i): (-1e6, 5, 0.25)[i % 3] for i in range(V)}
    check_request({"text": "a", "sampling_params": {"logit_bias": biases}}, LIMITS)
