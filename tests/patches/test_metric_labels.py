"""Clients cannot fill SGLang's metrics with labels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from adaserve.patches.metric_labels import MAX_PRIORITIES, OTHER_PATHS, _few_priorities, _path


def test_paths_that_nobody_serves_share_a_label() -> None:
    assert _path(("/v1/models/{model:path}", True), None)[0] == "/v1/models/{model:path}"
    assert _path(("/x" * 30_000, False), None)[0] == OTHER_PATHS


def test_priorities_are_few() -> None:
    manager = SimpleNamespace(server_args=SimpleNamespace(speculative_algorithm="ADASERVE"))
    counted: list[Any] = []

    def collect(_: Any, state: Any, *rest: Any) -> None:
        counted.append(state.obj.priority)

    for priority in [*range(1000), 5, None]:
        state = SimpleNamespace(obj=SimpleNamespace(priority=priority))
        _few_priorities(collect, manager, state, "recv", 0)
        assert state.obj.priority == priority, "others read it too"
    assert len(set(counted)) == MAX_PRIORITIES + 1 and counted[-2:] == [5, None]
