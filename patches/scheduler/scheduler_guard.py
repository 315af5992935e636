"""The scheduler refuses a request id that is live, and a request that it fails to accept ends alone.

Why: with several HTTP workers none of them knows the others' request ids, and two requests of one id in a
batch end the scheduler. The detokenizer keeps its state by id as well, so the second is answered past it.

An exception while a request is accepted (a session that cannot be continued, say) would leave the
scheduler's loop and end the server. Until the request is queued nothing else refers to it, so it alone is
refused. Once it is queued, or in any other place, an exception still ends the scheduler: its state could
be wrong.

SGLang aborts by prefix: when the client of request ``a`` hangs up, every request whose id starts with ``a``
would end. Here only ``a`` does. SGLang makes ``a_0``, ``a_1``, ... of a batch ``a``. With one HTTP process
each of them is aborted by its own id. With several, an abort of ``a`` may come through one that does not know
the batch, so there it ends them as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any
from weakref import WeakValueDictionary

from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook

logger = logging.getLogger("adaserve")

_KNOWN = "_adaserve_requests"
_HIDDEN = "\0"  # no id of a client starts with it while others are aborted


def register() -> None:
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    hook(f"{scheduler}._create_generation_req", _remember, HookType.AFTER)
    hook(f"{scheduler}.handle_generate_request", _take_in, HookType.AROUND)
    hook(f"{scheduler}.abort_request", _abort, HookType.AROUND)


def known_requests(scheduler: Any) -> WeakValueDictionary[str, Any]:
    """Requests by id; one may have ended and not be collected yet."""
    return vars(scheduler).setdefault(_KNOWN, WeakValueDictionary())


def is_live(scheduler: Any, rid: str) -> bool:
    """Whether a request of this id waits or runs."""
    req = known_requests(scheduler).get(rid)
    return req is not None and not req.finished() and _is_queued(scheduler, req)


def _is_queued(scheduler: Any, req: Any) -> bool:
    queues = (scheduler.waiting_queue, scheduler.grammar_manager.grammar_queue, [scheduler.chunked_req])
    return (
        any(req is other for queue in queues for other in queue) or req in scheduler.collect_inflight_reqs()
    )


def _remember(req: Any, self: Any, *_: Any, **__: Any) -> None:
    known_requests(self)[req.rid] = req


def _take_in(original: Callable[..., None], self: Any, recv_req: Any, **more: Any) -> None:
    if is_live(self, recv_req.rid):
        why = f"rid {recv_req.rid!r} belongs to a request that still runs"
        return refuse(self, recv_req, HTTPStatus.BAD_REQUEST, why)
    try:
        return original(self, recv_req, **more)
    except Exception:
        if is_live(self, recv_req.rid):
            raise
        logger.exception("AdaServe: request %r could not be accepted and was refused", recv_req.rid)
        why = "the scheduler could not accept this request"
        return refuse(self, recv_req, HTTPStatus.INTERNAL_SERVER_ERROR, why)


def refuse(scheduler: Any, recv_req: Any, status: HTTPStatus, message: str) -> None:
    """Answers the HTTP process directly, past the detokenizer, whose state belongs to the live request."""
    from sglang.srt.managers.io_struct import AbortReq

    reason = {"type": "abort", "status_code": int(status), "message": message, "err_type": status.phrase}
    scheduler.send_abort_output(AbortReq(rid=recv_req.rid, finished_reason=reason), recv_req)


def _abort(original: Callable[..., None], self: Any, recv_req: Any) -> None:
    if recv_req.abort_all:
        return original(self, recv_req)
    batches = self.server_args.tokenizer_worker_num > 1
    others = [req for rid, req in known_requests(self).items() if _only_a_prefix(recv_req.rid, rid, batches)]
    with _hidden(others):
        return original(self, recv_req)


def _only_a_prefix(wanted: str, rid: str, batches: bool) -> bool:
    """Whether ``rid`` starts with ``wanted`` and names another request. ``batches``: ``wanted`` may also be
    that of a whole batch."""
    rest = rid.removeprefix(wanted) if rid.startswith(wanted) else ""
    return rest != "" and not (batches and rest[0] == "_" and rest[1:].isdecimal())


@contextmanager
def _hidden(requests: list[Any]) -> Iterator[None]:
    """Their ids start with no other id for a while."""
    for req in requests:
        req.rid = _HIDDEN + req.rid
    try:
        yield
    finally:
        for req in requests:
            req.rid = req.rid.removeprefix(_HIDDEN)
