"""One HTTP worker of several does not end the scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from adaserve.patches import worker_supervisor


@pytest.mark.parametrize(
    ("algorithm", "workers", "ends"), [("ADASERVE", 1, True), ("ADASERVE", 2, False), (None, 2, True)]
)
def test_a_worker_that_is_stopped_leaves_the_scheduler_to_the_others(
    algorithm: str | None, workers: int, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = "sglang.srt.runtime_context"
    monkeypatch.setattr(f"{context}.get_spec", lambda: SimpleNamespace(speculative_algorithm=algorithm))
    monkeypatch.setattr(f"{context}.get_serving", lambda: SimpleNamespace(tokenizer_worker_num=workers))
    ended: list[Any] = []
    worker_supervisor._not_for_one(lambda scheduler, _: ended.append(scheduler), "scheduler", "stop")
    assert bool(ended) == ends
