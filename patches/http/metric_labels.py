"""Limits how many labels clients can create in SGLang's metrics.

Why: SGLang counts requests by path, by priority with --enable-priority-scheduling, and by what they say with
--tokenizer-metrics-allowed-custom-labels. It keeps every label forever: unknown paths of any length and
number, any of four billion priorities, and any text. Here such paths share one label, and priorities and
texts beyond the first ones have none. Other methods than HTTP's usual ones are refused (``routes.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook

OTHER_PATHS = "other"
MAX_PRIORITIES = 32
MAX_CUSTOM = 256
"""Combinations of the labels that --tokenizer-metrics-allowed-custom-labels names."""

_CHOSEN = {"priority": MAX_PRIORITIES, "custom_labels": MAX_CUSTOM}
"""Fields of a request, and how many of their values become labels."""


def register() -> None:
    label = "sglang.srt.observability.http_request_metrics._get_fastapi_request_path"
    hook(label, _path, HookType.AFTER)
    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    hook(f"{manager}.collect_metrics", _few_labels, HookType.AROUND)
    collector = "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector"
    hook(f"{collector}._log_gauge_queue_count", _few_queues, HookType.BEFORE)


def _path(found: tuple[str, bool], _: Any) -> tuple[str, bool]:
    """``found``: a request's path, and whether a route serves it."""
    return found if found[1] else (OTHER_PATHS, False)


def _few_labels(original: Callable[..., None], self: Any, state: Any, *rest: Any) -> None:
    hidden = {}
    for field, most in _CHOSEN.items():
        value = getattr(state.obj, field, None)
        label = frozenset(value.items()) if isinstance(value, dict) else value
        known: set[Any] = vars(self).setdefault(f"_adaserve_{field}", set())
        if value is not None and label not in known:
            if len(known) < most:
                known.add(label)
            else:
                hidden[field] = value
                setattr(state.obj, field, None)  # the metrics' own label is empty
    try:
        return original(self, state, *rest)
    finally:
        for field, value in hidden.items():
            setattr(state.obj, field, value)


def _few_queues(collector: Any, _: Any, queue: Any) -> None:
    """``queue``: how many requests wait or run, by priority too."""
    known: set[int] = collector._known_priorities
    for priority in list(queue.by_priority or ()):
        if priority not in known and len(known) >= MAX_PRIORITIES:
            del queue.by_priority[priority]
        else:
            known.add(priority)
