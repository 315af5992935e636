"""With ``--enable-response-store`` a server keeps only the most recently used responses.

Why: SGLang keeps every response of ``/v1/responses`` with its whole conversation, forever. Any client could
fill the host's memory with them.

SGLang reads the conversation that a response goes on with once more when the answer is there. By then it may
have been dropped for those of others, and the client would get an error in place of the answer. So a request
keeps what it has read.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.boundary import RequestError
from adaserve.patches import hook

MAX_CHARACTERS = 1 << 26
"""Of all responses that are kept, and as many of their conversations; for each HTTP process."""

_read: ContextVar[tuple[Any, list[Any]] | None] = ContextVar("adaserve_read", default=None)
"""The request at hand and its conversation, for all tasks that serve it."""


class Kept(dict[str, Any]):
    """What was stored or read last, by id. What is dropped here is dropped from the ``twin``, too."""

    def __init__(self) -> None:
        super().__init__()
        self.twin: Kept | None = None
        self._sizes: dict[str, int] = {}
        self._held = 0

    def __setitem__(self, key: str, value: Any) -> None:
        """Raises RequestError for what cannot be measured."""
        try:
            size = len(repr(value))
        except RecursionError as error:
            raise RequestError("input is nested too deeply to be kept: send it with store=false") from error
        self.pop(key, None)
        super().__setitem__(key, value)
        self._sizes[key] = size
        self._held += size
        while self._held > MAX_CHARACTERS and len(self) > 1:
            oldest = next(iter(self))
            self.pop(oldest)
            if self.twin is not None:
                self.twin.pop(oldest, None)

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        super().__delitem__(key)
        super().__setitem__(key, value)  # the newest again
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """As a dictionary does."""
        with suppress(KeyError):
            return self[key]
        return default

    def pop(self, key: str, *default: Any) -> Any:
        """As a dictionary does."""
        self._held -= self._sizes.pop(key, 0)
        return super().pop(key, *default)


def register() -> None:
    responses = "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses"
    hook(f"{responses}.__init__", _bound, HookType.AFTER)
    hook(f"{responses}._response_input_history", _as_read_first, HookType.AROUND)


def _bound(_: None, self: Any, *__: Any, **___: Any) -> None:
    responses, messages = Kept(), Kept()
    responses.twin, messages.twin = messages, responses
    self.response_store, self.msg_store = responses, messages


def _as_read_first(original: Callable[..., list[Any]], self: Any, request: Any) -> list[Any]:
    known = _read.get()
    if known is None or known[0] is not request:
        known = request, original(self, request)
        _read.set(known)
    return list(known[1])
