"""Refuses a text with more tokens than fit before the whole text is tokenized.

Tokenizing holds up everybody's answers: it takes the HTTP process some seconds for a body of 8 MB.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from adaserve.boundary.errors import RequestError
from adaserve.boundary.limits import MAX_BATCH

CHARACTERS_PER_TOKEN = 16
"""More than most texts have; one that has more is read further."""

MAX_TEXTS_CHARACTERS = 1 << 20
"""Of a request whose texts are tokenized in one go: a second or two."""

MAX_SCORED = 1 << 22
"""Of all prompts together that SGLang makes of one request, which repeats a text in each of them."""

_EDGE = 1024
"""Tokens by which the beginning of a text may have more than the whole: its last word is cut in two."""


def require_fitting(text: str, context: int, count: Callable[[str], int]) -> None:
    """Raises RequestError if ``text`` surely has more tokens than ``context``; ``count`` tells how many.

    The words are SGLang's own: by them clients know that they have to shorten a conversation.
    """
    size = CHARACTERS_PER_TOKEN * context
    while size < len(text):
        if (tokens := count(text[:size])) > context + _EDGE:
            raise RequestError(
                f"the text of {len(text)} characters is longer than the model's context length ({context} "
                f"tokens): its first {size} characters are {tokens} tokens"
            )
        size *= 4


def require_few_scored(name: str, prompts: int, size: int) -> None:
    """Raises RequestError for a request that becomes too many prompts. ``size``: characters or tokens."""
    if prompts > MAX_BATCH or size > MAX_SCORED:
        raise RequestError(
            f"{name}: a request may become at most {MAX_BATCH} prompts and {MAX_SCORED} characters or tokens "
            f"in all, got {prompts} and {size}: send it in parts"
        )


def require_few(name: str, texts: Sequence[object], context: int) -> None:
    """Raises RequestError for more text in one request than should be tokenized in one go."""
    most = max(MAX_TEXTS_CHARACTERS, CHARACTERS_PER_TOKEN * context)
    if (size := sum(len(t) for t in texts if isinstance(t, str | list))) > most:
        raise RequestError(
            f"{name} may hold at most {most} characters or ids in all, got {size}: send them in parts"
        )
