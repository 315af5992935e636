"""A signal ends a server that is not ready at once; one that serves finishes what runs, until the next."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.http_server import ServerStatus

from adaserve.patches.start import stop_signals

ARMED = "the next one ends it"
Serve = Callable[..., list[Any]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Makes this process a server; returns what its handlers do."""

    def server(algorithm: str | None, status: ServerStatus, workers: int = 1) -> list[Any]:
        args = SimpleNamespace(tokenizer_worker_num=workers)
        manager = SimpleNamespace(server_args=args, server_status=status)
        state = SimpleNamespace(tokenizer_manager=manager)
        monkeypatch.setattr(http_server, "get_global_state", lambda: state)
        done: list[Any] = []

        def stop(number: int) -> None:
            done.append(number)
            raise SystemExit

        monkeypatch.setattr(stop_signals, "stop", stop)
        monkeypatch.setattr(stop_signals, "stop_cleanly", lambda: done.append(ARMED))
        monkeypatch.setattr(stop_signals, "is_active", lambda: algorithm is not None)
        return done

    return server


@pytest.mark.parametrize(
    ("algorithm", "status", "workers", "done"),
    [
        ("ADASERVE", ServerStatus.Starting, 1, [signal.SIGTERM]),
        ("ADASERVE", ServerStatus.Starting, 2, [signal.SIGTERM]),
        ("ADASERVE", ServerStatus.Up, 1, [ARMED]),
        ("ADASERVE", ServerStatus.Up, 2, []),
        (None, ServerStatus.Starting, 1, []),
    ],
)
def test_who_ends_at_once(
    serve: Serve, algorithm: str | None, status: ServerStatus, workers: int, done: list[Any]
) -> None:
    found = serve(algorithm, status, workers)
    try:
        stop_signals._exit(None, signal.SIGTERM, None)
    except SystemExit:
        assert status == ServerStatus.Starting
    assert found == done


def test_the_first_of_several_processes_ends_at_the_second_signal(serve: Serve) -> None:
    """Also where both came before it looked."""
    supervisor = SimpleNamespace(should_exit=SimpleNamespace(is_set=lambda: bool(done)))
    done = serve("ADASERVE", ServerStatus.Up, 2)
    stop_signals._all_exit(signal.SIGTERM, supervisor)
    assert done == [ARMED]
    with pytest.raises(SystemExit):
        stop_signals._all_exit(signal.SIGINT, supervisor)
    assert done == [ARMED, signal.SIGINT]
