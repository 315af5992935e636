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

SGLang keeps as many open sessions as anybody cares to open, and every turn of theirs with its whole history.
Here the number of both is limited. A turn that takes the id of another one hides it from this count, but its
followers keep it alive; so ids of turns are taken once. The turns behind one that is replaced it drops one
inside the other, which Python ends after a thousand. Where a turn replaces all, it drops them from the
dictionary that it walks along, which Python refuses. Why a session is not opened it does not tell the client.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from weakref import WeakValueDictionary

from sglang.srt.plugins.hook_registry import HookType

from adaserve.boundary import RequestError
from adaserve.patches import hook

logger = logging.getLogger("adaserve")

MAX_SESSIONS = 10_000
"""Open at the same time. Each is kept by the scheduler until it is closed or times out."""

MAX_SESSION_TOKENS = 1 << 26
"""In all turns of the sessions that are open; the scheduler has some 24 bytes of each."""

TURN_TOKENS = 1000
"""What a turn takes besides, as so many tokens."""

_KNOWN, _HELD = "_adaserve_requests", "_adaserve_held"
_HIDDEN = "\0"  # no id of a client starts with it while others are aborted


def register() -> None:
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    hook(f"{scheduler}._create_generation_req", _remember, HookType.AFTER)
    hook(f"{scheduler}.handle_generate_request", _take_in, HookType.AROUND)
    hook(f"{scheduler}.abort_request", _abort, HookType.AROUND)
    sessions = "sglang.srt.session.session_controller"
    hook(f"{sessions}.SessionController.open", _open_session, HookType.AROUND)
    hook(f"{sessions}.SessionReqNode.clear", _drop, HookType.AROUND)
    hook(f"{sessions}.Session.create_req", _drop_all, HookType.BEFORE)
    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    hook(f"{manager}._handle_open_session_req_output", _tell_why, HookType.BEFORE)


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


@dataclass(slots=True)
class _Held:
    """Tokens of all turns of open sessions: as they were counted, and those that came since."""

    tokens: int = 0
    counted_s: float = -math.inf


def has_room(scheduler: Any, now_s: float) -> bool:
    """Whether one more turn may be kept. Counted anew, at most once a second, where the guess is too much."""
    held: _Held = vars(scheduler).setdefault(_HELD, _Held())
    if held.tokens > MAX_SESSION_TOKENS and now_s > held.counted_s + 1.0:
        sessions = scheduler.session_controller.sessions.values()
        turns = [node.req for session in sessions for node in session.req_nodes.values()]
        held.tokens, held.counted_s = sum(map(_turn_tokens, turns)), now_s
    return held.tokens <= MAX_SESSION_TOKENS


def _turn_tokens(req: Any) -> int:
    return TURN_TOKENS + len(req.origin_input_ids) + len(req.output_ids)


def _note_turn(scheduler: Any, rid: str) -> None:
    if (req := known_requests(scheduler).get(rid)) is not None:
        vars(scheduler)[_HELD].tokens += _turn_tokens(req) + (req.sampling_params.max_new_tokens or 0)


def _take_in(original: Callable[..., None], self: Any, recv_req: Any, **more: Any) -> None:
    if why := _why_not(self, recv_req):
        return _refuse(self, recv_req, HTTPStatus.BAD_REQUEST, why)
    try:
        original(self, recv_req, **more)
    except Exception:
        if is_live(self, recv_req.rid):
            raise
        logger.exception("AdaServe: request %r could not be accepted and was refused", recv_req.rid)
        return _refuse(
            self, recv_req, HTTPStatus.INTERNAL_SERVER_ERROR, "the scheduler could not accept this request"
        )
    if recv_req.session_params is not None:
        _note_turn(self, recv_req.rid)
    return None


def _why_not(scheduler: Any, recv_req: Any) -> str:
    """Why a request is refused; empty where it is not."""
    if is_live(scheduler, recv_req.rid):
        return f"rid {recv_req.rid!r} belongs to a request that still runs"
    if recv_req.session_params is None:
        return ""
    session = scheduler.session_controller.sessions.get(recv_req.session_params.id)
    if session is not None and not session.streaming and recv_req.rid in session.req_nodes:
        return (
            f"rid {recv_req.rid!r} belongs to an earlier turn of this session: give each turn a rid of its "
            "own, or none"
        )
    if not has_room(scheduler, time.monotonic()):
        return f"open sessions may hold at most {MAX_SESSION_TOKENS} tokens together: close some"
    return ""


def _refuse(scheduler: Any, recv_req: Any, status: HTTPStatus, message: str) -> None:
    """Answers the HTTP process directly, past the detokenizer, whose state belongs to the live request."""
    from sglang.srt.managers.io_struct import AbortReq

    reason = {"type": "abort", "status_code": int(status), "message": message, "err_type": status.phrase}
    scheduler.send_abort_output(AbortReq(rid=recv_req.rid, finished_reason=reason), recv_req)


def _open_session(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """The reason travels as the output's ``rid``, which nothing else uses."""
    from sglang.srt.managers.io_struct import OpenSessionReqOutput

    if len(self.sessions) < MAX_SESSIONS:
        return original(self, recv_req)
    logger.warning("AdaServe: session %r is refused: %s are open", recv_req.session_id, MAX_SESSIONS)
    why = f"{MAX_SESSIONS} sessions are open, which is the limit: close some, or give them a timeout"
    return OpenSessionReqOutput(session_id=recv_req.session_id, success=False, rid=why)


def _tell_why(self: Any, recv_obj: Any) -> None:
    """In the HTTP process: ``/open_session`` answers 400 with the reason, where the scheduler gave one."""
    future = self.session_futures.get(recv_obj.session_id)
    if not recv_obj.success and recv_obj.rid and future is not None and not future.done():
        future.set_exception(RequestError(recv_obj.rid))


def _drop(_: Callable[..., None], self: Any, req_dict: dict[str, Any]) -> None:
    """Takes a turn and all that follow it out of its session's ``req_dict``; they end if they run."""
    turns = [self]
    while turns:
        turn = turns.pop()
        turns += turn.children
        turn.abort()
        req_dict.pop(turn.req.rid, None)


def _drop_all(self: Any, req: Any, *_: Any, **__: Any) -> None:
    """``self``: a session; ``req``: its next turn, which replaces all others where it names none of them."""
    if req.session_params.replace and req.session_params.rid is None and not self.streaming:
        for turn in list(self.req_nodes.values()):
            turn.clear(self.req_nodes)


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
