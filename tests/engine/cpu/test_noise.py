"""The noise that draft and target share: its distribution, its independence, and that C and numpy agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from adaserve.engine.cpu import LlamaModel, build
from adaserve.engine.cpu.noise import best_of, draw, transformed
from adaserve.engine.logits.logit_transform import LogitTransform
from adaserve.noise import gumbel, request_key
from tests.engine.chi_square import chi_square_p
from tests.engine.cpu.factories import hf_model, read_hf

VOCAB = 67  # no multiple of a vector


def transform(rows: int, temperature: float = 1.0, *, position: int | None = None) -> LogitTransform:
    keys = np.array([request_key("row", r) for r in range(rows)], np.uint64)
    positions = np.arange(rows, dtype=np.int64) if position is None else np.full(rows, position)
    return LogitTransform.draws(np.full(rows, temperature), keys, positions)


def test_the_noise_is_standard_gumbel() -> None:
    keys = np.array([request_key(r) for r in range(200)], np.uint64)
    noise = np.sort(gumbel(keys, np.arange(200), 1000).ravel().astype(np.float64))
    distance = np.abs(np.exp(-np.exp(-noise)) - (np.arange(len(noise)) + 0.5) / len(noise)).max()
    assert distance < 1.63 / np.sqrt(len(noise))  # Kolmogorov and Smirnov at 1%
    assert noise[-1] > 9  # the tail is there: of 200,000 the largest is about log 200,000


@pytest.mark.parametrize("other", ["next token", "next position", "next key"])
def test_neighbours_are_independent(other: str) -> None:
    rows = 64
    keys = np.arange(rows, dtype=np.uint64)  # as alike as keys can be
    one = gumbel(keys, np.zeros(rows, np.int64), 1024)
    if other == "next token":
        left, right = one[:, :-1], one[:, 1:]
    elif other == "next position":
        left, right = one, gumbel(keys, np.ones(rows, np.int64), 1024)
    else:
        left, right = one[:-1], one[1:]
    u, v = (np.exp(-np.exp(-x.ravel().astype(np.float64))) for x in (left, right))
    table = np.histogram2d(u, v, bins=16, range=[[0, 1], [0, 1]])[0].ravel()
    assert chi_square_p(table.astype(np.int64), np.full(256, len(u) / 256)) > 1e-3


def test_draws_have_the_distribution_of_the_softmax() -> None:
    logits = torch.linspace(2.0, -4.0, VOCAB)
    rows = 40_000
    for temperature in (0.7, 1.0):
        drawn = draw(logits.expand(rows, -1), transform(rows, temperature)).numpy()
        expected = (logits.double() / temperature).softmax(0).numpy() * rows
        assert chi_square_p(np.bincount(drawn, minlength=VOCAB), expected) > 1e-3


def test_greedy_rows_take_the_first_of_the_largest() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [-torch.inf, -torch.inf, -5.0, -torch.inf]])
    assert draw(logits, transform(2, 0.0)).tolist() == [1, 2]
    assert draw(logits[1:], transform(1, 1.0)).tolist() == [2]  # what a filter forbids is never drawn
    assert draw(logits[:0], transform(0)).tolist() == []


def test_rows_do_not_depend_on_their_company() -> None:
    logits = torch.randn(40, VOCAB)
    whole = transform(40)
    together = draw(logits, whole)
    for r in (0, 17, 39):
        alone = LogitTransform(
            *(getattr(whole, n)[r : r + 1] for n in ("scale", "spread", "keys", "positions"))
        )
        assert draw(logits[r : r + 1], alone).item() == together[r].item()


def test_kernels_and_numpy_make_the_same_noise() -> None:
    if build.load_kernels() is None:
        pytest.skip("no C compiler here")
    llama = LlamaModel(*read_hf(hf_model()), "fp32")
    rows, vocabulary = 50, llama.config.vocab_size
    hidden = torch.randn(rows, llama.config.hidden_size)
    keys = transform(rows).keys
    spread = np.where(np.arange(rows) % 5, 0.8, 0.0).astype(np.float32)
    r = LogitTransform(np.linspace(0.5, 2, rows, dtype=np.float32), spread, keys, np.arange(rows) * 1000)
    expected = transformed(llama.logits(hidden), r).log_softmax(-1)
    logprobs, tokens = llama.topk_logprobs(hidden, r, 4)
    assert torch.equal(tokens, expected.topk(4).indices)
    torch.testing.assert_close(logprobs, expected.topk(4).values, atol=2e-5, rtol=2e-5)
    # All of it, not only the largest: one token after the other is the only one allowed.
    logits = torch.full((vocabulary, vocabulary), -torch.inf).fill_diagonal_(0.0)
    same = LogitTransform.draws(
        np.ones(vocabulary), np.full(vocabulary, 7, np.uint64), np.zeros(vocabulary, np.int64)
    )
    assert torch.equal(draw(logits, same), torch.arange(vocabulary))


@pytest.mark.parametrize("left", [1, 0])
def test_what_is_forbidden_has_no_probability(left: int) -> None:
    """Also where nothing else is left."""

    def forbid(logits: torch.Tensor) -> None:
        logits[:, left:] = -torch.inf

    logprobs, _ = best_of(torch.zeros(3, VOCAB), transform(3), 2, forbid)
    assert logprobs.tolist() == [[0.0 if left else -torch.inf, -torch.inf]] * 3


def test_a_draft_that_knows_the_noise_guesses_more() -> None:
    """Alike but not equal models: sharing the noise finds most draws, the likeliest token few."""
    torch.manual_seed(0)
    target = torch.randn(2000, VOCAB)
    draft = target + 0.3 * torch.randn(2000, VOCAB)
    r = transform(2000)
    drawn = draw(target, r)
    knowing = (draw(draft, r) == drawn).float().mean()
    likeliest = (draft.argmax(-1) == drawn).float().mean()
    assert knowing > 0.65 and likeliest < 0.2


def test_keys_differ_by_request_and_repeat_on_every_rank() -> None:
    assert request_key(1, 2, "a") == request_key(1, 2, "a")
    assert len({request_key(seed, n, "a") for seed in range(30) for n in range(30)}) == 900
