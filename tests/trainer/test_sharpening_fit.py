"""How drafts in training are read, and that the reading is fitted to what they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as fn

from adaserve.errors import UnsupportedError
from adaserve.noise import gumbel
from adaserve.sharpening import Correction, DraftSharpening, load_sharpening
from adaserve.trainer import losses, sharpening_fit
from adaserve.trainer.records import Record, kept

VOCAB, POSITIONS, TEMPERATURE = 300, 200, 0.8
EXACT = DraftSharpening((0.0,), (1.0,), shared=((0.0, 1.0), (1.0, 1.0), (0.0, 1.0)))
"""Reads a draft as if it were the target: the noise has the weight of the temperature."""


def logits(seed: int) -> Tensor:
    return 2 * torch.randn(POSITIONS, VOCAB, generator=torch.Generator().manual_seed(seed))


def served(says: Tensor, temperature: float = TEMPERATURE, *, whole: bool = True, key: int = 7) -> Record:
    """What a target that says ``says`` would have served."""
    noise = torch.from_numpy(gumbel(np.full(POSITIONS, key, np.uint64), np.arange(POSITIONS) + 1, VOCAB))
    drawn = (says / temperature + noise if temperature else says).argmax(-1)
    tokens = torch.cat((torch.tensor([1, 1]), drawn)).int().numpy()
    logprobs, ids = kept(fn.log_softmax(says / (temperature or 1.0), -1), VOCAB if whole else 0)
    return Record(tokens, 1, logprobs, ids, temperature, key)


@pytest.mark.parametrize("whole", [True, False])
def test_what_is_expected_is_what_happens(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean over all noise against the one noise that there was, at many positions."""
    monkeypatch.setattr(sharpening_fit, "LIKELIEST", VOCAB)
    happened, expected = [], []
    for key in range(1, 21):
        says = logits(key)
        draft = says + logits(key + 100) / 4
        record = served(says, whole=whole, key=key)
        read = draft + TEMPERATURE * sharpening_fit.noise(record, VOCAB)
        happened.append(float((read.argmax(-1) == sharpening_fit.served(record)).float().mean()))
        expected.append(float(sharpening_fit.accepted(record, draft, EXACT).mean()))
    if whole:
        assert np.mean(happened) == pytest.approx(np.mean(expected), abs=0.02)  # 3 standard errors
    else:  # tokens that are not kept count as missed
        assert np.mean(happened) - 0.15 < np.mean(expected) < np.mean(happened)
    assert 0.4 < np.mean(expected) < 0.9


def test_greedy_requests_are_right_or_wrong() -> None:
    says = logits(1)
    wrong = says.clone()
    wrong[::2] = -wrong[::2]
    accepted = sharpening_fit.accepted(served(says, 0.0), wrong, EXACT)
    assert accepted[1::2].eq(1).all() and accepted[::2].eq(0).all()


@pytest.mark.parametrize("sure", [0.8, 1.0, 1.25])
def test_the_weight_of_the_noise_follows_how_sure_a_draft_is(sure: float) -> None:
    records = [served(logits(seed), key=seed) for seed in (1, 2, 3)]
    found = sharpening_fit.fit(records, [sure * logits(seed) for seed in (1, 2, 3)], EXACT, Correction())
    assert found.noise == pytest.approx(sure, rel=0.09)


def test_taus_follow_how_often_a_draft_is_right() -> None:
    """A draft that is always right should be read as very sure; one that knows nothing as unsure."""
    says = logits(1)
    for temperature, field in ((TEMPERATURE, "tau"), (0.0, "greedy_tau")):
        record = served(says, temperature)
        knows, guesses = (sharpening_fit.fit([record], [of], EXACT, Correction()) for of in (says, logits(2)))
        assert getattr(knows, field) < 0.9
        assert getattr(guesses, field) > 1.5


def test_tokens_that_a_draft_does_not_know_make_it_less_sure() -> None:
    """It is right about all others."""
    says = logits(1)
    for temperature, field in ((TEMPERATURE, "tau"), (0.0, "greedy_tau")):
        record = served(says, temperature)
        knows = says.clone()
        knows[:, sharpening_fit.served(record)[: POSITIONS // 2].unique()] = sharpening_fit.UNKNOWN
        all_known, some = (sharpening_fit.fit([record], [of], EXACT, Correction()) for of in (says, knows))
        assert getattr(some, field) > 1.2 * getattr(all_known, field)


def test_what_the_newest_requests_do_not_show_stays_as_it_is() -> None:
    """A reading of greedy requests, say, while all of the newest ones sample."""
    now, says = Correction(noise=1.2, tau=0.8, greedy_tau=1.9), logits(1)
    drawn = sharpening_fit.fit([served(says)], [says], EXACT, now)
    greedy = sharpening_fit.fit([served(says, 0.0)], [says], EXACT, now)
    assert drawn.greedy_tau == 1.9 and drawn.tau != 0.8
    assert (greedy.noise, greedy.tau) == (1.2, 0.8) and greedy.greedy_tau != 1.9


def test_nothing_to_fit_to_changes_nothing() -> None:
    assert sharpening_fit.fit([], [], EXACT, Correction()) == Correction()
    unkeyed = replace(served(logits(1)), key=0)
    assert sharpening_fit.fit([unkeyed], [logits(1)], EXACT, Correction()) == Correction()


@pytest.mark.parametrize("temperature", [1e-6, 0.2, 0.4, 0.8])
def test_a_draft_is_read_with_the_factors_that_were_fitted(temperature: float) -> None:
    """At all temperatures of requests that sample, also below the first one measured."""
    first = DraftSharpening((0.0, 0.5), (0.4, 0.8), shared=((0.0, 0.5), (0.5, 0.6), (0.0, 0.9)))
    now = first.corrected(Correction(noise=1.1, tau=1.8, greedy_tau=0.7))
    scale, spread = first.with_shared_noise(temperature)
    alone, _ = first.without_shared_noise(temperature)
    assert now.with_shared_noise(temperature) == (
        pytest.approx(scale / 1.8),
        pytest.approx(spread * 1.1 / 1.8, abs=1e-5),
    )
    assert now.without_shared_noise(temperature)[0] == pytest.approx(alone / 1.8)
    assert now.with_shared_noise(0.0)[0] == pytest.approx(2.0 / 0.7)
    assert now.without_shared_noise(0.0)[0] == pytest.approx(2.5 / 0.7)


def test_a_corrected_reading_is_kept_with_a_checkpoint(tmp_path: Path) -> None:
    first = DraftSharpening((0.0, 0.5), (0.4, 0.8), shared=((0.0, 1.0), (0.5, 0.6), (0.0, 0.9)))
    now = first.corrected(Correction(noise=1.1, tau=0.5, greedy_tau=2.0))
    np.testing.assert_allclose(now.tau([0.0, 0.5]), [0.8, 0.4])
    scale, spread = now.with_shared_noise([0.0, 1.0])
    np.testing.assert_allclose(scale, [1.0, 1 / 0.3])
    np.testing.assert_allclose(spread, [0.0, 0.99 / 0.3])
    assert first.corrected(Correction()) == first
    now.save(tmp_path)
    assert load_sharpening(tmp_path) == now


@pytest.mark.parametrize("whole", [16, 8192])
def test_a_very_low_temperature_leaves_numbers(whole: int) -> None:
    """SGLang takes temperatures down to 1e-6, and float16 ends at 65,504."""
    logits = torch.linspace(-9.0, 9.0, 64).repeat(3, 1) / 1e-5
    logprobs, ids = kept(logits, whole=whole)
    record = Record(np.zeros(5, np.int32), 1, logprobs, ids, 1e-5, 7)
    assert np.isfinite(logprobs).all()
    said = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    p, q = sharpening_fit.target(record), sharpening_fit.draft(record, said, 1.0)
    for loss in losses.LOSSES.values():
        assert torch.isfinite(loss(p, q)).all()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_that_says_no_numbers_gets_nothing_accepted(temperature: float) -> None:
    logprobs, ids = kept(torch.randn(3, 64, generator=torch.Generator().manual_seed(0)))
    record = Record(np.zeros(5, np.int32), 1, logprobs, ids, temperature, 7)
    broken = torch.full((3, 64), torch.nan)
    assert (
        sharpening_fit.accepted(record, broken, DraftSharpening((0.0, 0.8), (0.6, 1.0))).tolist() == [0.0] * 3
    )


@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b"{}", b'{"draft_temperature": 3}'])
def test_a_measurement_that_cannot_be_read_is_named(data: bytes, tmp_path: Path) -> None:
    """Of whatever draft: a server that finds one at its start says which file it is."""
    (tmp_path / "acceptance.json").write_bytes(data)
    with pytest.raises(UnsupportedError, match=rf"{tmp_path}/acceptance\.json cannot be read"):
        load_sharpening(tmp_path)
