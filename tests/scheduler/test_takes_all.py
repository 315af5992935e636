"""Plans that take all candidates, where a device would wait until they are read."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from sched_factories import beam_trees, outcome, running
from test_policies import NAMES

from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.interface import CandidateTrees, Draft, IterationPlan
from adaserve.scheduler.latency import ForwardCost, LatencyModel, TableCost
from adaserve.scheduler.policies import build_policy
from adaserve.scheduler.policies.base import BasePolicy

STEPS = LatencyModel(
    ForwardCost(1.2e-3), TableCost((1.0, 16.0, 32.0, 64.0, 128.0), (4.7e-3, 4.8e-3, 5.0e-3, 5.5e-3, 6.2e-3))
)
"""As on a GPU: the weights are read for one token as for sixteen."""
ALWAYS = {"adaserve", "adaserve-v1", "global-greedy", "equal-greedy", "chain-3", "fixed-tree"}
BY_COST = {"priced", "adaptive-verify-3"}


def drafted(plan: IterationPlan) -> CandidateTrees:
    n, draft = len(plan.running), plan.draft
    if draft.branching is None:
        return beam_trees(n, draft.depth, draft.width)
    levels = np.cumprod(draft.branching)
    parent = [-1] * levels[0]
    for level, (before, now) in enumerate(pairwise(levels)):
        parent += (levels[:level].sum() + np.repeat(np.arange(before), now // before)).tolist()
    m, depth = len(parent), np.repeat(np.arange(1, len(levels) + 1), levels)
    starts, log = np.arange(n + 1) * m, np.tile(-0.5 * depth, n)
    return CandidateTrees(starts, np.zeros(n * m, np.int64), np.tile(parent, n), np.tile(depth, n), log)


def build(name: str, **config: object) -> BasePolicy:
    policy = build_policy(name, PolicyConfig(latency=STEPS, d_max=5, w_max=3, **config))  # type: ignore[arg-type]
    assert isinstance(policy, BasePolicy)
    return policy


@pytest.mark.parametrize("n", [1, 4, 20])
@pytest.mark.parametrize("name", NAMES)
def test_all_is_taken_where_all_of_it_fits(name: str, n: int) -> None:
    policy, taken = build(name, budget=128), 0
    for i in range(12):
        plan = policy.plan(running(n, reading_s=1.0, decoded_tokens=10 + i), 1.0 + 0.01 * i)
        trees = drafted(plan) if plan.draft.depth else CandidateTrees.empty(n)
        if plan.takes_all:
            assert 0 < trees.n_nodes <= 128 - n and plan.budget >= n + trees.n_nodes and plan.cap is None
            assert name in ALWAYS | BY_COST
        elif name in ALWAYS:
            assert trees.n_nodes > 128 - n, "there is room for all"
        trees.logprob[::5] = np.nan if i % 2 else -2000.0
        selection = policy.select(plan, trees)
        assert selection.keep.all() or not plan.takes_all
        assert np.array_equal(selection.counts, np.diff(trees.row_start)) or not plan.takes_all
        assert np.isfinite(selection.expected_tokens).all()
        taken += plan.takes_all
        policy.observe(outcome(plan, trees, selection, selection.keep & (trees.depth == 1)))
    assert (taken > 0) == (name in ALWAYS | BY_COST) or n == 20


@pytest.mark.parametrize("name", sorted(ALWAYS | BY_COST))
@pytest.mark.parametrize(
    "unlike",
    [
        {"reading_s": 0.0},
        {"max_depth": [16, 1]},
        {"remaining_tokens": [2, 100]},
        {"offered": beam_trees(2, 2, 1)},
        {"underway": Draft(0)},
    ],
)
def test_not_where_something_else_decides(name: str, unlike: dict[str, object]) -> None:
    like = {"reading_s": 1.0, "decoded_tokens": 5}
    assert build(name).plan(running(2, **like), 1.0).takes_all
    assert not build(name).plan(running(2, **like | unlike), 1.0).takes_all


@pytest.mark.parametrize("name", sorted(ALWAYS))
def test_not_beyond_the_budget(name: str) -> None:
    """With the roots, and of the rows that are drafted for."""
    some = Draft(5, 3, rows=np.array([True, False, True]))
    for budget, fits in ((33, True), (32, False)):
        plan = build(name, budget=budget).plan(running(3, reading_s=1.0, underway=some), 1.0)
        assert plan.takes_all == fits
    two = build(name, budget=33, drafts=2).plan(running(3, reading_s=1.0, underway=some), 1.0)
    assert not two.takes_all, "two draft models make twice as many"


@pytest.mark.parametrize("name", sorted(BY_COST))
def test_only_where_verifying_more_is_quicker_than_reading(name: str) -> None:
    """Of what was drafted, all was bought so far, or as much as paid."""
    policy, n = build(name), 8
    underway = Draft(3) if name != "priced" else Draft(5, 3)
    some = running(n, underway=underway, decoded_tokens=5)
    for i in range(60):
        plan = policy.plan(some, 1.0 + i)
        trees = beam_trees(n, underway.depth, underway.width)
        trees.logprob[:] = -40.0 * trees.depth  # nothing pays
        assert not policy.select(plan, trees).keep.any() or i == 0
    tokens = n * (1 + underway.depth * underway.width)
    context = policy.context(some)
    more_s = policy.costs.verify_s(tokens, context) - policy.costs.verify_s(n, context)
    assert more_s > 1e-4
    for factor, takes in ((0.9, False), (1.1, True)):
        assert policy.plan(replace(some, reading_s=factor * more_s), 100.0).takes_all == takes
