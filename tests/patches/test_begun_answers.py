"""What becomes of requests whose answers have begun and that wait again, because SGLang took back their KV."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from adaserve.patches.begun_answers import _refused


@pytest.mark.parametrize(
    ("algorithm", "retractions", "refused"),
    [("ADASERVE", 0, True), ("ADASERVE", 1, False), ("EAGLE3", 1, True)],
)
def test_an_answer_that_has_begun_is_not_turned_away(algorithm: str, retractions: int, refused: bool) -> None:
    """The queue is full."""
    scheduler = SimpleNamespace(spec_algorithm=algorithm)
    request = SimpleNamespace(retraction_count=retractions)
    assert _refused(lambda *_: True, scheduler, request) is refused
    assert not _refused(lambda *_: False, scheduler, request)
