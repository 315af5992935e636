"""What is still to come of an answer, by those that have ended."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import CensoredData, ecdf

from adaserve.slo.lengths import LATEST, LEAST, RENEWED_EVERY, UNKNOWN, OutputLengths


def known(tokens: list[int], cut: list[bool] | None = None) -> OutputLengths:
    lengths = OutputLengths()
    for t, c in zip(tokens, cut or [False] * len(tokens), strict=True):
        lengths.add("chat", t, c)
    return lengths


def test_three_of_four_answers_brought_at_least_as_much() -> None:
    tokens = np.random.default_rng(3).integers(1, 400, LATEST)
    lengths = known(tokens.tolist())
    for decoded in (0, 17, 100, 250, 370):
        longer = np.sort(tokens[tokens > decoded])
        left = lengths.left("chat", decoded)
        assert np.mean(longer >= decoded + left) >= 0.75 >= np.mean(longer > decoded + left)


def test_nothing_is_known_of_other_classes_or_of_longer_answers() -> None:
    lengths = known([100] * 20)
    assert lengths.left("chat", 60) == 40
    assert lengths.left("coding", 60) == lengths.left("chat", 100) == lengths.left("chat", 5000) == UNKNOWN


def test_few_answers_say_nothing() -> None:
    lengths = known([100] * (LEAST - 1))
    assert not lengths and lengths.left("chat", 0) == UNKNOWN
    lengths.add("chat", 100, cut=False)
    assert lengths and lengths.left("chat", 0) == 100


def test_answers_that_were_cut_would_have_been_longer() -> None:
    assert not known([100] * 50, [True] * 50)
    assert not known([100] * (50 + LATEST), [False] * 50 + [True] * LATEST), "what was known is out of date"
    ended, cut = list(range(10, 42)), [20] * 32
    both = known(ended + cut, [False] * 32 + [True] * 32)
    naive = known(ended + cut)
    assert naive.left("chat", 19) == 1, "as if answers liked to end at 20"
    assert both.left("chat", 19) == known(ended).left("chat", 19) == 6
    assert both.left("chat", 25) == known(ended).left("chat", 25) == 4


@pytest.mark.parametrize("seed", range(20))
def test_it_is_a_kaplan_meier_estimate(seed: int) -> None:
    random = np.random.default_rng(seed)
    tokens, cut = random.integers(1, 60, 50), random.random(50) < random.random()
    lengths, last = known(tokens.tolist(), cut.tolist()), int(tokens.max())
    longer = ecdf(CensoredData(uncensored=tokens[~cut], right=tokens[cut])).sf.evaluate
    for decoded in range(last + 1):
        later = np.arange(decoded + 1, last + 1)
        few = later[longer(later) <= 0.75 * longer(decoded) + 1e-9] - decoded
        is_known = bool(lengths) and len(few) > 0
        assert lengths.left("chat", decoded) == (few[0] if is_known else UNKNOWN), decoded


@pytest.mark.parametrize("more", [0, LATEST])
def test_the_latest_answers_count(more: int) -> None:
    lengths = known([30] * LATEST)
    for _ in range(RENEWED_EVERY + more):
        lengths.add("chat", 200, cut=False)
    assert lengths.left("chat", 0) == (200 if more else 30)
    assert lengths.left("chat", 30) == 170


def test_shorter_answers_are_noticed_after_a_few_dozen() -> None:
    lengths = known([100] * 500 + [8] * 20)
    assert lengths.left("chat", 0) == 8
