"""What clients choose becomes few labels of SGLang's metrics.

Why: SGLang counts requests by path, and by priority with --enable-priority-scheduling, and keeps every label
for ever: paths that nobody serves, as long and as many as anybody likes, and any of four billion priorities.
Here such paths share one label, and priorities beyond the first ones have none. Other methods than HTTP's
usual ones are refused (``routes.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook
from adaserve.patches.boundary import applies

OTHER_PATHS = "other"
MAX_PRIORITIES = 32

_KNOWN = "_adaserve_priorities"


def register() -> None:
    label = "sglang.srt.observability.http_request_metrics._get_fastapi_request_path"
    hook(label, _path, HookType.AFTER)
    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    hook(f"{manager}.collect_metrics", _few_priorities, HookType.AROUND)
    collector = "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector"
    hook(f"{collector}._log_gauge_queue_count", _few_queues, HookType.BEFORE)


def _path(found: tuple[str, bool], _: Any) -> tuple[str, bool]:
    """``found``: a request's path, and whether a route serves it."""
    return found if found[1] else (OTHER_PATHS, False)


def _few_priorities(original: Callable[..., None], self: Any, state: Any, *rest: Any) -> None:
    priority = getattr(state.obj, "priority", None)
    known: set[int] = vars(self).setdefault(_KNOWN, set())
    if priority is None or priority in known or not applies(self.server_args):
        return original(self, state, *rest)
    if len(known) < MAX_PRIORITIES:
        known.add(priority)
        return original(self, state, *rest)
    state.obj.priority = None  # the metrics' own label is empty
    try:
        return original(self, state, *rest)
    finally:
        state.obj.priority = priority


def _few_queues(collector: Any, _: Any, queue: Any) -> None:
    """``queue``: how many requests wait or run, by priority too."""
    known: set[int] = collector._known_priorities
    for priority in list(queue.by_priority or ()):
        if priority not in known and len(known) >= MAX_PRIORITIES:
            del queue.by_priority[priority]
        else:
            known.add(priority)
