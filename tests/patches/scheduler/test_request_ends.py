"""Which requests the worker hears of that end before they decode, and whose row is whose by then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from adaserve.patches.scheduler.request_ends import _aborted, _prefilled


class Worker:
    def __init__(self) -> None:
        self.told: list[tuple[str, bool]] = []

    def ended_early(self, rid: str, holds_row: bool) -> None:
        self.told.append((rid, holds_row))


def request(rid: str, finished: bool, retracted: bool = False) -> Any:
    return SimpleNamespace(rid=rid, finished=lambda: finished, is_retracted=retracted)


def test_those_that_end_in_their_prefill() -> None:
    """The row of one that was retracted may be another's."""
    worker = Worker()
    reqs = [request("goes on", False), request("ended", True), request("taken back", True, retracted=True)]
    _prefilled(None, SimpleNamespace(draft_worker=worker), SimpleNamespace(reqs=reqs), None)
    assert worker.told == [("ended", True)]


@pytest.mark.parametrize("holds_kv", [False, True])
def test_those_that_are_aborted_while_they_wait(holds_kv: bool) -> None:
    worker = Worker()
    aborted = SimpleNamespace(rid="aborted", kv=SimpleNamespace(holds_kv=holds_kv))
    _aborted(SimpleNamespace(draft_worker=worker), aborted)
    assert worker.told == [("aborted", holds_kv)]
