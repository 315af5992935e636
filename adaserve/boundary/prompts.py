"""Texts that hold more tokens than fit are refused before all of them is tokenized.

Tokenizing holds up everybody's answers: it takes the HTTP process some seconds for a body of 8 MB.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from adaserve.boundary.errors import RequestError

CHARACTERS_PER_TOKEN = 16
"""More than most texts have; one that has more is read further."""

MAX_TEXTS_CHARACTERS = 1 << 20
"""Of a request whose texts are tokenized in one go: a second or two."""

_EDGE = 1024
"""Tokens by which the beginning of a text may have more than the whole: its last word is cut in two."""


def require_fitting(text: str, context: int, count: Callable[[str], int]) -> None:
    """Raises RequestError if ``text`` surely has more tokens than ``context``; ``count`` tells how many."""
    size = CHARACTERS_PER_TOKEN * context
    while size < len(text):
        if (tokens := count(text[:size])) > context + _EDGE:
            raise RequestError(
                f"the text of {len(text)} characters is longer than the context of {context} tokens: "
                f"its first {size} characters are {tokens} tokens"
            )
        size *= 4


def require_few(name: str, texts: Sequence[object], context: int) -> None:
    """Raises RequestError for more text in one request than should be tokenized in one go."""
    most = max(MAX_TEXTS_CHARACTERS, CHARACTERS_PER_TOKEN * context)
    if (size := sum(len(t) for t in texts if isinstance(t, str | list))) > most:
        raise RequestError(
            f"{name} may hold at most {most} characters in all, got {size}: send them in parts"
        )
