"""Answers waiting requests that would be too late with 429 (``--shed``).

Why: SGLang turns requests away when its queue is long or old, whatever they asked for. Its own time limits
are checked where every tensor-parallel rank hears of them in the same iteration; so are these. The reason
and ``Retry-After`` travel in the output that ends a request; ``load_headers`` makes headers of them.
"""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook
from adaserve.patches.scheduler.worker_interface import load_of, worker_of

REASON, RETRY_AFTER = "dropped_reason", "retry_after_s"


def register() -> None:
    hook("sglang.srt.managers.scheduler.Scheduler._poll_timeout_aborts", _with_refusals, HookType.AFTER)


def _with_refusals(aborts: list[Any], self: Any) -> list[Any] | None:
    from sglang.srt.managers.io_struct import AbortReq

    worker = worker_of(self)
    if not worker.shedder.enabled or not self.waiting_queue:
        return None
    gone = {abort.rid for abort in aborts}
    refused = worker.shedder.refusals(load_of(self), time.perf_counter())
    return aborts + [
        AbortReq(
            rid=req.rid,
            abort_message=refusal.message,
            finished_reason={
                "type": "abort",
                "status_code": int(HTTPStatus.TOO_MANY_REQUESTS),
                "message": refusal.message,
                REASON: refusal.reason,
                RETRY_AFTER: refusal.retry_after_s,
            },
        )
        for req, refusal in refused
        if req.rid not in gone
    ]
