"""A signal ends a server that is not ready yet at once, and one that serves as SGLang has it."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.http_server import ServerStatus

from adaserve.patches import early_stop


@pytest.mark.parametrize(
    ("algorithm", "status", "ended"),
    [
        ("ADASERVE", ServerStatus.Starting, [signal.SIGTERM]),
        ("ADASERVE", ServerStatus.Up, []),
        (None, ServerStatus.Starting, []),
    ],
)
def test_who_ends_at_once(
    algorithm: str | None, status: ServerStatus, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = SimpleNamespace(speculative_algorithm=algorithm)
    manager = SimpleNamespace(server_args=args, server_status=status)
    monkeypatch.setattr(http_server, "get_global_state", lambda: SimpleNamespace(tokenizer_manager=manager))
    stopped: list[int] = []
    monkeypatch.setattr(early_stop, "stop", stopped.append)
    early_stop._at_once(None, signal.SIGTERM, None)
    assert stopped == ended
