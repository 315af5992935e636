"""Which images a part of a prompt has to be encoded for, and what becomes of that time; no server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers import mm_schedule

from adaserve.config import AdaServeConfig
from adaserve.engine.admission.encoders import tokens_to_encode
from adaserve.engine.admission.prefill import PrefillPacer
from adaserve.scheduler.costs.latency import ForwardCost, LatencyModel
from adaserve.scheduler.costs.learned import LearnedCosts
from tests.engine.ranks import ALONE


def item(name: int, *runs: tuple[int, int]) -> Any:
    """One of SGLang's, with the first and the last token of each run."""
    return SimpleNamespace(hash=name, offsets=list(runs))


def prompt(*items: Any) -> Any:
    return SimpleNamespace(multimodal_inputs=SimpleNamespace(mm_items=list(items)) if items else None)


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The image 7 was encoded for another request."""
    monkeypatch.setattr(mm_schedule, "embedding_cache", SimpleNamespace(has={7}.__contains__))


def test_an_image_is_encoded_whole_when_its_first_token_is_read() -> None:
    two = prompt(item(1, (4, 13)), item(2, (20, 24)), item(7, (30, 39)))
    parts = [(0, 4), (0, 5), (5, 20), (5, 21), (0, 50), (25, 50)]
    assert [tokens_to_encode([(two, *part)]) for part in parts] == [0, 10, 0, 5, 15, 0]
    frames = prompt(item(3, (2, 5), (8, 11)))
    assert tokens_to_encode([(frames, 0, 3)]) == 8 and tokens_to_encode([(frames, 3, 20)]) == 0
    again = prompt(item(1, (0, 9)))
    assert tokens_to_encode([(two, 0, 16), (again, 0, 12), (prompt(), 0, 9)]) == 10, "two ask for the same"


def test_time_of_encoders_is_not_taken_for_that_of_text() -> None:
    costs = LearnedCosts(LatencyModel(ForwardCost(0.001), ForwardCost(0.010, per_token_s=0.001)))
    pacer = PrefillPacer(AdaServeConfig(), costs, SimpleNamespace(), {}, ALONE)  # type: ignore[arg-type]
    for tokens in (10, 50, 100) * 10:
        pacer.observe_prefill(tokens, 0.010 + 0.001 * tokens)
        pacer.observe_prefill(tokens, 0.010 + 0.001 * tokens + 0.2, encoded=80)
    text = pacer._prefills.cost
    assert (text.fixed_s, text.per_token_s) == pytest.approx((0.010, 0.001), rel=0.01)
    assert pacer._encoders.seconds(80) == pytest.approx(0.2, rel=0.01)
