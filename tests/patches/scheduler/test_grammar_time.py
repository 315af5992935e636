"""A request whose grammar takes long is ended; one that only waited is not."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from adaserve.engine.rank_sync import RankSync
from adaserve.patches.scheduler import grammar_time
from adaserve.patches.scheduler.grammar_time import _accept, end_slow, timed
from tests.engine.ranks import ALONE, Group


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_time, "PATIENCE_S", 0.02)


def work(for_s: float = 0.05) -> None:
    end_s = time.thread_time() + for_s
    while time.thread_time() < end_s:
        pass


def request() -> Any:
    return SimpleNamespace(to_finish=None)


def test_a_grammar_that_takes_long_ends_its_request() -> None:
    req = request()
    with timed(req):
        work()
    end_slow([request(), req], ALONE.decide)
    assert req.to_finish.status_code == 400 and "s ::= s s" in req.to_finish.message


@pytest.mark.parametrize(("step_s", "ends"), [(0.015, False), (0.027, True)])
def test_many_steps_count_together(step_s: float, ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of 27 ms is 7 ms too long for the others, who wait for all of them."""
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(grammar_time, "time", SimpleNamespace(thread_time=lambda: clock.now_s))
    monkeypatch.setattr(grammar_time, "PATIENCE_S", 0.5)
    req = request()
    for step in range(1, 101):
        with timed(req):
            clock.now_s += step_s
        end_slow([req], ALONE.decide)
        if req.to_finish is not None:
            assert 70 < step < 75
            break
    assert (req.to_finish is not None) == ends


def test_a_host_that_was_busy_ends_nothing() -> None:
    req = request()
    with timed(req):
        time.sleep(0.1)
    end_slow([req], ALONE.decide)
    assert req.to_finish is None


def test_what_ends_a_request_already_stays() -> None:
    req = SimpleNamespace(to_finish="aborted by its client")
    with timed(req):
        work()
    end_slow([req], ALONE.decide)
    assert req.to_finish == "aborted by its client"


def test_all_ranks_end_what_was_slow_on_the_first_one() -> None:
    sent: list[Any] = []
    ranks = [(RankSync(Group(rank, 2, sent)), [request(), request()]) for rank in range(2)]
    for slow, (_, reqs) in enumerate(ranks):
        with timed(reqs[slow]):
            work()
    for rank_sync, reqs in ranks:
        end_slow(reqs, rank_sync.decide)
        assert [req.to_finish is not None for req in reqs] == [True, False]


def test_the_tokens_that_sglang_accepts_are_limited_too() -> None:
    def slow(processor: Any, req: Any, tokens: list[int]) -> list[int]:
        work()
        return tokens

    req = request()
    assert _accept(slow, None, req, [1, 2]) == [1, 2]
    end_slow([req], ALONE.decide)
    assert req.to_finish is not None
