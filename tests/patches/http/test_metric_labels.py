"""Clients cannot fill SGLang's metrics with labels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from adaserve.patches.http.metric_labels import (
    MAX_CUSTOM,
    MAX_PRIORITIES,
    OTHER_PATHS,
    _few_labels,
    _few_queues,
    _path,
)


def test_paths_that_nobody_serves_share_a_label() -> None:
    assert _path(("/v1/models/{model:path}", True), None)[0] == "/v1/models/{model:path}"
    assert _path(("/x" * 30_000, False), None)[0] == OTHER_PATHS


def counted(field: str, values: list[Any]) -> list[Any]:
    """By which of these ``values`` SGLang counts the requests that have them."""
    manager = SimpleNamespace()
    labels: list[Any] = []

    def collect(_: Any, state: Any, *rest: Any) -> None:
        labels.append(getattr(state.obj, field))

    for value in values:
        state = SimpleNamespace(obj=SimpleNamespace(**{field: value}))
        _few_labels(collect, manager, state, "recv", 0)
        assert getattr(state.obj, field) == value, "others read it too"
    return labels


def test_priorities_are_few() -> None:
    labels = counted("priority", [*range(1000), 5, None])
    assert len(set(labels)) == MAX_PRIORITIES + 1 and labels[-2:] == [5, None]


def test_custom_labels_are_few() -> None:
    said = [{"user": str(i), "team": "a"} for i in range(1000)]
    labels = counted("custom_labels", [*said, said[5], {}, None])
    assert labels[:MAX_CUSTOM] == said[:MAX_CUSTOM]
    assert labels[MAX_CUSTOM:] == [None] * (1000 - MAX_CUSTOM) + [said[5], None, None]


def test_queues_are_counted_by_few_priorities() -> None:
    collector = SimpleNamespace(_known_priorities=set())
    for first in range(0, 1000, 10):
        queue = SimpleNamespace(by_priority=dict.fromkeys(range(first, first + 10), 1))
        _few_queues(collector, None, queue)
        assert set(queue.by_priority) <= collector._known_priorities
    assert len(collector._known_priorities) == MAX_PRIORITIES
    _few_queues(collector, None, SimpleNamespace(by_priority=None))
