"""Refuses a body that comes in very many tiny chunks.

Why: uvicorn reads requests by h11, in Python, where httptools is not installed. A chunk takes 12 microseconds
of the HTTP event loop, and all that have arrived are read in one go: 300,000 of one byte held up everybody's
tokens for 3.7 s.
"""

from __future__ import annotations

from typing import Any

import h11
from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook

FREE_CHUNKS = 1024
MIN_BYTES = 32
"""Of a chunk on average, where a body has more than the free ones."""


def register() -> None:
    hook("uvicorn.protocols.http.h11_impl.H11Protocol.__init__", _count_chunks, HookType.AFTER)


def _count_chunks(_: None, protocol: Any, *__: Any, **___: Any) -> None:
    protocol.conn.__class__ = FewChunks


class FewChunks(h11.Connection):
    """One that refuses such a body as it does what is no HTTP: uvicorn answers 400, and closes."""

    _chunks = _bytes = 0

    def next_event(self) -> Any:
        """As h11's. Raises RemoteProtocolError."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_end
            self._bytes += len(event.data)
            if self._chunks > FREE_CHUNKS and self._bytes < MIN_BYTES * self._chunks:
                raise h11.RemoteProtocolError("the body has too many tiny chunks")
        return event
