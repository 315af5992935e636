"""An answer that has begun is not turned away, and ends in its place behind its own tokens.

Why: SGLang puts a request whose KV slots it takes back into the queue again. Where that is full
(``--max-queued-requests``), it answers like to one that has just come: with 503, in the middle of the text.

Where such a request ends while it waits, SGLang tells the HTTP process alone. The detokenizer keeps what it
knows of the text by the request's id, so the next answer of this id began with the end of its own prompt. Nor
did the SLO ledger hear that the server gave it up for lack of memory or of time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook
from adaserve.patches.scheduler.worker_interface import worker_of


def register() -> None:
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    hook(f"{scheduler}._abort_on_queued_limit", _refused, HookType.AROUND)
    hook(f"{scheduler}.send_abort_output", _ended, HookType.AROUND)


def _refused(original: Callable[[Any, Any], bool], self: Any, recv_req: Any) -> bool:
    """Whether a request that is about to be queued is turned away."""
    if recv_req.retraction_count:
        return False
    return original(self, recv_req)


def _ended(original: Callable[..., None], self: Any, abort_req: Any, req: Any) -> None:
    """``req``: SGLang's ``Req``; or what came of one that was never taken in, and has no tokens."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    if not getattr(req, "output_ids", None):
        return original(self, abort_req, req)
    worker_of(self).ended_early(req.rid, holds_row=False)  # if it gave up its slots just now
    req.to_finish = None
    if req.finished_reason is None:
        said = abort_req.finished_reason or {}
        req.finished_reason = FINISH_ABORT(said.get("message"), said.get("status_code"), said.get("err_type"))
    self.output_streamer.stream_output([req], req.return_logprob)
