"""Hostile HTTP requests, drawn by Hypothesis from SGLang's own OpenAPI schema.

A request starts as one that is served, so that it gets past the first checks. Then a few of its fields,
or others that the schema knows, get values: of the type that the schema states, or of the worst there are.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from adaserve.boundary.sampling import FIELDS as SAMPLING_FIELDS
from adaserve.config import PREFILLS
from tests.engine.harness import Server
from tests.engine.pairs import VOCAB

APART_S = 0.01
"""Between two requests that are sent, so that some are read while others decode."""
JSON_TYPE = {"content-type": "application/json"}
MODEL = "m"
MESSAGES = [{"role": "user", "content": "hello fox"}]
SAMPLING = {"max_new_tokens": 6, "temperature": 0}

BASES: dict[str, list[dict[str, Any]]] = {
    "/generate": [
        {"input_ids": [5, 17, 33], "sampling_params": SAMPLING},
        {"text": "the quick", "sampling_params": {**SAMPLING, "temperature": 0.8}, "stream": True},
        {"input_ids": [[5, 17], [33]], "sampling_params": SAMPLING},
        {"text": ["a", "b c"], "sampling_params": [SAMPLING, SAMPLING], "rid": ["one", "two"]},
        {"input_ids": [9, 9], "sampling_params": {**SAMPLING, "n": 2}, "return_logprob": True},
    ],
    "/v1/completions": [
        {"model": MODEL, "prompt": "the fox", "max_tokens": 6},
        {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 6, "stream": True},
        {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 4, "n": 2, "logprobs": 2},
    ],
    "/v1/chat/completions": [
        {"model": MODEL, "messages": MESSAGES, "max_tokens": 6},
        {"model": MODEL, "messages": MESSAGES, "max_tokens": 6, "stream": True},
    ],
    "/api/chat": [
        {"model": MODEL, "messages": MESSAGES, "stream": False, "options": {"num_predict": 5}},
        {"model": MODEL, "messages": MESSAGES, "stream": True, "options": {"num_predict": 5}},
    ],
    "/api/generate": [
        {"model": MODEL, "prompt": "fox", "stream": False, "options": {"num_predict": 5}},
        {"model": MODEL, "prompt": "fox", "stream": True, "options": {"num_predict": 5}},
    ],
    "/v1/messages": [
        {"model": MODEL, "messages": MESSAGES, "max_tokens": 6},
        {"model": MODEL, "messages": MESSAGES, "max_tokens": 6, "stream": True},
    ],
    "/v1/responses": [
        {"model": MODEL, "input": "hello", "max_output_tokens": 6},
        {"model": MODEL, "input": "hello", "max_output_tokens": 6, "stream": True},
    ],
    "/v1/score": [{"model": MODEL, "query": "a", "items": ["b", "c"], "label_token_ids": [5, 6]}],
    "/invocations": [{"model": MODEL, "messages": MESSAGES, "max_tokens": 6}],
    "/vertex_generate": [{"instances": [{"text": "fox"}], "parameters": {"sampling_params": SAMPLING}}],
    "/v1/tokenize": [{"model": MODEL, "prompt": "hello"}],
    "/v1/detokenize": [{"model": MODEL, "tokens": [5, 6]}],
    "/abort_request": [{"rid": "one"}],
    "/open_session": [{"capacity_of_str_len": 100, "session_id": "s"}],
    "/close_session": [{"session_id": "s"}],
    "/set_internal_state": [{"server_args": {"adaserve_policy=adaserve": 1}}],
}
NESTED = {"/generate": "sampling_params", "/api/chat": "options", "/api/generate": "options"}
OPTIONS = (
    "temperature",
    "top_p",
    "top_k",
    "num_predict",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)
FAVOURED = (
    ["/generate"] * 8 + ["/v1/completions", "/v1/chat/completions"] * 3 + ["/api/chat", "/api/generate"]
)

# ruff: noqa: E501 - tables
NUMBERS = [
    0, 1, 2, -1, -2, VOCAB - 1, VOCAB, VOCAB + 1, 2**15, 2**30, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63,
    2**64, -(2**31), -(2**31) - 1, -(2**63), -(2**63) - 1, 10**30, 0.0, -0.0, 0.5, 1.0, 1.5, 5e-324, 1e-45, 1e-7,
    1e39, 1e308, -1e308,
]  # fmt: skip
TEXTS = [
    "", " ", "a", "0", "-1", str(VOCAB), "null", "true", "\x00", "\n", "x" * 300, "x" * 20000, "\u202e\ufdfd\U0001f600",
    "../../etc/passwd", "$$ANY$$", "HEALTH_CHECK_0", "one", "s", "data:image/png;base64,AAAA", "http://127.0.0.1:1/",
    "(a+)+$", "((a{99}){99}){99}", "[", "root ::= root", 'root ::= "a" root | "b"', '{"$ref": "#"}', "{}", "false",
    '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}', '{"type": "integer"}',
    "[" * 5000, '{"a":' * 500 + "1" + "}" * 500, "file:///etc/passwd", "<|im_start|>", "<eos>", "adaserve_policy=none",
]  # fmt: skip
LISTS: list[Any] = [
    [], [[]], [None], [0], [-1], [VOCAB], [2**31], [2**63], [1.5], [True], ["a"], [""], ["a", "b"], [[5], [6]],
    [[5], []], [[5], [VOCAB]], [[-1]], [[[0.1]]], [0] * 300, [0] * 5000, ["one", "one"], [{}], [[{}]],
]  # fmt: skip
OBJECTS: list[Any] = [
    {}, {"": 0}, {"a": 1}, {"0": 1e308}, {"-1": 1.0}, {str(VOCAB): 1.0}, {"5": 5}, {"id": "s"}, {"rid": "one"},
    {"id": "s", "replace": True}, {"id": "s", "rid": "one", "offset": -5}, {"id": "s", "offset": 2**40},
    {"slo_tpot_ms": -1}, {"slo_class": "nobody"}, {"slo_tpot_ms": 1e-300}, {"slo_ttft_ms": "x"}, {"$ref": "#"},
    {"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}},
    {"type": "structural_tag", "structures": [], "triggers": []}, {"type": "function"}, {"is_normalized": True},
    {"thinking_budget": -5}, {"__sglang_reasoning_end_token_ids": [VOCAB]}, {"__sglang_reasoning_end_token_ids": 5},
    json.loads('{"a":' * 20 + "1" + "}" * 20),
]  # fmt: skip

PROMPTS: list[dict[str, Any]] = [
    {"input_ids": [5, 17, 33]}, {"input_ids": [0]}, {"input_ids": [VOCAB - 1] * 70}, {"text": "the quick"}, {"text": " "},
    {"input_ids": list(range(2, 200))}, {"input_ids": [5] * 249}, {"input_ids": [5] * 255}, {"text": "a\ud83d\ude00"},
]  # fmt: skip
FLAG = [True, False]
GRAMMARS = {
    "json_schema": ['{"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}', "$$ANY$$", ""],
    "regex": ["(yes|no)", "[a-z]{1,30}", "a{0}"],
    "ebnf": ['root ::= "a" root | "b"', 'root ::= "a" dead\ndead ::= dead'],
    "structural_tag": [
        '{"type": "structural_tag", "triggers": ["<"], "structures": [{"begin": "<a>", "schema": {"type": "integer"}, "end": "</a>"}]}',
    ],
}  # fmt: skip
LEGAL_SAMPLING: dict[str, list[Any]] = {
    **GRAMMARS,
    "max_new_tokens": [0, 1, 2, 40], "min_new_tokens": [0, 1, 12], "stop": ["a", "", [], ["e", " "], "\u00e9"],
    "stop_token_ids": [[0], [5, VOCAB - 1], list(range(VOCAB)), []], "stop_regex": ["[a-f]{2,9}", ["e ", "x"], ""],
    "temperature": [0, 1e-6, 0.7, 1, 1000], "top_p": [1e-9, 0.5, 1], "top_k": [-1, 1, 3, VOCAB, 2**30],
    "min_p": [0, 0.1, 1], "frequency_penalty": [-2, 0.5, 2], "presence_penalty": [-2, 0.5, 2],
    "repetition_penalty": [0.01, 1.1, 2], "n": [1, 2, 5], "ignore_eos": FLAG, "skip_special_tokens": FLAG,
    "spaces_between_special_tokens": FLAG, "no_stop_trim": FLAG, "ebnf_full_assistant": FLAG, "stream_interval": [1, 3, 1000],
    "logit_bias": [{"5": 1e6}, {str(VOCAB - 1): -1e6, "0": 3.5}, {str(i): -1e6 for i in range(VOCAB)}, {}],
    "sampling_seed": [0, 2**63 - 1, -5],
    "custom_params": [{}, {"slo_tpot_ms": 5}, {"slo_class": "coding"}, {"slo_ttft_ms": 60000}, {"thinking_budget": 3}],
}  # fmt: skip
"""Values that are served on most servers, alone; what ended servers was found by combining such fields."""
LEGAL: dict[str, list[Any]] = {
    "rid": ["one", "two", "HEALTH", "x" * 256], "return_logprob": FLAG, "logprob_start_len": [-1, 0, 1, 3],
    "top_logprobs_num": [0, 1, 7, VOCAB], "token_ids_logprob": [[0, VOCAB - 1], [], [5] * 300], "return_sampling_mask": FLAG,
    "sampling_logprobs_mode": ["selected", "support"], "extra_key": ["k", ""], "cache_salt": ["s", ""],
    "bootstrap_host": ["127.0.0.1"], "bootstrap_port": [1], "bootstrap_room": [0, 2**63 - 1], "bootstrap_pair_key": ["p"],
    "decode_tp_size": [1, 2], "session_params": [{"id": "s"}, {"id": "s", "rid": "one"}, {}],
    "session_id": ["s"], "stream": FLAG, "log_metrics": FLAG, "no_logs": FLAG, "background": [False], "require_reasoning": FLAG,
    "return_text_in_logprobs": FLAG, "return_flat_raw_top_logprobs": FLAG, "return_flat_raw_output_top_logprobs": FLAG,
    "return_flat_raw_top_logprobs_b64": FLAG, "return_routed_experts": FLAG, "return_indexer_topk": FLAG, "return_bytes": FLAG,
    "return_entropy": FLAG, "return_hidden_states": [False], "return_prompt_token_ids": FLAG, "use_audio_in_video": FLAG, "routed_experts_start_len": [0, 3],
    "max_thinking_tokens": [0, 3], "priority": [0, -(2**31), 2**31 - 1], "routed_dp_rank": [0, 1], "data_parallel_rank": [0],
    "disagg_prefill_dp_rank": [0, 1], "routing_key": ["r"], "conversation_id": ["c"], "received_time": [0, 1e9, -1e300],
    "external_trace_header": [{}, {"traceparent": "x"}, {"a": 5}], "custom_labels": [{}, {"tenant": "x"}, {"model_name": "x"}],
    "mm_processor_kwargs": [{}, {"a": 1}], "images_config": [{}, {"a": 1}], "video_config": [{}, {"a": 1}],
    "max_dynamic_patch": [0, 9], "min_dynamic_patch": [0, 9], "image_max_dynamic_patch": [0], "video_max_dynamic_patch": [0],
}  # fmt: skip
"""Likewise of the other fields of ``/generate``."""

hostile = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(TEXTS),
    st.sampled_from(LISTS),
    st.sampled_from(OBJECTS),
    st.sampled_from([None, True, False]),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
)
RAW = st.sampled_from(
    [
        b"", b"{", b"null", b"[]", b"1", b'"a"', b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"{}" * 1000,
        b'{"input_ids": [1e999], "sampling_params": {}}', b'{"input_ids": [NaN]}', b'{"text": "\\ud800"}',
        b'{"text": "a", "text": ""}', b'{"input_ids": [' + b"9" * 5000 + b"]}",
        b'{"text": "a", "sampling_params": {"temperature": NaN}}',
    ]
)  # fmt: skip
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        name: st.sampled_from(
            ["", "-1", "0", "1e400", "nan", "x", "9" * 400, "chat", "1", "{}", "\u00e9", "a" * 9000]
        )
        for name in (
            "x-slo-class",
            "x-slo-tpot-ms",
            "x-slo-ttft-ms",
            "x-data-parallel-rank",
            "x-custom-labels",
        )
    },
)


@dataclass(frozen=True)
class Request:
    """What is sent; ``content`` in place of ``body`` is no JSON of an object."""

    method: str
    path: str
    body: Any = None
    content: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        body = repr(self.content) if self.content is not None else json.dumps(self.body)
        return f"{self.method} {self.path} {self.headers or ''} {body[:600]}"


class Schema:
    """The routes and the types of their bodies, as ``GET /openapi.json`` says."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._components = document["components"]["schemas"]
        self.operations = [
            (method.upper(), path, _body_schema(operation))
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
        ]
        self._bodies = {path: body for method, path, body in self.operations if method == "POST"}

    def fields(self, path: str) -> list[str]:
        body = self._resolve(self._bodies.get(path) or {})
        return sorted(body.get("properties", {})) or ["a"]

    def typed(self, path: str, name: str) -> st.SearchStrategy[Any]:
        body = self._resolve(self._bodies.get(path) or {})
        return self._value(body.get("properties", {}).get(name, {}), 0)

    def _resolve(self, schema: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in schema:
            schema = self._components[schema["$ref"].rsplit("/", 1)[1]]
        for choice in schema.get("anyOf", ()):
            if "$ref" in choice:
                return self._resolve(choice)
        return schema

    def _value(self, schema: dict[str, Any], depth: int) -> st.SearchStrategy[Any]:
        """Values that the schema allows, of a few levels."""
        if "$ref" in schema:
            schema = self._components[schema["$ref"].rsplit("/", 1)[1]]
        choices = schema.get("anyOf") or schema.get("oneOf")
        if choices:
            return st.one_of([self._value(choice, depth) for choice in choices])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        kind = schema.get("type")
        if kind == "array" and depth < 3:
            return st.lists(self._value(schema.get("items", {}), depth + 1), max_size=3)
        if kind == "object" and depth < 3 and schema.get("properties"):
            chosen = {key: self._value(value, depth + 1) for key, value in schema["properties"].items()}
            wanted = {key: chosen.pop(key) for key in schema.get("required", ()) if key in chosen}
            return st.fixed_dictionaries(wanted, optional=dict(list(chosen.items())[:6]))
        return _SIMPLE.get(kind or "", hostile)


_SIMPLE: dict[str, st.SearchStrategy[Any]] = {
    "integer": st.integers(-(2**33), 2**33) | st.integers(-3, VOCAB + 3),
    "number": st.floats(-3, 3) | st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "string": st.text(max_size=12) | st.sampled_from(TEXTS),
    "null": st.none(),
    "array": st.sampled_from(LISTS),
    "object": st.sampled_from(OBJECTS),
}


def _body_schema(operation: dict[str, Any]) -> dict[str, Any]:
    content = operation.get("requestBody", {}).get("content", {})
    return dict(content.get("application/json", {}).get("schema", {}))


@st.composite
def requests(draw: st.DrawFn, schema: Schema) -> Request:
    """One request to any route, most to those that generate. Some change how prompts are read."""
    if draw(st.integers(0, 3)) == 0:
        return draw(combinations())
    if draw(st.integers(0, 15)) == 0:
        change = f"adaserve_prefill={draw(st.sampled_from(PREFILLS))}"
        return Request("POST", "/set_internal_state", {"server_args": {change: 1}})
    method, path = "POST", draw(st.sampled_from(FAVOURED))
    if draw(st.integers(0, 4)) == 0:
        method, path, _ = draw(st.sampled_from(schema.operations))
    path = path.replace("{model}", MODEL).replace("{response_id}", "x").replace("{method}", "x")
    headers = draw(HEADERS) if draw(st.integers(0, 9)) == 0 else {}
    headers = {name: value for name, value in headers.items() if value.isascii()}
    if draw(st.integers(0, 39)) == 0:
        return Request(method, path, content=draw(RAW), headers=headers)
    body = dict(draw(st.sampled_from(BASES.get(path, [{}]))))
    for _ in range(draw(st.integers(1, 3))):
        nested = NESTED.get(path)
        if nested and draw(st.booleans()):
            _set_nested(draw, body, nested, path)
        else:
            name = draw(st.sampled_from(schema.fields(path)))
            body[name] = draw(st.one_of(hostile, schema.typed(path, name)))
    return Request(method, path, body, headers=headers)


@st.composite
def combinations(draw: st.DrawFn) -> Request:
    """One request for ``/generate`` of legal values, whether or not they go together."""
    body, params = dict(draw(st.sampled_from(PROMPTS))), {"max_new_tokens": 12}
    for chosen, table, most in ((params, LEGAL_SAMPLING, 6), (body, LEGAL, 5)):
        for name in draw(st.lists(st.sampled_from(sorted(table)), max_size=most, unique=True)):
            chosen[name] = draw(st.sampled_from(table[name]))
    return Request("POST", "/generate", {**body, "sampling_params": params})


def _set_nested(draw: st.DrawFn, body: dict[str, Any], nested: str, path: str) -> None:
    names = sorted(SAMPLING_FIELDS) if path == "/generate" else list(OPTIONS)
    inner = body.get(nested)
    if isinstance(inner, dict):
        body[nested] = {**inner, draw(st.sampled_from(names)): draw(hostile)}


def drawn(schema: Schema, count: int, number: int) -> list[Request]:
    """``count`` requests, the same ones for the same ``number``."""
    found: list[Request] = []

    @seed(number)
    @settings(
        max_examples=count, phases=[Phase.generate], database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(requests(schema))
    def collect(request: Request) -> None:
        found.append(request)

    collect()
    return found[:count]


@dataclass(frozen=True)
class Answer:
    """Status, or 0 when no answer came, and the first of the body."""

    status: int
    text: str


def send(server: Server, batch: Sequence[Request], timeout_s: float = 60.0) -> list[Answer]:
    """One soon after the other; streams are read to their end."""
    return asyncio.run(_send(server, batch, timeout_s))


async def _send(server: Server, batch: Sequence[Request], timeout_s: float) -> list[Answer]:
    async with httpx.AsyncClient(base_url=server.url, timeout=timeout_s) as client:
        sent = (_send_one(client, request, i * APART_S) for i, request in enumerate(batch))
        return list(await asyncio.gather(*sent))


async def _send_one(client: httpx.AsyncClient, request: Request, after_s: float) -> Answer:
    await asyncio.sleep(after_s)
    content = request.content
    if content is None and request.body is not None:
        content = json.dumps(request.body).encode()
    try:
        answer = await client.request(
            request.method, request.path, content=content, headers={**JSON_TYPE, **request.headers}
        )
    except httpx.HTTPError as error:
        return Answer(0, repr(error))
    return Answer(answer.status_code, answer.text[:2000])
