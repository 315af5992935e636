"""Losses against sums written out in Python, and their gradients against differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as fn

from adaserve.noise import gumbel
from adaserve.trainer import losses

P = fn.log_softmax(2 * torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).double(), -1)
Q = fn.log_softmax(2 * torch.randn(5, 7, generator=torch.Generator().manual_seed(2)).double(), -1)


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def by_hand(name: str, p: list[float], q: list[float], mean_overlap: float) -> float:
    accepted = sum(map(min, p, q))
    middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    weight = math.exp(-mean_overlap)
    return {
        "forward": kl(p, q),
        "reverse": kl(q, p),
        "jsd": (kl(p, middle) + kl(q, middle)) / 2,
        "lk": weight * kl(p, q) + (1 - weight) * (1 - accepted),
    }[name]


@pytest.mark.parametrize("name", sorted(losses.LOSSES))
def test_a_loss_is_what_it_says(name: str) -> None:
    p, q = P.exp().tolist(), Q.exp().tolist()
    mean_overlap = sum(sum(map(min, a, b)) for a, b in zip(p, q, strict=True)) / len(p)
    expected = [by_hand(name, a, b, mean_overlap) for a, b in zip(p, q, strict=True)]
    assert losses.LOSSES[name](P, Q).tolist() == pytest.approx(expected)
    assert losses.LOSSES[name](P, P).abs().max() < (1.0 if name == "lk" else 1e-9)


@pytest.mark.parametrize("name", sorted(losses.LOSSES))
def test_a_step_along_the_gradient_brings_the_draft_nearer(name: str) -> None:
    logits = Q.clone().requires_grad_()
    before = losses.LOSSES[name](P, fn.log_softmax(logits, -1)).sum()
    before.backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all()
    after = losses.LOSSES[name](P, fn.log_softmax(logits - 0.01 * logits.grad, -1)).sum()
    assert after < before


def test_gradients_stay_finite_where_the_draft_is_sure_and_wrong() -> None:
    p, logits = torch.full((1, 3), -math.log(3)), torch.tensor([[80.0, -80.0, 0.0]], requires_grad=True)
    for name, loss in losses.LOSSES.items():
        loss(p, fn.log_softmax(logits, -1)).sum().backward()
        assert torch.isfinite(logits.grad).all(), name


def test_the_hard_loss_knows_the_dice() -> None:
    """With the target's own logits and noise the served token is certain as tau goes to 0."""
    keys, positions = np.full(6, 99, np.uint64), np.arange(6)
    noise = torch.from_numpy(gumbel(keys, positions, 7)).double()
    logits = torch.randn(6, 7, generator=torch.Generator().manual_seed(4)).double()
    drawn = (logits + noise).argmax(-1)
    assert losses.hard_loss(logits, drawn, noise, 1e-3, 1.0).max() < 1e-6
    scores = (logits + 0.9 * noise) / 0.5
    expected = [math.log(sum(map(math.exp, s))) - s[t] for s, t in zip(scores.tolist(), drawn, strict=True)]
    assert losses.hard_loss(logits, drawn, noise, 0.5, 0.9).tolist() == pytest.approx(expected)


def test_coarse_distributions_sum_to_one_and_keep_what_they_name() -> None:
    ids = P.topk(3).indices
    for logprobs in (P, Q):
        coarse = losses.coarse(logprobs, ids)
        assert coarse.exp().sum(-1).tolist() == pytest.approx([1.0] * 5)
        rest = [
            sum(row) - sum(row[i] for i in kept)
            for row, kept in zip(logprobs.exp().tolist(), ids, strict=True)
        ]
        assert coarse[:, -1].exp().tolist() == pytest.approx(rest)
    assert (losses.forward_kl(losses.coarse(P, ids), losses.coarse(Q, ids)) <= losses.forward_kl(P, Q)).all()


def test_nothing_left_for_the_rest_is_no_infinity() -> None:
    sure = losses.with_rest(torch.tensor([[0.0, -40.0]]))
    assert torch.isfinite(sure).all() and sure[0, -1] < -10


def test_overlap() -> None:
    expected = [sum(map(min, a, b)) for a, b in zip(P.exp().tolist(), Q.exp().tolist(), strict=True)]
    assert losses.overlap(P, Q).tolist() == pytest.approx(expected)


def test_agreement_is_how_often_one_noise_gives_both_the_same_token() -> None:
    pairs = zip(P.exp().tolist(), Q.exp().tolist(), strict=True)
    expected = [
        [1 / sum(max(a / p[i], b / q[i]) for a, b in zip(p, q, strict=True)) for i in range(7)]
        for p, q in pairs
    ]
    found = losses.agreement(P, Q)
    assert found.flatten().tolist() == pytest.approx(np.ravel(expected).tolist())
    keys, draws = np.full(40_000, 5, np.uint64), np.arange(40_000)
    noise = torch.from_numpy(gumbel(keys, draws, 7)).double()
    both = torch.where((P[0] + noise).argmax(-1) == (Q[0] + noise).argmax(-1), (P[0] + noise).argmax(-1), 7)
    assert both.bincount(minlength=8)[:7].div(40_000).tolist() == pytest.approx(found[0].tolist(), abs=0.01)


def test_agreement_of_the_same_distribution_is_certain() -> None:
    for p in (P, fn.log_softmax(torch.tensor([[90.0, -90.0, 0.0, -300.0]]), -1)):
        assert losses.agreement(p, p).sum(-1).tolist() == pytest.approx([1.0] * len(p))


def test_expected_accepted_tokens_of_a_chain() -> None:
    a = [0.9, 0.5, 0.2, 1.0, 0.6, 0.8]
    chains = [sum(math.prod(a[t : t + k]) for k in range(1, 5)) for t in range(3)]
    assert losses.expected_accepted(torch.tensor(a)) == pytest.approx(sum(chains) / 3)
    assert losses.expected_accepted(torch.tensor([0.5, 0.5])) == pytest.approx(0.75)


def test_greedy_requests_train_the_sharpened_distribution_too() -> None:
    plain = losses.forward_kl(P, Q)
    sharp = losses.forward_kl(fn.log_softmax(P / 0.4, -1), fn.log_softmax(Q / 0.4, -1))
    assert torch.allclose(losses.loss_of(losses.forward_kl, P, Q, greedy=True), plain + 0.5 * sharp)
    assert torch.equal(losses.loss_of(losses.forward_kl, P, Q, greedy=False), plain)
