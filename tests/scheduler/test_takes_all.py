"""Plans that take all candidates, where a device would wait until they are read."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from sched_factories import beam_trees, outcome, running, trees_from
from test_policies import NAMES

from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.costs.latency import ForwardCost, LatencyModel, TabulatedCost
from adaserve.scheduler.interface import CandidateTrees, DraftPlan, IterationPlan
from adaserve.scheduler.policies import build_policy
from adaserve.scheduler.policies.base import BasePolicy

STEPS = LatencyModel(
    ForwardCost(1.2e-3),
    TabulatedCost((1.0, 16.0, 32.0, 64.0, 128.0), (4.7e-3, 4.8e-3, 5.0e-3, 5.5e-3, 6.2e-3)),
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


def build(name: str, wait_s: float = 1.0, **config: object) -> BasePolicy:
    """``wait_s``: how long a device has waited for selections."""
    policy = build_policy(name, PolicyConfig(latency=STEPS, d_max=5, w_max=3, **config))  # type: ignore[arg-type]
    assert isinstance(policy, BasePolicy)
    for _ in range(40):
        policy.costs._select_wait.add(wait_s)
    return policy


@pytest.mark.parametrize("n", [1, 4, 20])
@pytest.mark.parametrize("name", NAMES)
def test_all_is_taken_where_all_of_it_fits(name: str, n: int) -> None:
    policy, taken = build(name, budget=128), 0
    for i in range(12):
        plan = policy.plan(running(n, may_go_unread=True, decoded_tokens=10 + i), 1.0 + 0.01 * i)
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
        {"may_go_unread": False},
        {"max_depth": 0},
        {"remaining_tokens": 1},
        {"offered": beam_trees(2, 2, 1)},
        {"underway": DraftPlan(0)},
    ],
)
def test_not_where_something_else_decides(name: str, unlike: dict[str, object]) -> None:
    like = {"may_go_unread": True, "decoded_tokens": 5}
    assert build(name).plan(running(2, **like), 1.0).takes_all
    assert not build(name).plan(running(2, **like | unlike), 1.0).takes_all


@pytest.mark.parametrize("name", sorted(ALWAYS))
def test_some_may_have_less_than_is_drafted(name: str) -> None:
    """At their ends; what is beyond is not verified."""
    policy = build(name)
    plan = policy.plan(running(3, may_go_unread=True, max_depth=[16, 1, 0]), 1.0)
    trees = drafted(plan)
    selection = policy.select(plan, trees)
    assert plan.takes_all and plan.cap is not None and plan.cap.tolist() == [16, 1, 0]
    assert np.array_equal(selection.keep, trees.depth <= plan.cap[trees.row])
    assert selection.counts.tolist() == [len(trees.depth) // 3, (trees.depth == 1).sum() // 3, 0]


@pytest.mark.parametrize("name", sorted(ALWAYS | BY_COST))
def test_the_wait_for_a_selection_is_learned_and_counted(name: str) -> None:
    """Where there need be none; it is no part of what else takes time around the forwards."""
    policy = build(name, 0.0)
    read, taken = running(2, decoded_tokens=5), running(2, decoded_tokens=5, may_go_unread=True)
    plans = [policy.plan(batch, 1.0) for batch in (read, taken)]
    trees = drafted(plans[0])
    told = [replace(plan, draft=plans[0].draft, takes_all=False) for plan in plans]
    before = policy.costs.other_s()
    for plan, expected in zip(told, (0.0, 0.7e-3), strict=True):
        times = {"draft_s": 5e-3, "select_s": 0.7e-3, "verify_s": 5e-3, "since_last_s": 10.7e-3 + before}
        for _ in range(40):
            selection = policy.select(plan, trees)
            policy.observe(outcome(plan, trees, selection, selection.keep & (trees.depth == 1), **times))
        assert policy.costs.select_wait_s == pytest.approx(expected)
    assert policy.costs.other_s() == pytest.approx(before, abs=1e-5)
    assert policy._wait_s(taken, 3, False) == pytest.approx(0.7e-3)
    for batch, steps, takes_all in ((taken, 3, True), (taken, 0, False), (read, 3, False)):
        assert policy._wait_s(batch, steps, takes_all) == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run_changes_no_plan(name: str) -> None:
    """Whether there is time for one depends on the host, and a recording has to replay."""
    plain, prepared = build(name, 1e-4), build(name, 1e-4)
    for i in range(30):
        batch = running(4, may_go_unread=True, decoded_tokens=10 + i)
        plan, same = plain.plan(batch, 1.0 + i), prepared.plan(batch, 1.0 + i)
        assert plan.takes_all == same.takes_all and plan.draft.depth == same.draft.depth
        trees = drafted(plan) if plan.draft.depth else CandidateTrees.empty(4)
        trees.logprob[:] *= 9.0
        prepared.prepare(same, trees)
        for policy, mine in ((plain, plan), (prepared, same)):
            selection = policy.select(mine, trees)
            policy.observe(outcome(mine, trees, selection, selection.keep & (trees.depth == 1)))


@pytest.mark.parametrize("name", sorted(BY_COST))
def test_where_all_is_taken_the_policy_expects_what_it_has_learned(name: str) -> None:
    """The metrics compare that with what comes of it. A draft that claims too much is no error of the policy,
    which knows that."""
    policy, n = build(name), 8
    told = trees_from([[(-1, 0.9), (0, 0.9), (1, 0.9)]] * n)
    accepted = (told.row % 2 == 0) & (told.depth == 1)  # half of the first tokens, and no others
    batch = running(n, may_go_unread=True, underway=DraftPlan(3))
    plans = [policy.plan(batch, 1.0 + i) for i in range(200)]
    for plan in plans:
        selection = policy.select(plan, told)
        policy.observe(outcome(plan, told, selection, accepted & selection.keep))
    plan = next(plan for plan in reversed(plans) if plan.takes_all)
    assert policy.select(plan, told).expected_tokens.sum() == pytest.approx(1.5 * n, rel=0.15)


@pytest.mark.parametrize("name", sorted(ALWAYS))
def test_not_beyond_the_budget(name: str) -> None:
    """With the roots, and of the rows that are drafted for."""
    some = DraftPlan(5, 3, rows=np.array([True, False, True]))
    for budget, fits in ((33, True), (32, False)):
        plan = build(name, budget=budget).plan(running(3, may_go_unread=True, underway=some), 1.0)
        assert plan.takes_all == fits
    two = build(name, budget=33, drafts=2).plan(running(3, may_go_unread=True, underway=some), 1.0)
    assert not two.takes_all, "two draft models make twice as many"


@pytest.mark.parametrize("name", sorted(BY_COST))
def test_only_where_verifying_more_is_quicker_than_reading(name: str) -> None:
    """Of what was drafted, all was bought so far, or as much as paid."""
    policy, n = build(name, 0.0, learn_costs=False), 8
    underway = DraftPlan(3) if name != "priced" else DraftPlan(5, 3)
    some = running(n, underway=underway, decoded_tokens=5)
    trees = beam_trees(n, underway.depth, underway.width)
    trees.logprob[:] = -40.0 * trees.depth  # nothing pays
    for i in range(400):
        plan = policy.plan(some, 1.0 + i)
        selection = policy.select(plan, trees)
        policy.observe(outcome(plan, trees, selection, np.zeros(trees.n_nodes, np.bool_)))
    tokens = n * (1 + underway.depth * underway.width)
    context = policy.context(some)
    more_s = policy.costs.verify_s(tokens, context) - policy.costs.verify_s(n, context)
    assert more_s > 1e-4
    allowed = replace(some, may_go_unread=True)
    for factor, takes in ((0.9, 0), (1.1, 63)):
        for _ in range(40):
            policy.costs._select_wait.add(factor * more_s)
        plans = [policy.plan(allowed, 100.0) for _ in range(64)]
        assert sum(plan.takes_all for plan in plans) == takes, "all but one, which shows what reading takes"
