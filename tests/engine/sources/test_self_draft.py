"""A target that drafts for itself: what it proposes, and that its KV cache stays that of plain decoding."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from adaserve.config import AdaServeConfig
from adaserve.engine.cpu import LlamaModel
from adaserve.engine.cpu.device import CpuDevice
from adaserve.engine.cpu.forwards import CpuForward
from adaserve.engine.cpu.install import LLAMA_ATTRIBUTE
from adaserve.engine.sources.self_draft import SHARPENING
from adaserve.engine.sources.stateless import StatelessSource
from adaserve.engine.trees import verify
from adaserve.engine.trees.batch import TreeBatch
from adaserve.engine.trees.proposal import Proposal
from adaserve.engine.trees.shape import ANY_DEPTH
from adaserve.scheduler.interface import DraftPlan, IterationPlan
from tests.engine.cpu.factories import Pool, hf_model, read_hf
from tests.engine.test_trees import MAX_NODES, PROMPTS, Case, DenseModel, alike, path_logprobs
from tests.engine.trees.factories import iteration_plan, random_selection

ROWS = len(PROMPTS)


def case_of(max_depth: list[int]) -> Case:
    case = alike([0] * ROWS, max_depth)
    case.source = StatelessSource(case.device.target, SHARPENING, MAX_NODES, ANY_DEPTH)  # type: ignore[assignment]
    return case


def plan_of(case: Case, depth: int, width: int, window: list[int] | np.ndarray | None) -> IterationPlan:
    plan = iteration_plan(ROWS, depth, width)
    seen = replace(plan.running, context_tokens=case.rows.seq_lens)
    draft = DraftPlan(depth, width, window=None if window is None else np.array(window), sinks=1)
    return replace(plan, running=seen, draft=draft)


def proposed(case: Case, plan: IterationPlan) -> Proposal:
    pending = case.source.propose(plan, case.rows, None)
    assert pending is not None and pending.caught_up is None
    return pending.read()


def test_a_window_that_leaves_nothing_out_proposes_what_the_target_would_say() -> None:
    case, model = case_of([3, 3, 3]), hf_model()
    case.rows = replace(case.rows, noisy=False)  # the likeliest tokens
    proposal = proposed(case, plan_of(case, 3, 1, [64] * ROWS))
    assert not proposal.draft_columns, "no draft model has any of it"
    for r in range(ROWS):
        text = case.text(r)
        for token in proposal.trees.token[3 * r : 3 * r + 3].tolist():
            assert token == int(path_logprobs(model, text).argmax())
            text.append(token)


@pytest.mark.parametrize("seed", range(4))
def test_what_draft_steps_write_does_not_last(seed: int) -> None:
    """Windows change at random, some nodes are not verified, one row never drafts."""
    rng, case, model = np.random.default_rng(seed), case_of([4, 0, 4]), hf_model()
    for _ in range(5):
        proposal = proposed(case, plan_of(case, 3, 2, rng.integers(1, 6, ROWS)))
        verified = verify.build(case.rows, proposal, random_selection(proposal.trees, rng))
        draws = case.target.argmax(case.target.run(verified.batch)).numpy()
        case.commit(verified, draws)
    for r in range(ROWS):
        text, prompt = case.text(r), PROMPTS[r]
        for i in range(len(prompt) + 1, len(text)):
            assert text[i] == int(path_logprobs(model, text[:i]).argmax()), "another text"
        _check_cache(case, r, text[:-1])


def _check_cache(case: Case, r: int, text: list[int]) -> None:
    """The target's KV of ``text`` is that of one plain forward."""
    assert len(text) == case.rows.seq_lens[r]
    pool_row, fresh = int(case.rows.pool_rows[r]), DenseModel(hf_model())
    one = (np.array([pool_row]), np.array([0]), np.array([len(text)]))
    CpuForward(fresh, case.table).run(TreeBatch.causal(np.array(text), *one))
    slots = case.table[pool_row, : len(text)].long()
    for mine, plain in zip(
        (*case.models[0].pool.k, *case.models[0].pool.v), (*fresh.pool.k, *fresh.pool.v), strict=True
    ):
        torch.testing.assert_close(mine[slots], plain[slots])


def test_no_deeper_than_the_drafter_goes() -> None:
    """Policies may ask for more levels than there are Medusa heads."""
    case = case_of([4] * ROWS)
    case.source = StatelessSource(case.device.target, SHARPENING, MAX_NODES, 2)  # type: ignore[assignment]
    proposal = proposed(case, plan_of(case, 4, 2, None))
    assert np.diff(proposal.trees.row_start).tolist() == [4] * ROWS and proposal.trees.depth.max() == 2


def test_draws_are_read_as_the_target_reads_them() -> None:
    """The noise weighs what the temperature gives it, so the best token is the one that is drawn."""
    for temperature in (0.1, 0.8, 1.5):
        scale, spread = SHARPENING.with_shared_noise(temperature)
        assert spread / scale == pytest.approx(temperature)
        assert SHARPENING.without_shared_noise(temperature)[0] == pytest.approx(1 / temperature)
    assert SHARPENING.with_shared_noise(0.0)[1] == 0.0


def test_its_draft_steps_are_not_counted_as_the_targets() -> None:
    """Or reports would say that drafting takes no time, and verifications all of it."""
    weights, config = read_hf(hf_model())
    pool, table = Pool(config, len(weights.layers)), torch.arange(64, dtype=torch.int32)[None]
    runner = SimpleNamespace(
        model=SimpleNamespace(**{LLAMA_ATTRIBUTE: LlamaModel(weights, config, "fp32")}),
        token_to_kv_pool=SimpleNamespace(k_buffer=pool.k, v_buffer=pool.v),
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        model_config=SimpleNamespace(model_is_mrope=False),
    )
    device = CpuDevice.of(runner, [], AdaServeConfig(drafts="self", draft_window=64))
    assert device.self_drafter is not None
    one = np.array([0])
    text = TreeBatch.causal(np.arange(5), one, np.array([0]), np.array([5]))
    device.self_drafter.rehearse(text, 2)
    assert not device.target.take_runs() and device.self_drafter.take_runs()
    device.target.run(text)
    assert device.target.take_runs() and not device.self_drafter.take_runs()
