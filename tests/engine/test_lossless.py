"""Unit checks of the acceptance rule: draws against an exact distribution, with a wrong rule as control."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from adaserve.engine import sampling
from adaserve.engine.trees import verify
from adaserve.noise import request_key
from tests.engine.chi_square import chi_square_p

VOCAB = 8
SAMPLES = 6000


def tree_batch(children: list[list[int]], repeat: int) -> verify.VerifyBatch:
    """``repeat`` equal rows. ``children[d]``: tokens of depth d + 1, all below the first token of depth d."""
    depth = np.array([0, *(d + 1 for d, level in enumerate(children) for _ in level)])
    tokens = np.array([0, *(t for level in children for t in level)])
    first = np.cumsum([0, 1, *(len(level) for level in children)])
    parent = np.array([0, *(first[d] for d, level in enumerate(children) for _ in level)])
    size = len(tokens)
    base = np.repeat(np.arange(repeat) * size, size)
    none: Any = None
    return verify.VerifyBatch(
        tokens=np.tile(tokens, repeat), positions=np.tile(depth, repeat), slots=none, plan=none,
        row=np.repeat(np.arange(repeat), size), depth=np.tile(depth, repeat),
        parent=np.tile(parent, repeat) + base,
        root=np.arange(repeat) * size, node=none, column=np.tile(depth, repeat),
    )  # fmt: skip


def emitted(
    batch: verify.VerifyBatch, acceptance: verify.Acceptance, draws: np.ndarray
) -> list[tuple[int, ...]]:
    """Tokens that each row emits."""
    path = acceptance.accepted & ~batch.is_root
    out: list[list[int]] = [[] for _ in batch.root]
    for row, token in zip(batch.row[path], batch.tokens[path], strict=True):
        out[row].append(int(token))
    for row, token in zip(out, draws[acceptance.last], strict=True):
        row.append(int(token))
    return [tuple(row) for row in out]


def first_token_p(draws: Sequence[tuple[int, ...]], probs: torch.Tensor) -> float:
    """How well the first emitted tokens fit ``probs``."""
    observed = np.bincount([d[0] for d in draws], minlength=VOCAB)
    return chi_square_p(observed, (probs * len(draws)).double().numpy())


def target_logits() -> torch.Tensor:
    return torch.tensor([2.0, 1.5, 1.0, 0.2, 0.0, -0.5, -1.0, -3.0])


def sampling_info(repeat: int, **values: Any) -> Any:
    base = dict(temperature=1.0, top_k=1 << 30, top_p=1.0, min_p=0.0) | values
    return SimpleNamespace(
        is_all_greedy=False,
        temperatures=torch.full((repeat, 1), base["temperature"]),
        top_ks=torch.full((repeat,), base["top_k"], dtype=torch.int32),
        top_ps=torch.full((repeat,), base["top_p"]),
        min_ps=torch.full((repeat,), base["min_p"]),
        sampling_seed=None,
    )


def keys(rows: int) -> np.ndarray:
    return np.array([request_key("test", r) for r in range(rows)], np.uint64)


def draw_rows(children: list[list[int]], **values: Any) -> tuple[list[tuple[int, ...]], verify.VerifyBatch]:
    batch = tree_batch(children, SAMPLES)
    logits = target_logits().repeat(len(batch.row), 1)
    draws = sampling.draw(logits, batch, sampling_info(SAMPLES, **values), keys(SAMPLES))
    return emitted(batch, verify.accept(batch, draws), draws), batch


def test_tree_sampling_has_the_targets_distribution() -> None:
    for children in ([[0, 1, 3]], [[0, 1], [0, 2]], [[7]], [[0], [0], [0]]):
        rows, _ = draw_rows(children)
        assert first_token_p(rows, target_logits().softmax(0)) > 1e-3
        # After the first child came the same distribution again: the nodes below must not bend it.
        below = [row[1:] for row in rows if row[0] == children[0][0] and len(row) > 1]
        if len(children) > 1 and len(below) > 500:
            assert first_token_p(below, target_logits().softmax(0)) > 1e-3


def test_filters_keep_their_distribution() -> None:
    probs = target_logits().softmax(0)
    top_k = torch.where(torch.arange(VOCAB) < 3, probs, 0.0)
    tempered = (target_logits() / 0.5).softmax(0)
    min_p = torch.where(tempered >= 0.3 * tempered[0], tempered, 0.0)
    rows, _ = draw_rows([[0, 1, 3]], top_k=3)
    assert first_token_p(rows, top_k / top_k.sum()) > 1e-3
    rows, _ = draw_rows([[0, 1, 3]], temperature=0.5, min_p=0.3)
    assert first_token_p(rows, min_p / min_p.sum()) > 1e-3
    rows, _ = draw_rows([[0, 1, 3]], top_p=0.6)  # the nucleus is tokens 0 and 1
    nucleus = torch.where(torch.arange(VOCAB) < 2, probs, 0.0)
    assert first_token_p(rows, nucleus / nucleus.sum()) > 1e-3


def test_the_statistic_detects_the_soft_ratio_rule() -> None:
    """Accepting a beam child with min(1, p/q), q the draft's soft probability, bends the output: it shows."""
    generator = np.random.default_rng(0)
    p = target_logits().softmax(0).double().numpy()
    p /= p.sum()
    q = (target_logits() * 0.8).softmax(0).double().numpy()
    residual = np.maximum(p - q, 0)
    rows = []
    for _ in range(SAMPLES):
        accept = generator.random() < p[0] / q[0]  # child 0 is always offered, not sampled from q
        token = 0 if accept else generator.choice(VOCAB, p=residual / residual.sum())
        rows.append((int(token),))
    assert first_token_p(rows, target_logits().softmax(0)) < 1e-6


def test_the_statistic_detects_a_small_bend() -> None:
    """Power: five percent more of the offered child than the target gives is seen with this many samples."""
    p = target_logits().softmax(0).double().numpy()
    bent = p.copy()
    bent[0] *= 1.1
    bent[1:] *= (1 - bent[0]) / bent[1:].sum()
    draws = np.random.default_rng(1).choice(VOCAB, SAMPLES, p=bent / bent.sum())
    assert first_token_p([(int(d),) for d in draws], target_logits().softmax(0)) < 1e-3


def test_a_tree_emits_what_plain_decoding_emits() -> None:
    """Draws are a function of request and position: whatever was drafted, the text is the same."""
    rows = 60
    info = sampling_info(rows, top_p=0.9)
    chain, alone = tree_batch([[0, 1, 2, 3], [0, 1, 2, 3]], rows), tree_batch([], rows)
    draws = sampling.draw(target_logits().repeat(len(chain.row), 1), chain, info, keys(rows))
    got = emitted(chain, verify.accept(chain, draws), draws)
    for step in range(3):
        decoding = dataclasses.replace(alone, positions=np.full(rows, step))
        plain = sampling.draw(target_logits().repeat(rows, 1), decoding, info, keys(rows))
        assert all(int(plain[r]) == row[step] for r, row in enumerate(got) if len(row) > step)
    assert {len(row) for row in got} == {1, 2, 3}


def draw_by_seed(probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Stands for SGLang's seeded kernel, which needs a GPU: a function of seed, position and distribution."""
    rows = zip(probs.double().numpy(), seeds.tolist(), positions.tolist(), strict=True)
    draws = [np.random.default_rng([seed, at]).choice(len(p), p=p / p.sum()) for p, seed, at in rows]
    return torch.tensor(draws)


def test_seeded_trees_emit_what_seeded_decoding_emits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node is drawn with its own request's seed and its own position, as plain decoding would."""
    monkeypatch.setattr(sampling, "sampling_from_probs_torch", draw_by_seed)
    seeds = torch.arange(40) * 7 + 1
    info = sampling_info(len(seeds))
    info.sampling_seed = seeds
    chain, alone = tree_batch([[0, 1, 2, 3], [0, 1, 2, 3]], len(seeds)), tree_batch([], len(seeds))
    draws = sampling.draw(target_logits().repeat(len(chain.row), 1), chain, info, keys(len(seeds)))
    rows = emitted(chain, verify.accept(chain, draws), draws)
    for step in range(3):
        decoding = dataclasses.replace(alone, positions=np.full(len(seeds), step))
        plain = sampling.draw(target_logits().repeat(len(seeds), 1), decoding, info, keys(len(seeds)))
        assert all(int(plain[r]) == row[step] for r, row in enumerate(rows) if len(row) > step)
    assert {len(row) for row in rows} == {1, 2, 3}


def test_greedy_walk_takes_the_deepest_matching_path() -> None:
    batch = tree_batch([[3, 5], [2], [7]], 2)
    draws = np.array([3, 2, 9, 7, 4, 5, 1, 6, 1, 1])  # row 0 accepts 3, 2, 7; row 1 accepts the childless 5
    acceptance = verify.accept(batch, draws)
    assert acceptance.count.tolist() == [3, 1]
    assert emitted(batch, acceptance, draws) == [(3, 2, 7, 4), (5, 6)]
