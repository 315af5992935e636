"""Clients cannot fill SGLang's metrics with labels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from adaserve.patches.metric_labels import MAX_PRIORITIES, OTHER_PATHS, _few_priorities, _few_queues, _path


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


def test_queues_are_counted_by_few_priorities() -> None:
    collector = SimpleNamespace(_known_priorities=set())
    for first in range(0, 1000, 10):
        queue = SimpleNamespace(by_priority=dict.fromkeys(range(first, first + 10), 1))
        _few_queues(collector, None, queue)
        assert set(queue.by_priority) <= collector._known_priorities
    assert len(collector._known_priorities) == MAX_PRIORITIES
    _few_queues(collector, None, SimpleNamespace(by_priority=None))
