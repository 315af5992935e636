"""One HTTP worker of several does not end the scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from adaserve.patches.start import worker_supervisor


@pytest.mark.parametrize(("workers", "ends"), [(1, True), (2, False)])
def test_a_worker_that_is_stopped_leaves_the_scheduler_to_the_others(
    workers: int, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = SimpleNamespace(tokenizer_worker_num=workers)
    monkeypatch.setattr("sglang.srt.runtime_context.get_serving", lambda: serving)
    ended: list[Any] = []
    worker_supervisor._not_for_one(lambda scheduler, _: ended.append(scheduler), "scheduler", "stop")
    assert bool(ended) == ends
