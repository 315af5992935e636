"""A candidate that cannot be served is dropped, whatever is wrong with it."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from adaserve.engine.learner import Learner, _Offer
from adaserve.learning.messages import Answer, Candidate
from adaserve.sharpening import Correction, DraftSharpening
from adaserve.slo.events import DraftLearning


@pytest.mark.parametrize(
    ("correction", "result"),
    [
        (Correction(), ValueError("there is no lm_head.weight")),
        (Correction(), KeyError("a name that nobody has thought of")),
        (Correction(tau=0.0), None),  # of a history that somebody has edited
    ],
)
def test_what_is_wrong_with_a_candidate_ends_nothing(
    correction: Correction, result: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready: Future[Any] = Future()
    ready.set_result(object()) if result is None else ready.set_exception(result)
    said: list[Any] = []
    learner: Any = Learner.__new__(Learner)
    learner.state, learner.link = DraftLearning(trainer="running"), SimpleNamespace(say=said.append)
    learner._first = SimpleNamespace(sharpening=DraftSharpening((0.0, 1.0), (0.5, 1.0)))
    monkeypatch.setattr(learner, "_exchange", lambda _: pytest.fail("it is served"))
    learner._swap(_Offer(Candidate(7, 0, 1.5, 1.4, correction), b"", ready))
    assert said == [Answer(7, taken=False)]
    assert learner.state.rejected == 1 and learner.state.swaps == 0
