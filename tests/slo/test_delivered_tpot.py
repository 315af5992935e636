"""Predicted TPOT between what the load says and what requests got lately."""

from __future__ import annotations

import math

import pytest

from adaserve.slo.classes import CUSTOM_CLASS, SLO
from adaserve.slo.delivered_tpot import FADES_S, MIN_TOKENS, DeliveredTPOT

NOW = 100.0
CHAT = SLO("chat", 0.05)


def served(*got: tuple[float, float], slo: SLO = CHAT) -> DeliveredTPOT:
    """Requests that got the first number of seconds where the load alone had said the second."""
    books = DeliveredTPOT()
    for tpot_s, by_load_s in got:
        books.add(slo, 100, tpot_s, by_load_s, NOW)
    return books


def test_without_a_past_the_load_decides() -> None:
    assert DeliveredTPOT().predict(CHAT, 0.03, NOW) == 0.03
    assert served((0.02, 0.03)).predict(SLO("coding", 0.05), 0.05, NOW) == 0.05, "another class"


def test_a_constant_error_of_the_load_is_learned() -> None:
    books = served(*[(0.02, 0.03)] * 3)
    assert books.predict(CHAT, 0.03, NOW) == pytest.approx(0.02)
    assert books.predict(CHAT, 0.03, NOW + 1000) == pytest.approx(0.02)


def test_half_of_a_change_of_the_load_counts_and_all_of_it_when_nothing_ends() -> None:
    books = served((0.02, 0.02))
    assert books.predict(CHAT, 0.08, NOW) == pytest.approx(0.04)
    half = 1 - 0.5 * math.exp(-1)
    assert books.predict(CHAT, 0.08, NOW + FADES_S) == pytest.approx(0.02 * 4**half)
    assert books.predict(CHAT, 0.08, NOW + 100 * FADES_S) == pytest.approx(0.08)


def test_milliseconds_of_their_own_are_remembered_by_how_much_they_ask_for() -> None:
    books = served(*[(0.02, 0.03)] * 60, slo=SLO(CUSTOM_CLASS, 0.024))
    for _ in range(60):
        books.add(SLO(CUSTOM_CLASS, 0.1), 100, 0.06, 0.03, NOW)
    assert books.predict(SLO(CUSTOM_CLASS, 0.025), 0.03, NOW) == pytest.approx(0.02)
    assert books.predict(SLO(CUSTOM_CLASS, 0.105), 0.03, NOW) == pytest.approx(0.06)
    between = books.predict(SLO(CUSTOM_CLASS, 0.5), 0.03, NOW)
    assert between == pytest.approx(0.06, rel=0.01), "nobody asked for so little: as the latest of the class"
    assert books.predict(SLO(CUSTOM_CLASS), 0.03, NOW) == between, "all of the class, for the gauge"


def test_more_load_never_predicts_less() -> None:
    books = served((0.02, 0.03), (0.05, 0.02))
    said = [books.predict(CHAT, by_load_s, NOW) for by_load_s in (0.01, 0.02, 0.04)]
    assert said == sorted(said) and len(set(said)) == 3


def test_recent_requests_count() -> None:
    books = served(*[(0.01, 0.02)] * 5, *[(0.04, 0.02)] * 60)
    assert books.predict(CHAT, 0.02, NOW) == pytest.approx(0.04, rel=0.01)


def test_at_first_all_requests_weigh_the_same() -> None:
    books = served((0.01, 0.02), (0.04, 0.02))
    assert books.predict(CHAT, 0.02, NOW) == pytest.approx(0.02)


def test_short_answers_and_impossible_times_say_nothing() -> None:
    books = DeliveredTPOT()
    books.add(CHAT, MIN_TOKENS - 1, 0.5, 0.02, NOW)
    books.add(CHAT, 100, 0.0, 0.02, NOW)
    assert books.predict(CHAT, 0.02, NOW) == 0.02
