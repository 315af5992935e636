"""What the scheduler keeps for clients has a limit."""

from __future__ import annotations

import pytest
from sglang.srt.managers.io_struct import OpenSessionReqInput
from sglang.srt.session.session_controller import SessionController

from adaserve.patches import scheduler_guard


def test_there_is_a_most_of_open_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_guard, "MAX_SESSIONS", 2)
    sessions = SessionController(tree_cache=None)  # closing would ask the cache; nothing here does

    def opened(name: str) -> bool:
        asked = OpenSessionReqInput(capacity_of_str_len=100, session_id=name)
        return bool(scheduler_guard._open_session(SessionController.open, sessions, asked).success)

    assert opened("a") and opened("b") and not opened("c")
    del sessions.sessions["a"]
    assert opened("c")
