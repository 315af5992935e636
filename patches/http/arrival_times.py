"""The scheduler knows when a request arrived at the HTTP process.

Why: a request's TTFT counts from its arrival at the HTTP process. That time stays there unless it is put into
the state that travels to the scheduler, as SGLang's own comment at that place proposes; without it a request
that waits for a busy scheduler to read it would seem to have just arrived.

SGLang converts such times from one process to the other by what each of them last took for the difference
between ``time.perf_counter`` and the wall clock. Where that clock is set, all requests would have come hours
ago, or would not come for hours; and order, admission and shedding follow from that. The processes of a host
have one ``perf_counter``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook


def register() -> None:
    times = "sglang.srt.observability.req_time_stats"
    for sender in ("APIServerReqTimeStats", "DPControllerReqTimeStats"):
        hook(f"{times}.{sender}.__getstate__", _with_arrival, HookType.AFTER)
    hook(f"{times}.convert_time_cross_thread", as_it_is, HookType.AROUND)


def _with_arrival(state: dict[str, Any], stats: Any) -> dict[str, Any]:
    return {**state, "created_time": stats.created_time}


def as_it_is(original: Callable[..., float], time_value: float, *differences: float) -> float:
    """The time in this process, unless the other one may be on another host."""
    from sglang.srt.runtime_context import get_parallel

    return time_value if get_parallel().nnodes == 1 else original(time_value, *differences)
