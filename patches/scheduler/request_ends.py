"""Tells the worker of requests that end before they decode.

Why: SGLang tells a worker that a request has ended where it looks at a decode iteration. A request that ends
in its prefill, or is aborted between two chunks of its prompt or while it waits to run again, is never
reported. It would count as running until another request gets its row of the request pool.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook
from adaserve.patches.scheduler.worker_interface import worker_of

MANAGERS = "sglang.srt.managers"


def register() -> None:
    processor = f"{MANAGERS}.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    hook(f"{processor}.process_batch_result_prefill", _prefilled, HookType.AFTER)
    hook(f"{MANAGERS}.scheduler.Scheduler._release_aborted_request", _aborted, HookType.BEFORE)


def _prefilled(_: None, self: Any, batch: Any, result: Any) -> None:
    for req in batch.reqs:
        # What a middle chunk wrote still stands in the request's row, which nobody has been given since.
        if req.finished() and not req.is_retracted:
            self.draft_worker.ended_early(req.rid, holds_row=True)


def _aborted(self: Any, req: Any) -> None:
    worker_of(self).ended_early(req.rid, holds_row=req.kv.holds_kv)
