"""Fields of other servers that change an answer, and that SGLang ignores.

A client that asks for JSON by vLLM's ``guided_json`` would get any text, and take it for JSON. So such fields
are refused, in a sentence that says what to use. Fields that change only speed or bookkeeping are ignored.
But fields that ask AdaServe for a speed, or forbid it to learn, are refused where they would not be read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from adaserve.boundary.errors import RequestError, shown
from adaserve.boundary.request import EACH, WHOLE
from adaserve.boundary.sampling import FIELDS
from adaserve.boundary.values import is_integer
from adaserve.slo.resolve import (
    HEADER_CLASS,
    HEADER_LEARN,
    HEADER_SPECULATION,
    HEADER_TPOT,
    HEADER_TTFT,
    OWN_KEYS,
)

CONSTRAINTS = (
    "ebnf", "format", "grammar", "guided_choice", "guided_grammar", "guided_json", "guided_regex",
    "json_schema", "output_config", "output_format", "regex", "response_format", "structural_tag",
    "structured_outputs",
)  # fmt: skip
"""How clients of SGLang, vLLM, TGI, llama.cpp, Ollama, OpenAI and Anthropic say what the text may be."""

INSTEAD = {
    "allowed_token_ids": "use a grammar, or logit_bias",
    "bad_words": "use logit_bias, which can forbid tokens",
    "beam_width": "ADASERVE drafts trees and does not serve beam search",
    "chat_template": "the server has its own, see --chat-template",
    "documents": "put them into the messages, or into chat_template_kwargs",
    "functions": "use tools",
    "include_stop_str_in_output": "use no_stop_trim",
    "logits_processors": "use custom_logit_processor",
    "logprob_token_ids": "use token_ids_logprob of /generate",
    "prompt_logprobs": "use return_logprob and logprob_start_len of /generate",
    "truncate_prompt_tokens": "cut the prompt before it is sent",
    "use_beam_search": "ADASERVE drafts trees and does not serve beam search",
}
"""Fields that no route knows, and what to do without them."""

_SESSIONS = {"session_params": "continue the session on /generate"}
"""What only that route reads. SGLang drops it from other bodies, even from those that may hold it, and
answers as if nothing had been said before."""


_NO_BACKGROUND = "stay connected until the answer is there, or use it on /v1/responses"
"""On SGLang's own routes it would keep a request running whose client has left, and nobody could read it."""


def _fields(use: str, *known: str) -> dict[str, str]:
    fields = INSTEAD | _SESSIONS | dict.fromkeys(CONSTRAINTS, use)
    return {name: use for name, use in fields.items() if name not in known}


_IMAGES = "use image_url of /v1/chat/completions, with a model that takes images"
_OPENAI = ("response_format", "regex", "ebnf")
_CHATS = ("/v1/chat/completions", "/invocations")  # the latter as SageMaker calls it
_ROUTES = {
    **dict.fromkeys(_CHATS, _fields("use response_format, regex or ebnf", *_OPENAI)),
    "/v1/completions": _fields("use response_format, json_schema, regex or ebnf", *_OPENAI, "json_schema"),
    "/v1/responses": _fields("use text.format")
    | dict.fromkeys(("conversation", "prompt"), "send all of the input"),
    "/v1/messages": _fields("use output_config.format", "output_config"),
    "/generate": _fields("use json_schema, regex or ebnf in sampling_params", *_SESSIONS)
    | {"background": _NO_BACKGROUND},
    "/api/chat": _fields("use response_format of /v1/chat/completions")
    | {"tools": "use tools of /v1/chat/completions"},
    "/api/generate": _fields("use response_format of /v1/completions")
    | dict.fromkeys(("context", "template"), "put all of the text into prompt")
    | {"images": _IMAGES},
}
"""Route -> field that it ignores -> what to use."""

_DRAWS = {"mirostat": 0, "tfs_z": 1, "typical_p": 1}
"""Ways to draw tokens among Ollama's options, which SGLang leaves out -> the value that asks for nothing."""

_LENGTHS = ("max_new_tokens", "max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict")
_NAMES = {
    "min_new_tokens": "min_tokens", "sampling_seed": "seed", "return_logprob": "logprobs",
    "stop_sequences": "stop",
}  # fmt: skip
_OF_ZERO = {*_LENGTHS, "sampling_seed"}
"""Names with which 0 asks for something: for no token in place of the usual length, or for one seed."""
_OWN: dict[str, tuple[tuple[str, ...], Mapping[str, str]]] = {
    **dict.fromkeys(_CHATS, (("max_tokens", "max_completion_tokens"), _NAMES)),
    "/v1/completions": (("max_tokens",), _NAMES),
    "/v1/responses": (("max_output_tokens",), {"stop_sequences": "stop"}),
    "/v1/messages": (("max_tokens",), {"stop": "stop_sequences"}),
}
"""Route -> its names for the longest answer -> other routes' names for what it knows -> its own."""

_HEADERS = ", ".join((HEADER_CLASS, HEADER_TPOT[0], HEADER_TTFT[0], HEADER_SPECULATION, HEADER_LEARN))
_IN_HEADERS = f"use the headers {_HEADERS}"
_IN_PARAMS = {
    **dict.fromkeys((*_CHATS, "/v1/completions"), "put it into custom_params"),
    "/generate": "put it into custom_params of sampling_params",
}
_VERTEX = "/vertex_generate"
_NO_PARAMS = (
    "/v1/responses", "/v1/messages", "/v1/score", "/v1/decisions", "/v1/systemone", "/api/chat",
    "/api/generate", _VERTEX,
)  # fmt: skip
"""Routes that read neither ``custom_params`` nor ``nvext``."""

_VARIABLES = {
    "AIP_PREDICT_ROUTE": _VERTEX,
    "SGLANG_OLLAMA_CHAT_ROUTE": "/api/chat",
    "SGLANG_OLLAMA_GENERATE_ROUTE": "/api/generate",
}
"""From which SGLang takes the path of a route -> its usual path. Vertex AI sets the first one itself."""


def renamed(environ: Mapping[str, str]) -> dict[str, str]:
    """Path -> usual path, of the routes that have another one. One that a route above has means that one."""
    known = {*_ROUTES, *_OWN, *_NO_PARAMS}
    given = {environ.get(variable, path): path for variable, path in _VARIABLES.items()}
    return {path: usual for path, usual in given.items() if path not in known}


_RENAMED = renamed(os.environ)

_OF_SAMPLING = FIELDS.keys() - EACH.keys() - WHOLE.keys()
_OF_REQUEST = FIELDS.keys() | EACH.keys() | WHOLE.keys() | {"token_ids_logprob", "sampling_params"}
_OF_INSTANCE = {"text", "input_ids", "input_embeds", "image_data"}
"""What Vertex AI's route reads of a prompt. All else of a request it takes from ``parameters``."""
_BESIDE_PARAMETERS = _OF_REQUEST | {*OWN_KEYS, "nvext"}
_BESIDE_A_PROMPT = _BESIDE_PARAMETERS - _OF_INSTANCE


def require_supported_fields(body: Mapping[str, Any], path: str) -> None:
    """Raises RequestError for a field that asks the route at ``path`` for something that it would not do.

    false, 0 and what is empty ask for nothing, but a sampling parameter or a wish in the wrong place does."""
    path = _RENAMED.get(path, path)
    unread = (*OWN_KEYS, "custom_params", "nvext") if path in _NO_PARAMS else OWN_KEYS
    for name in unread:
        if body.get(name) is not None:
            raise RequestError(f"{name} is not read here: {_IN_PARAMS.get(path, _IN_HEADERS)}")
    if path == "/generate":
        for name in _OF_SAMPLING & body.keys():
            if body[name] is not None:
                raise RequestError(f"{name} is not served here: put it into sampling_params")
    for name, use in _ROUTES.get(path, {}).items():
        if body.get(name):
            raise RequestError(f"{name} is not served: {use}")
    if path in _OWN:
        _require_own_names(body, *_OWN[path])
    if path == _VERTEX:
        _require_parameters(body)
    if path in _CHATS:
        _require_objects(body.get("response_format"))
    if path in ("/api/chat", "/api/generate"):
        _require_no_images(body.get("messages"))
        _require_served_draws(body.get("options"))
    best, n = body.get("best_of", 1), body.get("n") or 1
    if is_integer(best) and is_integer(n) and best > max(n, 1):
        raise RequestError("best_of is not served: ask for several answers with n, and choose one yourself")


def _require_objects(wanted: Any) -> None:
    """Raises RequestError for a response_format on which SGLang would fall over before it is checked."""
    if not wanted:
        return
    if not isinstance(wanted, Mapping):
        example = '{"type": "json_object"}'
        raise RequestError(f"response_format must be an object such as {example}, got {shown(wanted)}")
    if (schema := wanted.get("schema")) and not isinstance(schema, Mapping):
        raise RequestError(f"response_format.schema must be an object, got {shown(schema)}")


def _require_no_images(messages: Any) -> None:
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, Mapping) and message.get("images"):
            raise RequestError(f"messages[{i}].images is not served: {_IMAGES}")


def _require_served_draws(options: Any) -> None:
    for name, off in _DRAWS.items() if isinstance(options, Mapping) else ():
        if (value := options.get(name)) and value != off:
            raise RequestError(f"options.{name} is not served: use temperature, top_k, top_p or min_p")


def _require_parameters(body: Mapping[str, Any]) -> None:
    """Raises RequestError for what is said beside ``parameters``, or beside a prompt, and not read."""
    parameters, instances = body.get("parameters"), body.get("instances")
    if isinstance(parameters, Mapping) and parameters.get("background"):
        raise RequestError(f"parameters.background is not served: {_NO_BACKGROUND}")
    prompts = enumerate(instances if isinstance(instances, list) else ())
    beside_prompts = [(f"instances[{i}].", _BESIDE_A_PROMPT, prompt) for i, prompt in prompts]
    for where, names, said in [("", _BESIDE_PARAMETERS, body), *beside_prompts]:
        for name in names & said.keys() if isinstance(said, Mapping) else ():
            if said[name] is not None and (said[name] or name not in WHOLE):
                use = "put it into parameters" if name in _OF_REQUEST - {"custom_params"} else _IN_HEADERS
                raise RequestError(f"{where}{name} is not read here: {use}")


def _require_own_names(body: Mapping[str, Any], lengths: Sequence[str], names: Mapping[str, str]) -> None:
    """Raises RequestError for a field under another route's name, unless its own is there as well: a server
    would write answers of its usual length, or draw by another seed."""
    if body.get("sampling_params"):
        raise RequestError("sampling_params is not served here: put its fields into the body itself")
    if "max_completion_tokens" in lengths and body.get("max_completion_tokens") in (0, "0"):
        raise RequestError("max_completion_tokens must be at least 1, got 0")  # SGLang takes it for unset
    if all(body.get(name) is None for name in lengths):
        names = {**dict.fromkeys(_LENGTHS, lengths[0]), **names}
    for name, own in names.items():
        said = body.get(name)
        if (said or (said == 0 and name in _OF_ZERO)) and name not in lengths and body.get(own) is None:
            raise RequestError(f"{name} is not served here: use {own}")
