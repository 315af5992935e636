"""What the scheduler keeps of sessions has a limit."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import OpenSessionReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.plugins.hook_registry import HookType, _wrap_fn
from sglang.srt.session.session_controller import Session, SessionController, SessionReqNode

from adaserve.boundary import RequestError
from adaserve.patches.scheduler import sessions
from adaserve.patches.scheduler.scheduler_guard import known_requests


def test_there_is_a_most_of_open_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    controller = SessionController(tree_cache=None)  # closing would ask the cache; nothing here does

    def opened(name: str) -> Any:
        asked = OpenSessionReqInput(capacity_of_str_len=100, session_id=name)
        return sessions._open_session(SessionController.open, controller, asked)

    assert opened("a").success and opened("b").success and "2 sessions are open" in answered(opened("c"))
    del controller.sessions["a"]
    assert answered(opened("c")) == "c"
    del controller.sessions["b"]
    assert answered(opened("c")) == "None", "SGLang has a sentence of its own for that"


def answered(output: Any) -> str:
    """What the HTTP process makes of a scheduler's answer: the session, or the reason."""

    async def wait() -> str:
        waiting: asyncio.Future[str | None] = asyncio.Future()
        manager = SimpleNamespace(session_futures={output.session_id: waiting})
        sessions._tell_why(manager, output)
        TokenizerManager._handle_open_session_req_output(manager, output)
        try:
            return str(await waiting)
        except RequestError as error:
            return str(error)

    return asyncio.run(wait())


class Scheduler:
    """Takes every turn of one session into it."""

    def __init__(self) -> None:
        self.turns: dict[str, Any] = {}
        self.session = SimpleNamespace(req_nodes=self.turns, streaming=False)
        self.session_controller = SimpleNamespace(sessions={"s": self.session})
        self.refused: list[str] = []

    def send_abort_output(self, output: Any, _: Any) -> None:
        self.refused.append(output.finished_reason["message"])

    def take_in(self, rid: str, tokens: int, session: str | None = "s") -> bool:
        """Whether it was taken in."""

        def original(self: Scheduler, recv_req: Any) -> None:
            params = SimpleNamespace(max_new_tokens=10)
            req = Turn(origin_input_ids=[5] * tokens, output_ids=[], sampling_params=params)
            self.turns[rid] = SimpleNamespace(req=req)
            known_requests(self)[rid] = req

        refused = len(self.refused)
        asked = SimpleNamespace(rid=rid, session_params=session and SimpleNamespace(id=session))
        sessions._take_turn(original, self, asked)
        return len(self.refused) == refused


class Turn(SimpleNamespace):
    """One of SGLang's requests, which may be held weakly."""


def test_there_is_a_most_that_sessions_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every turn is kept with all that came before it."""
    now_s = 100.0
    monkeypatch.setattr(sessions, "MAX_SESSION_TOKENS", 5000)
    monkeypatch.setattr(sessions.time, "monotonic", lambda: now_s)
    scheduler = Scheduler()
    assert [scheduler.take_in(f"turn {i}", 500) for i in range(5)] == [True] * 4 + [False]
    assert "close some" in scheduler.refused[0]
    assert scheduler.take_in("of no session", 500, session=None)
    del scheduler.turns["turn 0"], scheduler.turns["of no session"]
    assert not scheduler.take_in("again", 500), "it is not counted all the time"
    now_s += 2.0
    assert scheduler.take_in("again", 500)


def test_a_turn_hides_no_other_one() -> None:
    """SGLang would find the newer one by the id of both, and keep the older one all the same."""
    scheduler = Scheduler()
    assert scheduler.take_in("x", 500) and not scheduler.take_in("x", 500)
    assert "earlier turn of this session" in scheduler.refused[0]
    assert scheduler.take_in("y", 500) and scheduler.take_in("x", 500, session=None)
    scheduler.session.streaming = True  # these keep their last turn only
    assert scheduler.take_in("x", 500)


TURNS = 3000
"""More than Python calls one inside the other."""


@pytest.mark.parametrize("rid", ["0", None])
def test_a_long_chain_of_turns_is_replaced(monkeypatch: pytest.MonkeyPatch, rid: str | None) -> None:
    """From one turn on, or as a whole."""
    drop = _wrap_fn(SessionReqNode.clear, sessions._drop, HookType.AROUND)
    monkeypatch.setattr(SessionReqNode, "clear", drop)
    session, last = Session(capacity_of_str_len=100), None
    for number in range(TURNS):
        req = made(rid=str(number), origin_input_ids=[5], origin_input_ids_unpadded=[5])
        last = session.req_nodes[req.rid] = SessionReqNode(req, last)
    params = SimpleNamespace(rid=rid, replace=True, offset=0, drop_previous_output=False)
    asked = BatchRequests(rid="new", session_params=params, input_ids=[7])
    create = _wrap_fn(Session.create_req, sessions._drop_all, HookType.BEFORE)
    new = create(session, asked, None, 100, req_factory=made)
    kept, before = ([], []) if rid is None else ([rid], [5, 6])
    assert list(session.req_nodes) == [*kept, "new"] and new.origin_input_ids == [*before, 7]
    assert last is not None and last.req.to_finish is not None, "nobody waits for the rest of it"


def made(**fields: Any) -> Turn:
    """A turn that runs and has said one token."""
    params = SimpleNamespace(max_new_tokens=1)
    own = {"finished_reason": None, "output_ids": [6], "sampling_params": params, "multimodal_inputs": None}
    return Turn(**{**fields, **own}, inherit_mm_token_counts=lambda _: None)


class BatchRequests(SimpleNamespace):
    """A request that says nothing but what it is made of."""

    def __getattr__(self, _: str) -> None:
        return None
