"""A body of very many small parts is refused before it is looked at.

Bodies are checked against their route's types in the HTTP event loop. Each part that is wrong becomes several
errors of a kilobyte: 1.5 MB of wrong chat messages became an error of 123 MB.
"""

from __future__ import annotations

from typing import Any

from adaserve.boundary.errors import RequestError
from adaserve.boundary.limits import MAX_BODY_IDS, MAX_BODY_VALUES

_BIASES, _NO_PROMPT = "logit_bias", "tokens"


def require_few_values(body: Any, path: str, context: int | None = None) -> None:
    """Raises RequestError for parsed JSON of too many values. Counted apart are token ids, where the route of
    this ``path`` takes any, and not at all biases of tokens. ``context``: the most ids of a prompt, if
    anything limits them."""
    fields, left, waiting = _token_fields(path), MAX_BODY_VALUES, [(body, "")]
    ids_left = most_ids = max(context or 0, MAX_BODY_IDS)
    while waiting:
        part, name = waiting.pop()
        values = part.values() if isinstance(part, dict) else part
        types = set(map(type, values))
        if name in fields and types == {int}:
            if context is not None and name != _NO_PROMPT and len(values) > context:
                raise RequestError(
                    f"{name}: the prompt of {len(values)} tokens is longer than the model's context length "
                    f"({context} tokens)"
                )
            ids_left -= len(values)
            if ids_left < 0:
                raise RequestError(f"a body may hold at most {most_ids} token ids: send them in parts")
            continue
        if name == _BIASES and types <= {int, float}:
            continue
        left -= len(values)
        if left < 0:
            raise RequestError(
                f"a body may hold at most {MAX_BODY_VALUES} values besides token ids and biases: "
                "send it in parts"
            )
        named = part.items() if isinstance(part, dict) else ((name, value) for value in part)
        waiting.extend((value, key) for key, value in named if isinstance(value, dict | list))


def drop_nulls(body: dict[str, Any]) -> None:
    """Of the body itself; what null means further inside is known there."""
    for name in [name for name, value in body.items() if value is None]:
        del body[name]


def _token_fields(path: str) -> set[str]:
    if path.endswith("/detokenize"):
        return {_NO_PROMPT}
    if path == "/v1/score":
        return {"query", "items"}
    return {"input_ids", "prompt"} if path == "/v1/completions" else {"input_ids"}
