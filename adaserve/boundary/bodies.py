"""A body of very many small parts is refused before it is looked at.

Bodies are checked against their route's types in the HTTP event loop. Each part that is wrong becomes several
errors of a kilobyte: 1.5 MB of messages of a role that there is not became an answer of 250 MB.
"""

from __future__ import annotations

from typing import Any

from adaserve.boundary.errors import RequestError, shown

MAX_VALUES = 1 << 16
"""Values in all lists and objects of a body, but for lists and objects of nothing but numbers."""

MAX_ERRORS = 8
"""Of a body that are told."""

_NUMBERS = {int, float}


def require_few_values(body: Any) -> None:
    """Raises RequestError for parsed JSON of too many values; token ids and biases are not counted."""
    left, waiting = MAX_VALUES, [body]
    while waiting:
        part = waiting.pop()
        values = part.values() if isinstance(part, dict) else part
        if set(map(type, values)) <= _NUMBERS:
            continue
        left -= len(values)
        if left < 0:
            raise RequestError(
                f"a body may hold at most {MAX_VALUES} values besides numbers: send it in parts"
            )
        waiting.extend(value for value in values if isinstance(value, dict | list))


def told(errors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first errors of a body, with what was wrong cut short."""
    return [{**e, "input": shown(e["input"])} if "input" in e else e for e in errors[:MAX_ERRORS]]
