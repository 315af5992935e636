"""The beam search in one C call builds the same trees as the search that goes step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from adaserve.engine.forwards import LeanForward
from adaserve.engine.host import LeanModel
from adaserve.engine.sources.beam import Draft, Drafter
from adaserve.engine.state import DecodeRows, RequestState
from adaserve.scheduler.interface import IterationPlan
from tests.engine.host.factories import Chunk, Pool, hf_model, read_hf, run
from tests.engine.trees.factories import running

LENGTHS = [5, 40, 17]
TEMPERATURES = np.array([0.0, 0.7, 1.0])
WINDOW = 48


@dataclass
class Setting:
    """Three requests whose prefixes are cached, except for what the draft has missed."""

    lean: LeanModel
    pool: Pool
    rows: DecodeRows

    def draft(self, plan: IterationPlan, keep: Callable[..., bool] | None, *, native: bool) -> Draft:
        pool = SimpleNamespace(k_buffer=self.pool.k, v_buffer=self.pool.v)
        forward: Any = LeanForward(self.lean, SimpleNamespace(token_to_kv_pool=pool))
        assert forward.searches_beams, "the kernels do not compile here"
        forward.searches_beams = native
        draft = Drafter(forward, read_at, WINDOW - 1).draft(plan, self.rows, keep)
        assert draft is not None
        return draft


def read_at(temperature: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return 1 / np.maximum(temperature, 0.5), np.where(temperature > 0, 0.8, 0.0)


def make(behind: int, max_depth: list[int] | None = None) -> Setting:
    weights, config = read_hf(hf_model())
    lean = LeanModel(weights, config, "fp32")
    pool = Pool(config, len(weights.layers))
    rng = np.random.default_rng(1)
    slots = torch.zeros(len(LENGTHS), 128, dtype=torch.int64)
    states = []
    for r, length in enumerate(LENGTHS):
        taken = pool.take(length + WINDOW)
        slots[r, : len(taken)] = torch.tensor(taken)
        text = rng.integers(0, config.vocab_size, length).tolist()
        seen = length - behind
        run(lean, pool, [Chunk(text[:seen], list(range(seen)), taken[:seen], [])])
        states.append(RequestState(f"r{r}", "chat", 1.0, 0.0, draft_len=seen, pending=text[seen:], key=r + 1))
    view = running(len(LENGTHS), max_depth)
    object.__setattr__(view, "temperature", TEMPERATURES)
    rows = DecodeRows(states, np.array(LENGTHS), np.array([3, 5, 9]), torch.arange(len(LENGTHS)), slots, view)
    return Setting(lean, pool, rows)


def plan_of(depth: int, width: int) -> IterationPlan:
    n = len(LENGTHS)
    return IterationPlan(0, 0.0, running(n), np.ones(n), depth, width, 1000, None)


def same(one: Draft, other: Draft) -> None:
    assert one.depth == other.depth
    assert np.array_equal(one.rows, other.rows)
    assert np.array_equal(one.window, other.window)
    assert np.array_equal(one.visible, other.visible)
    for name in ("row_start", "token", "parent", "depth"):
        assert np.array_equal(getattr(one.trees, name), getattr(other.trees, name)), name
    assert np.allclose(one.trees.logprob, other.trees.logprob, atol=1e-5)


@pytest.mark.parametrize("behind", [0, 3])
@pytest.mark.parametrize(("depth", "width"), [(1, 1), (5, 1), (1, 4), (4, 3), (2, 16)])
def test_the_same_trees(depth: int, width: int, behind: int) -> None:
    plan = plan_of(depth, width)
    one, other = make(behind), make(behind)
    same(one.draft(plan, None, native=True), other.draft(plan, None, native=False))
    for a, b in zip(one.pool.k + one.pool.v, other.pool.k + other.pool.v, strict=True):
        assert torch.allclose(a, b, atol=1e-5), "the draft's KV differs"
    for a, b in zip(one.rows.states, other.rows.states, strict=True):
        assert (a.draft_len, a.pending) == (b.draft_len, b.pending)


def test_rows_without_a_tree() -> None:
    plan = plan_of(3, 2)
    one, other = make(0, [4, 0, 2]), make(0, [4, 0, 2])
    same(one.draft(plan, None, native=True), other.draft(plan, None, native=False))


def test_stopping_early() -> None:
    plan, asked = plan_of(5, 2), []

    def keep(_: IterationPlan, step: int, frontier: np.ndarray) -> bool:
        asked.append((step, frontier.copy()))
        return step < 3

    draft = make(0).draft(plan, keep, native=True)
    assert [step for step, _ in asked] == [1, 2, 3]
    assert draft.depth == 3
    by_native, asked = asked, []
    same(draft, make(0).draft(plan, keep, native=False))
    for (_, a), (_, b) in zip(by_native, asked, strict=True):
        assert np.allclose(a, b, atol=1e-5)


def test_an_error_of_the_policy_is_raised() -> None:
    def keep(*_: Any) -> bool:
        raise ValueError("a policy's fault")

    with pytest.raises(ValueError, match="a policy's fault"):
        make(0).draft(plan_of(3, 2), keep, native=True)
