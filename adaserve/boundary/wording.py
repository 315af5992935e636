"""Refusals in the words of OpenAI's, Anthropic's and Ollama's APIs, for clients that know no other.

SGLang turns such a request into its own form, which is what is checked: it has a
``sampling_params.max_new_tokens`` where the client wrote ``max_tokens``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from adaserve.boundary.errors import shown

MAX_ERRORS, MAX_READ = 8, 64
"""Of a body that are told, and that are looked at."""

_PROMPT = ("input_ids", "prompt", "messages", "input")
_MOST = ("max_completion_tokens", "max_tokens", "max_output_tokens", "num_predict")
_NAMES = {
    "text": _PROMPT,
    **dict.fromkeys(("input_ids", "image_data", "video_data", "audio_data"), _PROMPT),
    "max_new_tokens": _MOST,
    "max_completion_tokens": _MOST,  # SGLang says so of the older name, too
    "min_new_tokens": ("min_tokens",),
    "sampling_seed": ("seed",),
    "repetition_penalty": ("repetition_penalty", "repeat_penalty"),
    "top_logprobs_num": ("top_logprobs", "logprobs"),
    "stop": ("stop", "stop_sequences"),
    "json_schema": ("json_schema", "response_format", "text", "output_config", "tools"),
    "structural_tag": ("response_format", "tools"),
}
"""What SGLang's request calls them, and the fields of the client's that they are made of: the first that was
sent."""

_KINDS = ("role", "type")
"""Fields that say which kind of a message or a format something is."""

_OBJECTS = ("dict_type", "model_type", "model_attributes_type")

_NAME = re.compile(r"\bsampling_params\.\w+|^\w+|\b(?:max|min)_new_tokens\b")

_SOURCE = re.compile(r"\[[\d:]+\] \S+:\d+: |Check failed: \(.*?\) is false: ")
"""How xgrammar begins: ``[18:46:22] /project/cpp/compiler.cc:12: Check failed: (a < b) is false: ``."""


def as_sent(message: str, sent: Collection[str], known: Collection[str]) -> str:
    """``message`` with the names of the fields that the client has ``sent``, or else those that it could have
    sent, as far as they are ``known`` to the route."""

    def name(found: re.Match[str]) -> str:
        own = found[0].removeprefix("sampling_params.")
        names = _NAMES.get(own, ())
        return next((name for fields in (sent, known) for name in names if name in fields), own)

    if message.startswith("schema_ "):  # as SGLang calls it in Python
        message = f"response_format.json_schema.{message.replace('_', '', 1)}"
    return _NAME.sub(name, message)


def wrong_fields(errors: Sequence[dict[str, Any]], body: Any) -> str:
    """What Pydantic finds wrong with a ``body``, in a line: each field with the reason and the value."""
    own = _of_its_kind(errors[:MAX_READ], body)
    told = list(dict.fromkeys(f"{_path(error, body)}: {_reason(error)}" for error in own))
    return "; ".join(told[:MAX_ERRORS]) + ("; and more" if len(told) > MAX_ERRORS else "")


def cut_short(errors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first errors of a body, with what was wrong in a few words."""
    return [{**e, "input": shown(e["input"])} if "input" in e else e for e in errors[:MAX_ERRORS]]


def _of_its_kind(errors: Sequence[dict[str, Any]], body: Any) -> list[dict[str, Any]]:
    """A message, a part of one or a format is tried as every kind of it, and a list of parts also as a text.
    Kinds whose role or type it does not have say only so. Nothing is said of a whole, by these kinds or of
    its type, where something inside is told: there it is of a kind that is right."""
    others = {_loc(error)[:-1] for error in errors if _is_another_kind(error, body)}

    def outermost(at: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """The wrong kind that something is a part of."""
        return next((at[:n] for n in range(len(at)) if at[:n] in others), None)

    own = [_path(error, body) for error in errors if outermost(_loc(error)) is None]

    def has_more(place: str) -> bool:
        """Whether something inside is told."""
        return any(path.startswith((f"{place}.", f"{place}[")) for path in own)

    def counts(error: dict[str, Any]) -> bool:
        at = _loc(error)
        if (kind := outermost(at)) is None:
            return not has_more(_path(error, body))
        return at[:-1] == kind and at[-1] in _KINDS and not has_more(_path({"loc": kind, "type": ""}, body))

    return [error for error in errors if counts(error)]


def _loc(error: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(error.get("loc", ()))


def _is_another_kind(error: dict[str, Any], body: Any) -> bool:
    """Whether Pydantic has tried a type, and the body says that it is of another."""
    at = _loc(error)
    if not at or at[-1] not in _KINDS or error["type"] == "missing":
        return False
    tried, whole = ({"loc": place, "type": ""} for place in (at[:-1], at[:-2]))
    return _path(tried, body) == _path(whole, body)


def of_compiler(message: str) -> str:
    """What a grammar's compiler says, in a line and without the places in its own source."""
    said = " ".join(_SOURCE.sub("", message).split())
    return said or "it cannot be compiled, and the compiler does not say why"


def not_json(errors: Sequence[dict[str, Any]], body: Any, kind: str, encoding: str) -> str | None:
    """What is wrong with how a body was sent, if that is why it could not be read. ``kind`` and ``encoding``:
    of its headers, empty where they are missing."""
    if encoding.strip().lower() not in ("", "identity") and any(e["type"] == "json_invalid" for e in errors):
        return f"the body is encoded as {shown(encoding)}: send it as it is, without content-encoding"
    if isinstance(body, bytes) or any(tuple(e.get("loc", ())) == ("header", "content-type") for e in errors):
        sent = f"got {shown(kind)}" if kind else "which is missing"
        return f"the body must be JSON, with the header content-type: application/json, {sent}"
    return None


def _path(error: dict[str, Any], body: Any) -> str:
    """Pydantic also names the types that it tries; they are in no body."""
    place = _loc(error)
    if place[:1] == ("query",):
        return f"{place[-1]} of the query"
    path, here = "", body
    parts = [part for part in place if part != "body"]
    for i, part in enumerate(parts):
        if isinstance(here, dict) and (part in here or (error["type"] == "missing" and i == len(parts) - 1)):
            path, here = f"{path}.{part}" if path else str(part), here.get(part)
        elif isinstance(here, list) and isinstance(part, int) and part < len(here):
            path, here = f"{path}[{part}]", here[part]
    return path or "the body"


def _reason(error: dict[str, Any]) -> str:
    reason = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] in _OBJECTS:
        reason = "Input should be an object"  # and not a dictionary, or an instance of some class
    if error["type"] == "json_invalid":
        return f"{reason}: {error['ctx']['error']}"
    if error["type"] == "missing" or "input" not in error:
        return reason
    return f"{reason}, got {shown(error['input'])}"
