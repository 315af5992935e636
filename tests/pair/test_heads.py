"""The embedded EAGLE-3 head: its training network, its file format, and what it learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from adaserve.pair.candidates import draft_trees
from adaserve.pair.eagle import EagleHead, HeadShape, load_head, narrowed, save_head
from adaserve.pair.evaluate import best_shared, best_tau
from adaserve.pair.head_drafts import HeadDrafter
from adaserve.pair.model import TinyLlama
from adaserve.pair.packed import pack
from adaserve.pair.target_outputs import target_outputs
from adaserve.pair.train_head import frequent_tokens, unrolled_loss
from tests.pair.test_training import TINY, random_model

SHAPE = HeadShape(layers=(0, 1), vocab=30, mlp=24, kv_heads=1)
IDS = torch.arange(5, 35)


@pytest.fixture(scope="module")
def target() -> TinyLlama:
    return random_model()


def random_head(target: TinyLlama) -> EagleHead:
    torch.manual_seed(1)
    head = EagleHead(target, SHAPE, IDS)
    with torch.no_grad():
        for weight in head.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn_like(weight))
    return head.requires_grad_(False)


@torch.no_grad()
def test_unrolled_steps_are_those_of_a_draft(target: TinyLlama) -> None:
    """Step k at a token = the target has read all but the last k - 1 tokens, and the head reads these."""
    head = random_head(target)
    tokens = torch.randint(2, TINY.vocab, (3, 11))
    unrolled = head.unroll(tokens, target_outputs(target, tokens, SHAPE.layers).layers, 4)
    drafter, rows = HeadDrafter(target, head), torch.arange(3)
    for end in (6, 9):
        _, held = drafter.begin(tokens[:, :end], 4)
        torch.testing.assert_close(held.states, unrolled[0][:, end - 2], rtol=1e-4, atol=1e-4)
        for step in range(1, 4):
            if end + step > tokens.shape[1]:
                break
            _, held = drafter.grow(held, rows, tokens[:, end + step - 1])
            torch.testing.assert_close(held.states, unrolled[step][:, end + step - 2], rtol=1e-4, atol=1e-4)


def test_unknown_tokens_are_never_proposed(target: TinyLlama) -> None:
    drafter = HeadDrafter(target, random_head(target))
    tokens = torch.randint(2, TINY.vocab, (4, 8))
    known = set(IDS.tolist())
    for level in draft_trees(drafter, tokens, depth=3, w=3, tau=1).paths:
        assert set(level.flatten().tolist()) <= known
    logits = drafter.after(tokens)[:, 1:]
    assert logits.isfinite().sum(-1).eq(len(known)).all()
    assert best_tau(logits, torch.randint(0, TINY.vocab, logits.shape[:2])) > 0


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_head_is_no_surer_than_it_is_right(temperature: float) -> None:
    """It is right wherever it knows the target's token, and knows 70% of them."""
    torch.manual_seed(0)
    logits, noise = torch.randn(1, 2000, 50), torch.zeros(1, 2000, 50)
    logits[..., 40:] = -torch.inf
    best = logits.argmax(-1)
    actual = torch.where(torch.rand(1, 2000) < 0.7, best, 45)
    logits.scatter_add_(-1, best[..., None], torch.ones(1, 2000, 1))
    tau, weight = best_shared(logits, noise, actual, temperature)
    for found in (best_tau(logits, actual), tau):
        said = (logits / found).softmax(-1).max(-1).values.mean().item()
        assert said == pytest.approx(0.7, abs=0.05)
    assert (weight == 0) == (temperature == 0)


@torch.no_grad()
@pytest.mark.parametrize("used", [0, 1])
def test_the_most_used_heads_are_kept(target: TinyLlama, used: int) -> None:
    """Of two KV heads with their queries, one that gives nothing is left out."""
    torch.manual_seed(2)
    head = EagleHead(target, replace(SHAPE, kv_heads=2), IDS)
    for weight in head.parameters():
        weight.add_(0.1 * torch.randn_like(weight))
    head.layer.out.weight.unflatten(1, (2, -1))[:, 1 - used] = 0
    narrow, tokens = narrowed(head, target, 1), torch.randint(2, TINY.vocab, (2, 9))
    assert narrow.shape == SHAPE
    seen = target_outputs(target, tokens, SHAPE.layers).layers
    for one, other in zip(head.unroll(tokens, seen, 3), narrow.unroll(tokens, seen, 3), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_public_format_and_shipped_form(target: TinyLlama, tmp_path: Path) -> None:
    head = random_head(target)
    save_head(head, tmp_path / "plain")
    pack(tmp_path / "plain", tmp_path / "packed")
    exact, rounded = (load_head(tmp_path / name, target) for name in ("plain", "packed"))
    assert exact.shape == rounded.shape == SHAPE
    for one in (exact, rounded):
        assert (one.token_ids == IDS).all()
    for (name, mine), back, near in zip(
        head.named_parameters(), exact.parameters(), rounded.parameters(), strict=True
    ):
        assert (mine.half() == back.half()).all(), name
        torch.testing.assert_close(near, mine, atol=0.01 * mine.abs().max().item(), rtol=0)


def test_learns_what_the_target_says(target: TinyLlama) -> None:
    torch.manual_seed(0)
    head = EagleHead(target, SHAPE, IDS)
    optimizer = torch.optim.Adam([p for p in head.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for _ in range(60):
        tokens = torch.randint(2, TINY.vocab, (8, 24))
        loss = unrolled_loss(head, target_outputs(target, tokens, SHAPE.layers), 3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def test_vocabulary_is_what_is_frequent(tmp_path: Path) -> None:
    for name, tokens in (("a", [3, 3, 3, 1]), ("b", [7, 7, 2, 7, 1, 7, 7, 7])):
        np.array(tokens, np.uint16).tofile(tmp_path / name)
    assert frequent_tokens([tmp_path / "a", tmp_path / "b"], 3, 10).tolist() == [1, 3, 7]
