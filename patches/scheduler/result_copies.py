"""Copies results from the device as soon as they exist.

Why: SGLang copies an iteration's tokens to the host after everything that is queued by then, which with
AdaServe includes the next draft. The host would get them a draft later. In these milliseconds it could
already send tokens to clients, and end requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook

BEHIND = "_adaserve_behind"
"""Attribute of a result: the event after which all of it is there."""


def register() -> None:
    hook("sglang.srt.managers.scheduler.Scheduler._copy_result_to_cpu", _copy, HookType.AROUND)


class _Until:
    """What a stream that waits for another one asks of it."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def record_event(self) -> Any:
        return self._event


def _copy(original: Callable[[Any, Any, Any], None], self: Any, result: Any, batch: Any) -> None:
    event = getattr(result, BEHIND, None)
    if event is None:
        return original(self, result, batch)
    stream, self.forward_stream = self.forward_stream, _Until(event)
    try:
        return original(self, result, batch)
    finally:
        self.forward_stream = stream


def allow_behind(result: Any, mark: Any) -> None:
    """All of ``result`` is there at ``mark`` in the device's queue."""
    if (event := getattr(mark, "event", None)) is not None:  # on a CPU it is there already
        setattr(result, BEHIND, event)
