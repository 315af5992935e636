"""Refusals in the words of OpenAI's and Anthropic's APIs, for clients that know no other.

SGLang makes its own request of one of theirs, and that is what is checked: it has a
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
_MOST = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_NAMES = {
    "text": _PROMPT,
    **dict.fromkeys(("input_ids", "image_data", "video_data", "audio_data"), _PROMPT),
    "max_new_tokens": _MOST,
    "max_completion_tokens": _MOST,  # SGLang says so of the older name, too
    "min_new_tokens": ("min_tokens",),
    "sampling_seed": ("seed",),
    "top_logprobs_num": ("top_logprobs", "logprobs"),
    "stop": ("stop", "stop_sequences"),
    "json_schema": ("json_schema", "response_format", "text", "output_config", "tools"),
    "structural_tag": ("response_format", "tools"),
}
"""What SGLang's request calls them, and the fields of the client's that they are made of: the first that was
sent."""

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
    found = list(dict.fromkeys((_path(error, body), _reason(error)) for error in errors[:MAX_READ]))
    of_others = tuple(path for path, _ in found if not path.endswith(".role"))
    told = [
        f"{path}: {why}"
        for path, why in found
        # A message is tried as every kind of message. Where its role fits one kind, the others complain.
        if not path.endswith(".role") or not any(p.startswith(path.removesuffix("role")) for p in of_others)
    ]
    return "; ".join(told[:MAX_ERRORS]) + ("; and more" if len(told) > MAX_ERRORS else "")


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
        return f"the body must be JSON, and said to be by the header content-type: application/json, {sent}"
    return None


def _path(error: dict[str, Any], body: Any) -> str:
    """Pydantic also names the types that it tries; they are in no body."""
    place = error.get("loc", ())
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
    if error["type"] == "json_invalid":
        return f"{reason}: {error['ctx']['error']}"
    if error["type"] == "missing" or "input" not in error:
        return reason
    return f"{reason}, got {shown(error['input'])}"
