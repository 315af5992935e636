"""Requests that run do not wait for a grammar that is compiled, and it has as long as it had."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.constrained import grammar_manager
from sglang.srt.constrained.grammar_manager import GrammarManager

from adaserve.patches.scheduler import grammar_polls

MOST = 100
USUAL_S = 0.005


class Clock:
    """In place of the host's: it goes on while somebody sleeps, and a little whenever it is read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.slept_s = 1000.0, 0.0
        own = SimpleNamespace(perf_counter=self.read, monotonic=self.read, sleep=self.sleep)
        monkeypatch.setattr(grammar_manager, "time", own)
        monkeypatch.setattr(grammar_polls, "time", own)

    def read(self) -> float:
        self.now_s += 1e-7
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept_s += seconds


def manager(*, runs: bool = True, waits: bool = False) -> Any:
    """SGLang's, with one request whose grammar is never there."""
    made = GrammarManager.__new__(GrammarManager)
    made.scheduler = SimpleNamespace(
        waiting_queue=["waits"] * waits,
        collect_inflight_reqs=lambda: {"runs"} if runs else set(),
    )
    backend = SimpleNamespace(set_cache=lambda *_: None)
    made.grammar_backend, made.pp_rank, made.pp_size, made.grammar_sync_size = backend, 0, 1, 1
    made.SGLANG_GRAMMAR_POLL_INTERVAL, made.SGLANG_GRAMMAR_MAX_POLL_ITERATIONS = USUAL_S, MOST
    made.grammar_queue = [request()]
    return made


def request() -> Any:
    return SimpleNamespace(
        grammar=Future(), grammar_key=("json", "{}"), grammar_wait_ct=0,
        finished=lambda: False, set_finish_with_abort=lambda _: None,
    )  # fmt: skip


def look(made: Any) -> list[Any]:
    return grammar_polls._look(GrammarManager.get_ready_grammar_requests, made)


@pytest.mark.parametrize(
    ("kind", "sleeps"),
    [
        ({"runs": True}, False),
        ({"runs": False, "waits": True}, False),
        ({"runs": False}, True),
    ],
)
def test_it_sleeps_only_where_there_is_nothing_else_to_do(
    monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any], sleeps: bool
) -> None:
    clock, made = Clock(monkeypatch), manager(**kind)
    for _ in range(10):
        assert look(made) == []
    if sleeps:
        assert clock.slept_s > 9 * USUAL_S
    else:
        assert clock.slept_s < 12 * grammar_polls.LOOK_S
    assert made.SGLANG_GRAMMAR_POLL_INTERVAL == USUAL_S


@pytest.mark.parametrize("step_s", [0.0001, 0.001, 0.004, 0.02, 0.3])
def test_a_grammar_is_not_given_up_sooner(monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    """Than where SGLang looks as it does."""
    clock = Clock(monkeypatch)

    def given_up_after_s(ask: Callable[[Any], list[Any]]) -> float:
        made, start_s = manager(), clock.now_s
        while not ask(made):
            clock.now_s += step_s
        return clock.now_s - start_s

    before_s = given_up_after_s(GrammarManager.get_ready_grammar_requests)
    after_s = given_up_after_s(look)
    assert before_s <= after_s < 2.5 * before_s


def test_a_grammar_that_is_there_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    made = manager()
    ready = request()
    ready.grammar.set_result(SimpleNamespace(copy=lambda: None))
    ready.sampling_params = SimpleNamespace(custom_params=None)
    made.grammar_queue.append(ready)
    assert look(made) == [ready] and len(made.grammar_queue) == 1
