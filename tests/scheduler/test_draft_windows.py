"""How much of a context drafts read: the choice, what it learns from, and what it may cost to learn it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from sched_factories import beam_trees, outcome, running, trees_from

from adaserve.scheduler.acceptance import Verified, drafted_of, find_tested_in
from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.costs.latency import ForwardCost, LatencyModel
from adaserve.scheduler.costs.learned import LearnedCosts
from adaserve.scheduler.interface import (
    MODEL,
    CandidateTrees,
    Context,
    DraftPlan,
    IterationOutcome,
    IterationPlan,
    tokens_read,
)
from adaserve.scheduler.policies import build_policy, policy_names
from adaserve.scheduler.policies.base import BasePolicy
from adaserve.scheduler.policies.priced import PricedPolicy

WINDOWS, SINKS = (0, 256, 64), 4


def latency(token_s: float) -> LatencyModel:
    """Reading a cached token takes a draft step ``token_s``."""
    return LatencyModel(
        draft=ForwardCost(fixed_s=5e-4, per_token_s=1e-5, per_context_s=token_s),
        verify=ForwardCost(fixed_s=1.5e-2, per_token_s=2e-4, per_context_s=4e-7),
        overhead_s=1e-3,
    )


def priced(token_s: float, **over: object) -> PricedPolicy:
    config = PolicyConfig(latency=latency(token_s), draft_windows=WINDOWS, draft_sinks=SINKS, **over)  # type: ignore[arg-type]
    policy = build_policy("priced", config)
    assert isinstance(policy, PricedPolicy)
    return policy


class Engine:
    """Serves n requests of the given contexts; a draft that reads window w agrees with ``accepts[w]``."""

    def __init__(self, policy: BasePolicy, context: list[int], token_s: float, seed: int = 0) -> None:
        self.policy, self.context, self.token_s = policy, np.array(context), token_s
        self.rng = np.random.default_rng(seed)

    def iterate(self, accepts: Callable[[int, int], float]) -> IterationPlan:
        """``accepts`` (row, window) -> probability that a drafted token is accepted."""
        n = len(self.context)
        plan = self.policy.plan(running(n, context_tokens=self.context, remaining_tokens=10_000), 1.0)
        trees = beam_trees(n, plan.draft.depth, plan.draft.width)
        selection = self.policy.select(plan, trees)
        accepted = np.zeros(trees.n_nodes, np.bool_)
        for r in range(n):
            window = 0 if plan.draft.window is None else int(plan.draft.window[r])
            nodes = range(trees.row_start[r], trees.row_start[r + 1])
            path = -1
            for j, node in enumerate(nodes):
                below = trees.parent[node] == path and selection.keep[node]
                if below and self.rng.random() < accepts(r, window):
                    accepted[node], path = True, j
        draft_s = plan.draft.depth * (6e-4 + self.token_s * plan.draft_context.tokens)
        self.policy.observe(outcome(plan, trees, selection, accepted, draft_s=draft_s, verify_s=0.02))
        return plan

    def serve(self, iterations: int, accepts: Callable[[int, int], float]) -> list[IterationPlan]:
        return [self.iterate(accepts) for _ in range(iterations)]


def used(plans: list[IterationPlan], row: int = 0) -> list[int]:
    """The windows of a row in those iterations that drafted."""
    return [0 if p.draft.window is None else int(p.draft.window[row]) for p in plans if p.draft.depth]


def share(plans: list[IterationPlan], window: int, row: int = 0) -> float:
    chosen = used(plans, row)
    assert chosen, "nothing was drafted"
    return chosen.count(window) / len(chosen)


def test_tokens_that_are_read() -> None:
    context = np.array([10, 68, 69, 5000, 5000])
    assert tokens_read(context, None, SINKS) is context
    window = np.array([64, 64, 64, 256, 0])
    assert tokens_read(context, window, SINKS).tolist() == [10, 68, 68, 260, 5000]


def test_short_contexts_leave_no_choice() -> None:
    plans = Engine(priced(2e-7), [40, 68], 2e-7).serve(50, lambda r, w: 0.7)
    assert all(p.draft.window is None for p in plans)


def test_a_small_window_where_all_agree_alike() -> None:
    plans = Engine(priced(2e-7), [8000] * 4, 2e-7).serve(300, lambda r, w: 0.7)
    assert share(plans[50:], 64) > 0.8
    assert plans[-1].draft_context.tokens < 5 * 4 * 260


def test_the_whole_context_where_a_window_agrees_less() -> None:
    plans = Engine(priced(2e-8), [2000] * 4, 2e-8).serve(400, lambda r, w: 0.4 if w else 0.85)
    assert share(plans[150:], 0) > 0.8


def test_a_window_that_leaves_nothing_out_is_no_choice() -> None:
    plans = Engine(priced(2e-8), [200] * 2, 2e-8).serve(300, lambda r, w: 0.3 if w == 64 else 0.5)
    assert set(used(plans)) == {0, 64}


def test_each_request_has_its_own_window() -> None:
    """The first one's draft needs the whole context, the second one's is better without."""
    engine = Engine(priced(2e-8), [3000, 3000], 2e-8)
    plans = engine.serve(800, lambda r, w: (0.9 if w == 0 else 0.3) if r == 0 else (0.3 if w == 0 else 0.9))
    assert share(plans[400:], 0, row=0) > 0.7
    assert share(plans[400:], 0, row=1) < 0.3


def test_other_windows_are_tried_now_and_then_and_a_change_is_noticed() -> None:
    engine = Engine(priced(2e-8), [2000] * 4, 2e-8)
    before = engine.serve(400, lambda r, w: 0.4 if w else 0.85)
    tried = set(used(before[-150:]))
    assert tried == {0, 256, 64}
    after = engine.serve(1500, lambda r, w: 0.85 if w == 256 else 0.4)
    assert share(after[-200:], 256) > 0.7


def test_offers_say_nothing_of_how_much_drafts_should_read() -> None:
    """What earlier text has proposed is accepted; nothing was drafted, so nothing is known of any window."""
    policy, n = priced(2e-8), 4
    told = trees_from([[(-1, 0.9), (0, 0.9)]] * n)
    offered = replace(told, source=np.full(told.n_nodes, 8))
    batch = running(n, context_tokens=4000, offered=offered)
    for i in range(60):
        plan = replace(policy.plan(batch, 1.0 + i), draft=DraftPlan(0))
        selection = policy.select(plan, offered)
        policy.observe(outcome(plan, offered, selection, selection.keep))
    assert policy.windows is not None
    rates = [rate.of_rows(("r0", "new"), ("chat", "chat")).tolist() for rate in policy.windows._rates]
    assert rates == [[pytest.approx(0.7)] * 2] * 3


def test_where_offers_join_a_draft_its_own_levels_count() -> None:
    """Per row: accepted on both levels; the first level by an offer, the second one not at all; offers
    alone."""
    row = [(-1, 0.6), (-1, 0.3), (0, 0.5), (1, 0.5)]
    trees = trees_from([row, row, row[:1]])
    source = np.array([MODEL, 8, MODEL | 8, 8, MODEL, 8, MODEL, MODEL, 8])
    accepted = np.array([1, 0, 1, 0, 0, 1, 0, 0, 1], np.bool_)
    seen = Verified(replace(trees, source=source), np.ones(9, np.bool_), accepted)
    tests = drafted_of(find_tested_in(seen), seen)
    assert tests.tried.tolist() == [2, 2, 0] and tests.passed.tolist() == [2, 0, 0]
    assert tests.node.tolist() == [0, 2, 4, 7]


def test_costly_windows_are_tried_rarely() -> None:
    """At this length reading everything takes a draft twenty times as long."""
    plans = Engine(priced(2e-7), [32_000] * 2, 2e-7).serve(1500, lambda r, w: 0.7)
    assert share(plans[100:], 0) < 0.01


def test_what_cannot_be_drafted_is_not_tried_for_ever() -> None:
    """Nothing is learned from a plan that drafts nothing, so a try ends with the plan."""
    policy = priced(1e-5)
    engine = Engine(policy, [32_000] * 2, 1e-5)
    engine.serve(200, lambda r, w: 0.7)
    assert policy.windows is not None
    policy.windows._unused[:] = 1 << 20
    plans = engine.serve(10, lambda r, w: 0.7)
    assert sum(p.draft.depth > 0 for p in plans) >= 7


@pytest.mark.parametrize("name", [n.replace("-K", "-3") for n in policy_names() if n != "none"])
def test_a_fixed_window_holds_for_every_policy(name: str) -> None:
    config = PolicyConfig(latency=latency(2e-7), draft_windows=(128,), draft_sinks=3)
    plans = Engine(build_policy(name, config), [4000, 50], 2e-7).serve(20, lambda r, w: 0.7)  # type: ignore[arg-type]
    drafted = [p for p in plans if p.draft.depth]
    assert drafted and all(p.draft.reads(p.running.context_tokens).tolist() == [131, 50] for p in drafted)


def test_without_choice_the_others_read_everything() -> None:
    config = PolicyConfig(latency=latency(2e-7), draft_windows=WINDOWS)
    plans = Engine(build_policy("adaserve", config), [4000], 2e-7).serve(5, lambda r, w: 0.7)  # type: ignore[arg-type]
    assert all(p.draft.window is None and p.draft_context == Context(4000) for p in plans)


@pytest.mark.parametrize("windows", [(), (8,), (-1,), (64, 0)])
def test_windows_that_make_no_sense(windows: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="draft_windows"):
        PolicyConfig(draft_windows=windows)


def drafted(plan: IterationPlan, seconds: float) -> IterationOutcome:
    n = len(plan.running)
    trees = beam_trees(n, plan.draft.depth, plan.draft.width)
    none = np.zeros(trees.n_nodes, np.bool_)
    selection = build_policy("chain-1").select(replace(plan, draft=DraftPlan(0)), CandidateTrees.empty(n))
    return outcome(plan, trees, replace(selection, keep=none), none, draft_s=seconds)


@pytest.mark.parametrize("wrong", [0.4, 1.0, 2.5])
def test_costs_of_reading_are_learned(wrong: float) -> None:
    """Drafts that read much and drafts that read little, from a guess that is ``wrong`` by so much."""
    truth = latency(2e-7)
    costs, rng = LearnedCosts(latency(2e-7 * wrong)), np.random.default_rng(0)
    batch = running(2, context_tokens=8000)
    plan = IterationPlan(0, 0.0, batch, DraftPlan(4, 2), 100)
    for i in range(600):
        window = np.array([64, 64]) if i % 2 else None
        p = replace(plan, draft=DraftPlan(int(rng.integers(1, 6)), 2, window=window, sinks=4))
        seconds = truth.draft_s(2, p.draft.depth, 2, p.draft_context) * (1 + abs(rng.normal(0, 0.02)))
        costs.observe(drafted(p, seconds), Context(16_000, 2))
    for read in (Context(136.0, 2), Context(16_000.0, 2)):
        for depth in (1, 4):
            right = truth.draft_s(2, depth, 2, read)
            assert costs.draft_s(2, depth, 2, read) == pytest.approx(right, rel=0.25), (read, depth)


@pytest.mark.parametrize("seed", range(4))
def test_short_contexts_say_nothing_of_long_ones(seed: int) -> None:
    """Noise of what takes a hundredth of a draft's time must not be blown up."""
    truth, rng = latency(2e-8), np.random.default_rng(seed)
    costs = LearnedCosts(truth)
    for _ in range(300):
        batch = running(2, context_tokens=int(rng.integers(50, 400)))
        plan = IterationPlan(0, 0.0, batch, DraftPlan(int(rng.integers(1, 6)), 2), 100)
        seconds = truth.draft_s(2, plan.draft.depth, 2, plan.draft_context) * (1 + abs(rng.normal(0, 0.1)))
        costs.observe(drafted(plan, seconds), plan.draft_context)
    long = Context(32_000, 2)
    assert costs.draft_s(2, 1, 2, long) == pytest.approx(truth.draft_s(2, 1, 2, long), rel=0.5)
