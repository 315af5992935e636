"""Open sessions have limits, long ones are dropped without an error, and a client is told why one is refused.

Why: SGLang keeps as many open sessions as anybody cares to open, and every turn of theirs with its whole
history. Here the number of both is limited. A turn that takes the id of another one hides it from this count,
but its followers keep it alive; so ids of turns are taken once.

The turns behind one that is replaced SGLang drops one inside the other, which Python ends after a thousand.
Where a turn replaces all, it drops them from the dictionary that it walks along, which Python refuses. And it
does not tell the client why a session is not opened.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.boundary import RequestError
from adaserve.patches import hook
from adaserve.patches.scheduler.scheduler_guard import known_requests, refuse

logger = logging.getLogger("adaserve")

MAX_SESSIONS = 10_000
"""Open at the same time. Each is kept by the scheduler until it is closed or times out."""

MAX_SESSION_TOKENS = 1 << 26
"""In all turns of the sessions that are open; the scheduler has some 24 bytes of each."""

TURN_TOKENS = 1000
"""What a turn takes besides, as so many tokens."""

_HELD = "_adaserve_held"


def register() -> None:
    hook("sglang.srt.managers.scheduler.Scheduler.handle_generate_request", _take_turn, HookType.AROUND)
    sessions = "sglang.srt.session.session_controller"
    hook(f"{sessions}.SessionController.open", _open_session, HookType.AROUND)
    hook(f"{sessions}.SessionReqNode.clear", _drop, HookType.AROUND)
    hook(f"{sessions}.Session.create_req", _drop_all, HookType.BEFORE)
    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    hook(f"{manager}._handle_open_session_req_output", _tell_why, HookType.BEFORE)


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


def _take_turn(original: Callable[..., None], self: Any, recv_req: Any, **more: Any) -> None:
    if recv_req.session_params is None:
        return original(self, recv_req, **more)
    if why := _why_not(self, recv_req):
        return refuse(self, recv_req, HTTPStatus.BAD_REQUEST, why)
    original(self, recv_req, **more)
    return _note_turn(self, recv_req.rid)


def _why_not(scheduler: Any, recv_req: Any) -> str:
    """Why a turn is refused; empty where it is not."""
    session = scheduler.session_controller.sessions.get(recv_req.session_params.id)
    if session is not None and not session.streaming and recv_req.rid in session.req_nodes:
        return (
            f"rid {recv_req.rid!r} belongs to an earlier turn of this session: give each turn a rid of its "
            "own, or none"
        )
    if not has_room(scheduler, time.monotonic()):
        return f"open sessions may hold at most {MAX_SESSION_TOKENS} tokens together: close some"
    return ""


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
