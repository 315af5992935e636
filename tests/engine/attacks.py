"""Single requests that ended SGLang's scheduler, read foreign memory, or got an answer that was no 400."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.engine.pairs import VOCAB

IDS = [5, 17, 33]
RECURSIVE = '{"$ref": "#"}'
TOO_LONG = "longer than the model's context length"
DEEP = '{"type": "array", "items": ' * 80 + "{}" + "}" * 80
CHAIN = json.dumps(
    {
        "$ref": "#/$defs/0",
        "$defs": {"9000": {}, **{str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(9000)}},
    }
)
"""Not deep as text; compiled by recursion, it ends the process."""


@dataclass(frozen=True)
class Attack:
    """A request that must get 400 with ``words`` in the answer, whether it streams or not."""

    name: str
    path: str
    body: dict[str, Any]
    words: str


def native(name: str, words: str, params: dict[str, Any] | None = None, **fields: Any) -> Attack:
    prompt = {} if fields.keys() & {"text", "input_ids", "input_embeds"} else {"input_ids": IDS}
    sampling = {"sampling_params": {"max_new_tokens": 4, **params}} if params is not None else {}
    return Attack(name, "/generate", {**prompt, **sampling, **fields}, words)


def chat(name: str, words: str, **fields: Any) -> Attack:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, **fields}
    return Attack(name, "/v1/chat/completions", body, words)


def completion(name: str, words: str, **fields: Any) -> Attack:
    return Attack(
        name, "/v1/completions", {"model": "m", "prompt": "hello", "max_tokens": 4, **fields}, words
    )


def ollama(name: str, words: str, path: str = "/api/chat", **options: Any) -> Attack:
    prompt = (
        {"messages": [{"role": "user", "content": "hello"}]} if path == "/api/chat" else {"prompt": "hello"}
    )
    return Attack(name, path, {"model": "m", **prompt, "options": {"num_predict": 4, **options}}, words)


def attacks() -> Iterator[Attack]:
    yield from token_ids()
    yield from counts()
    yield from numbers()
    yield from empty_prompts()
    yield from names()
    yield from grammars()
    yield from rest()
    yield from texts()
    yield from other_routes()


def token_ids() -> Iterator[Attack]:
    for bad in (-1, VOCAB, 10**6, 2**31, 2**62, -(2**63)):
        yield native(f"token {bad}", f"0 to {VOCAB - 1}", input_ids=[5, bad, 7])
        yield native(f"token {bad} in a batch", "input_ids[1][0]", input_ids=[[5], [bad]])
        yield native(f"stop token {bad}", "stop_token_ids", {"stop_token_ids": [bad], "min_new_tokens": 2})
        yield native(f"bias of token {bad}", "logit_bias", {"logit_bias": {str(bad): 1.0}})
        yield native(
            f"logprob of token {bad}", "token_ids_logprob", token_ids_logprob=[bad], return_logprob=True
        )
        yield completion(f"completion token {bad}", f"0 to {VOCAB - 1}", prompt=[5, bad])
    yield native("token true", "input_ids", input_ids=[5, True, 7])
    yield native("bias of no number", "logit_bias", {"logit_bias": {"x": 1.0}})
    yield native("bias 1e300", "logit_bias", {"logit_bias": {"3": 1e300}})


def counts() -> Iterator[Attack]:
    yield native("top_k 2^31", "top_k", {"top_k": 2**31})
    yield native("top_k 0", "top_k", {"top_k": 0})
    yield native("n 10^9", "sampling_params.n", {"n": 10**9})
    yield native("n 0", "sampling_params.n", {"n": 0})
    yield native("n -1", "sampling_params.n", {"n": -1})
    yield native("n 1.5", "sampling_params.n", {"n": 1.5})
    yield native("top logprobs above V", "top_logprobs_num", top_logprobs_num=VOCAB + 1, return_logprob=True)
    yield native("top logprobs 100000", "top_logprobs_num", top_logprobs_num=100000, return_logprob=True)
    yield native("top logprobs -1", "top_logprobs_num", top_logprobs_num=-1, return_logprob=True)
    yield completion("logprobs 5000", "logprobs must be an integer from 0 to", logprobs=5000)
    yield chat("top_logprobs 5000", "top_logprobs must be", logprobs=True, top_logprobs=5000)
    yield native("logprobs from beyond", "logprob_start_len", logprob_start_len=9, return_logprob=True)
    yield native("logprobs from -2", "logprob_start_len", logprob_start_len=-2, return_logprob=True)
    yield native("max_new_tokens 2^31", "max_new_tokens", {"max_new_tokens": 2**31})
    yield native("max_new_tokens -1", "max_new_tokens", {"max_new_tokens": -1})
    yield native("min_new_tokens 2^40", "min_new_tokens", {"min_new_tokens": 2**40})
    yield native("stream_interval 0", "stream_interval", {"stream_interval": 0})
    yield native("priority 2^70", "", priority=2**70)
    yield chat("seed 2^70", "seed", seed=2**70)


def numbers() -> Iterator[Attack]:
    for bad in (1e300, -1.0):
        yield native(f"temperature {bad}", "temperature", {"temperature": bad})
        yield native(f"top_p {bad}", "top_p", {"top_p": bad})
        yield native(f"min_p {bad}", "min_p", {"min_p": bad})
        yield native(f"repetition_penalty {bad}", "repetition_penalty", {"repetition_penalty": bad})
    for name in ("frequency_penalty", "presence_penalty"):
        yield native(f"{name} 3", name, {name: 3})
    for bad in (float("nan"), float("inf"), float("-inf")):
        yield native(f"temperature {bad}", "JSON", {"temperature": bad})
    yield native("repetition_penalty 1e-300", "repetition_penalty", {"repetition_penalty": 1e-300})
    yield native("temperature as text", "temperature", {"temperature": "hot"})
    yield native("top_p 0", "top_p", {"top_p": 0})
    yield native("top_k as text", "top_k", {"top_k": "5"})


def empty_prompts() -> Iterator[Attack]:
    yield native("no text", "at least 1 token", text="")
    yield native("no text in a batch", "at least 1 token", text=["hello", ""])
    yield native("no ids", "", input_ids=[])
    yield native("no ids in a batch", "at least 1 token", input_ids=[[5], []])
    for nobody in ({"rid": "x"}, {"id": None}):
        for prompt in ({"text": ""}, {"text": ["hello", ""]}, {"input_ids": [[]]}):
            name = f"an empty prompt for the session of {nobody}, {prompt}"
            yield native(name, "session_params.id must name", session_params=nobody, **prompt)
    yield native("no prompts", "", text=[])
    yield native("a prompt of null", "", text=["a", None])
    yield completion("empty completion", "", prompt="")
    yield completion("no completion prompts", "", prompt=[])
    yield completion("empty completion in a batch", "", prompt=["a", ""])
    yield chat("empty chat", "", messages=[{"role": "user", "content": ""}])
    yield chat("no messages", "", messages=[])
    yield Attack(
        "empty ollama chat", "/api/chat", {"model": "m", "messages": [{"role": "user", "content": ""}]}, ""
    )
    yield native("half a surrogate pair", "JSON", text="a\ud800b")


def names() -> Iterator[Attack]:
    yield native("rid 5", "rid", rid=5)
    yield native("rid empty", "rid", rid="")
    yield native("rid too long", "rid", rid="x" * 300)
    yield native("rid of a health check", "HEALTH_CHECK", rid="HEALTH_CHECK_1")
    yield native("rids of a single prompt", "rid", rid=["a", "b"])
    yield native("too few rids", "rid", rid=["a"], input_ids=[[5], [6]])
    yield native("one rid twice", "", rid=["a", "a"], input_ids=[[5], [6]])
    yield native("unknown sampling parameter", "is_normalized", {"is_normalized": True})
    yield native("session without id", "", session_params={"rid": 5})
    yield native("session replaced as a whole", "", session_params={"id": "s", "replace": True})
    yield native("session of another kind", "session_params", session_params={"nope": 1})
    yield native("unknown session", "", session_params={"id": "nobody"})
    yield native("foreign endpoint", "http_worker_ipc", http_worker_ipc="tcp://127.0.0.1:1")
    yield native("LoRA", "lora_path", lora_path="x")
    yield native("a label that the metrics lack", "custom_labels", custom_labels={"tenant": "a"})


def grammars() -> Iterator[Attack]:
    for name, schema in (("recursive", RECURSIVE), ("deep", DEEP), ("no JSON", "{")):
        yield native(f"{name} schema", "json_schema", {"json_schema": schema})
    yield native("chain of schemas", "schemas deep", {"json_schema": CHAIN})
    yield native("remote schema", "$ref", {"json_schema": '{"$ref": "http://127.0.0.1/x"}'})
    yield chat(
        "recursive chat schema", "",
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}},
    )  # fmt: skip
    yield native("regex of a million terms", "regex", {"regex": "((a{99}){99}){99}"})
    yield native("no regex", "", {"regex": "("})
    yield native("no grammar", "", {"ebnf": "root ::= "})
    for drawn in ({"temperature": 0}, {"temperature": 1, "top_k": 3}, {"temperature": 1}):
        params = {"ebnf": "root ::= root", **drawn}
        yield native(f"a grammar that allows nothing, {drawn}", "cannot be completed", params)
    yield native("two grammars", "", {"regex": "a", "ebnf": 'root ::= "a"'})
    for pattern in ("(a+)+$", "(a|a)*b", "(a", r"(a)\1", ".*.*.*x", "a?" * 20 + "b", "(a|aa)" * 20):
        yield native(f"stop_regex {pattern[:12]}", "stop_regex", {"stop_regex": pattern})


def rest() -> Iterator[Attack]:
    yield native("embeddings", "", input_embeds=[[0.1, 0.2]])
    yield native("an image", "image_data", image_data="data:image/png;base64,AAAA")
    yield native("nested custom_params", "custom_params", {"custom_params": _nested(20)})
    yield native("custom_params as text", "custom_params", {"custom_params": "x"})
    for name in ("stop", "stop_regex"):
        yield native(f"{name} of nothing", f"{name}[0] must be text of 1 to", {name: [""]})
    yield native("an answer that nobody waits for", "background is not served", background=True)
    yield native("beam search", "beam_width", {"beam_width": 4})
    yield native("hidden states of a single prompt", "one value for one prompt", return_hidden_states=[False])
    yield native("positions to pool", "token_indices_to_pool", token_indices_to_pool=[10**9])
    yield native("delimiters", "multi_item_delimiter_indices", multi_item_delimiter_indices=[-7])
    yield native("overrides", "positional_embed_overrides", positional_embed_overrides={"a": 1})
    yield native("SLO of a class nobody knows", "", {"custom_params": {"slo_class": "nobody"}})


def texts() -> Iterator[Attack]:
    """What costs the HTTP process more than the request is worth."""
    loop = {"chat_template": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"}
    responses = {"model": "m", "input": "a", "max_output_tokens": 4}
    yield Attack("a template", "/v1/responses", {**responses, "chat_template_kwargs": loop}, "chat_template")
    question = {"id": "a", "type": "yes_no", "question": "b"}
    decisions = {"model": "m", "input": "a", "questions": [question]}
    yield Attack(
        "another template", "/v1/decisions", {**decisions, "chat_template_kwargs": loop}, "chat_template"
    )
    yield chat("padding", "padding", chat_template_kwargs={"padding": "max_length", "max_length": 10**9})
    long = "the quick fox " * 500_000
    yield native("a long text", TOO_LONG, text=long)
    yield chat("a long message", TOO_LONG, messages=[{"role": "user", "content": long}])
    yield Attack("a long prompt", "/api/generate", {"model": "m", "prompt": long}, TOO_LONG)
    yield Attack("a long count", "/tokenize", {"model": "m", "prompt": long}, TOO_LONG)
    many = {"model": "m", "prompt": ["the quick fox " * 5] * 20_000}
    yield Attack("many counts", "/tokenize", many, "characters or ids in all")
    yield Attack(
        "many ids", "/detokenize", {"model": "m", "tokens": [5] * 1_100_000}, "characters or ids in all"
    )
    score = {"model": "m", "query": "a" * 10_000, "items": ["b"] * 4000, "label_token_ids": [5]}
    yield Attack("items after a long query", "/v1/score", score, "send it in parts")
    rerank = {"query": "a", "documents": ["b"] * 5000}
    yield Attack("many documents", "/v1/rerank", rerank, "documents: a request may become at most")
    many = {**decisions, "questions": [{**question, "id": str(i)} for i in range(5000)]}
    yield Attack("many questions", "/v1/decisions", many, "")
    wrong = [{"role": "nobody", "content": 5}] * 20_000
    yield chat("many wrong messages", "messages[0].role: 'role' must be one of", messages=wrong)
    yield chat("very many messages", "values besides token ids", messages=wrong * 5)
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(250)}}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(100)]
    yield chat("many large tools", "tools are refused, send fewer or smaller ones", tools=tools)
    call = {"type": "function", "function": {"name": "f"}}
    parse = {"text": "<tool_call>" * 40_000, "tools": [call], "tool_call_parser": "glm47"}
    yield Attack("a text full of calls", "/parse_function_call", parse, "not parsed")
    parse = {"text": '{"a": ' * 100_000, "tools": [call], "tool_call_parser": "llama3"}
    yield Attack("a text of deep calls", "/parse_function_call", parse, "nested too deeply")


def _nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def other_routes() -> Iterator[Attack]:
    for path in ("/api/chat", "/api/generate"):
        yield ollama(f"{path} top_k", "top_k", path, top_k=2**31)
        yield ollama(f"{path} temperature", "temperature", path, temperature=-1)
        yield ollama(f"{path} stop", "stop", path, stop=[5])
        yield ollama(f"{path} num_predict", "num_predict must be", path, num_predict=2**40)
        yield ollama(f"{path} seed", "seed", path, seed="x")
    for name in ("tools", "messages", "add_generation_prompt", "tokenize"):
        yield chat(f"template argument {name}", "chat template", chat_template_kwargs={name: 5})
    for tokens in ([-1], [[5], [VOCAB]]):
        yield Attack(
            f"text of {tokens}", "/detokenize", {"model": "m", "tokens": tokens}, f"0 to {VOCAB - 1}"
        )
    yield native("a processor of nothing", "cannot be read", custom_logit_processor="{}")
    yield Attack("chat of nothing", "/api/chat", {"model": "m", "messages": []}, "at least one message")
    vertex = {"instances": [{"text": "fox"}], "parameters": {"sampling": 5}}
    yield Attack("unknown parameter", "/vertex_generate", vertex, "sampling")
    call = {"text": "a", "tools": [], "tool_call_parser": "x"}
    yield Attack("unknown parser", "/parse_function_call", call, "tool_call_parser")
    embed = {"model": "m", "input": "hello"}
    yield Attack("embeddings", "/v1/embeddings", embed, "")
    yield Attack("encode", "/encode", {"text": "hello"}, "")
    yield Attack("classify", "/classify", {"text": "hello"}, "")
    yield Attack(
        "score", "/v1/score", {"model": "m", "query": "a", "items": ["b"], "label_token_ids": [VOCAB]}, ""
    )
    yield Attack("responses", "/v1/responses", {"model": "m", "input": "hello", "top_k": 2**31}, "")
    long = {"session_id": "x" * 300}
    yield Attack(
        "a long session id", "/open_session", {"capacity_of_str_len": 9, **long}, "session_id must be"
    )
    yield Attack("a session nobody can have", "/close_session", long, "session_id must be")
    message = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    yield Attack("messages", "/v1/messages", {**message, "top_k": 2**31}, "")
    yield Attack("slow_down", "/slow_down", {"forward_sleep_time": -1}, "refused")
    yield Attack("weights", "/update_weights_from_disk", {"model_path": "x"}, "refused")
    yield Attack("profile", "/start_profile", {"activities": ["RPD"]}, "refused")
    yield Attack("memory", "/release_memory_occupation", {}, "refused")
    for key, value, words in (
        ("adaserve_policy=best", 1, "unknown policy 'best': known are adaserve"),
        ("adaserve_policy", "best", ""),
        ("adaserve_next_request", 2**60, "whole number"),
    ):
        yield Attack(f"set {key} {value}", "/set_internal_state", {"server_args": {key: value}}, words)
