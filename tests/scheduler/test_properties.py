"""What holds for every policy whatever it is given: random trees, SLOs, budgets and clocks."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import paper_algorithms as reference
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sched_factories import beam_trees, kept_sets, outcome, running, tree_rows, trees_from

from adaserve.scheduler.acceptance_calibration import CEILING, N_BINS
from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.costs.latency import ForwardCost, LatencyModel, TabulatedCost
from adaserve.scheduler.interface import CandidateTrees, DraftPlan, IterationPlan, RunningBatch
from adaserve.scheduler.policies import build_policy, policy_names
from adaserve.scheduler.policies.base import BasePolicy
from adaserve.scheduler.policies.priced import PricedPolicy
from adaserve.scheduler.selection import parent_kept, path_probability, rank, take_prefix, two_phase

NAMES = [n.replace("-K", "-3") for n in policy_names()]
STEPS = LatencyModel(
    TabulatedCost((1.0, 8.0, 32.0), (6e-4, 8e-4, 1.5e-3)),
    TabulatedCost((1.0, 4.0, 8.0, 13.0, 16.0, 32.0), (9.7e-3, 13.7e-3, 13.7e-3, 16.7e-3, 21e-3, 41e-3)),
)
SLO = st.one_of(st.sampled_from([0.0, math.inf, 1e-9, 0.05]), st.floats(0.001, 1.0))


@st.composite
def batches(draw: st.DrawFn, n: int) -> RunningBatch:
    """n requests, most of them odd in some way."""

    def column(values: st.SearchStrategy[float]) -> np.ndarray:
        return np.array(draw(st.lists(values, min_size=n, max_size=n)))

    return running(
        n,
        slo_class=tuple(draw(st.lists(st.sampled_from(["chat", "coding"]), min_size=n, max_size=n))),
        tpot_slo_s=column(SLO),
        decode_start_s=column(st.floats(-1e6, 1e6)),
        decoded_tokens=column(st.integers(0, 5000)),
        context_tokens=column(st.integers(0, 100_000)),
        remaining_tokens=column(st.integers(1, 5000)),
        max_depth=column(st.integers(0, 12)),
        prefill_tokens=draw(st.sampled_from([0, 0, 7, 512])),
    )


def build(name: str, config: PolicyConfig) -> BasePolicy:
    """A policy of ``NAMES``."""
    policy = build_policy(name, config)
    assert isinstance(policy, BasePolicy)
    return policy


def planned(name: str, batch: RunningBatch, trees: CandidateTrees, budget: int | None, now_s: float = 1.0):
    """A policy with a plan that fits ``trees``, as if they had been drafted for it."""
    policy = build(name, PolicyConfig(latency=STEPS))
    plan = policy.plan(batch, now_s)
    depth = int(trees.depth.max(initial=0))
    cap = np.minimum(batch.max_depth, batch.remaining_tokens - 1)
    room = len(batch) + trees.n_nodes if budget is None else budget
    return policy, replace(plan, draft=DraftPlan(depth, plan.draft.width), budget=room, cap=cap)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(NAMES), tree_rows(max_rows=6), st.data())
def test_selected_sets_are_trees_within_budget_and_depth(name, rows, data):
    trees, n = trees_from(rows), len(rows)
    batch = data.draw(batches(n))
    budget = data.draw(st.integers(0, n + trees.n_nodes + 2))
    policy, plan = planned(name, batch, trees, budget)
    selection = policy.select(plan, trees)
    assert parent_kept(trees, selection.keep)[selection.keep].all()
    assert selection.keep.sum() == selection.counts.sum() <= max(0, budget - n)
    row = np.repeat(np.arange(n), np.diff(trees.row_start))
    assert np.array_equal(np.bincount(row[selection.keep], minlength=n), selection.counts)
    assert plan.cap is not None and (trees.depth[selection.keep] <= plan.cap[row][selection.keep]).all()
    assert (selection.slo_counts <= selection.counts).all()
    assert (selection.expected_tokens >= 1).all() and np.isfinite(selection.expected_tokens).all()


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(NAMES), tree_rows(max_rows=4), st.data())
def test_nan_and_its_descendants_are_never_kept(name, rows, data):
    trees, n = trees_from(rows), len(rows)
    bad = np.array(data.draw(st.lists(st.booleans(), min_size=trees.n_nodes, max_size=trees.n_nodes)), bool)
    trees.logprob[bad] = math.nan
    policy, plan = planned(name, running(n, max_depth=16), trees, None)
    keep = policy.select(plan, trees).keep
    assert not keep[bad].any()
    assert parent_kept(trees, keep)[keep].all()


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.data())
def test_the_order_of_requests_does_not_matter(name, n, depth, width, data):
    batch = data.draw(batches(n))
    order = list(data.draw(st.permutations(range(n))))
    seed = data.draw(st.integers(0, 9))
    trees = beam_trees(n, depth, width, seed)
    swapped_nodes = np.concatenate([np.arange(depth * width) + r * depth * width for r in order])
    swapped = CandidateTrees(
        trees.row_start, trees.token, trees.parent[swapped_nodes], trees.depth, trees.logprob[swapped_nodes]
    )
    arrays = ("tpot_slo_s", "decode_start_s", "decoded_tokens", "context_tokens", "remaining_tokens")
    shuffled = replace(
        batch,
        rids=tuple(batch.rids[i] for i in order),
        slo_class=tuple(batch.slo_class[i] for i in order),
        max_depth=batch.max_depth[order],
        **{k: getattr(batch, k)[order] for k in arrays},
    )
    budget = data.draw(st.one_of(st.none(), st.integers(n, n * (1 + depth * width))))
    one_policy, one_plan = planned(name, batch, trees, budget)
    two_policy, two_plan = planned(name, shuffled, swapped, budget)
    assert (one_plan.draft, one_plan.budget) == (two_plan.draft, two_plan.budget)
    one, two = one_policy.select(one_plan, trees), two_policy.select(two_plan, swapped)
    if len(set(np.minimum(one_plan.need, depth + 1.0))) == n or one.counts.sum() < one_plan.budget - n:
        # Equally needy requests are served in the order they stand in: a tie.
        assert [kept_sets(trees, one)[i] for i in order] == kept_sets(swapped, two)
    assert one.counts.sum() == two.counts.sum()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), tree_rows(max_rows=4), st.data())
def test_more_budget_never_lowers_what_is_expected(name, rows, data):
    """Expected tokens; for ``priced``, which may leave budget unused, value per second."""
    trees, n = trees_from(rows), len(rows)
    batch = data.draw(batches(n))
    got = []
    for budget in range(n, n + trees.n_nodes + 2):
        policy, plan = planned(name, batch, trees, budget)
        selection = policy.select(plan, trees)
        expected = float(selection.expected_tokens.sum())
        if isinstance(policy, PricedPolicy):
            assert plan.weight is not None
            value = float((plan.weight * selection.expected_tokens).sum())
            expected = value / float(policy.seconds(plan, trees, int(selection.counts.sum()))[-1])
        got.append(expected)
    assert all(b >= a * (1 - 1e-9) for a, b in itertools.pairwise(got))


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.data())
def test_slo_phase_is_minimal_for_every_request(n, depth, width, data):
    """With budget to spare, no smaller tree of a row reaches its need (brute force over its trees)."""
    trees = beam_trees(n, depth, width, data.draw(st.integers(0, 50)))
    need = np.array(data.draw(st.lists(st.floats(0, depth + 2), min_size=n, max_size=n)))
    chosen = two_phase(trees, path_probability(trees), need, depth, n + trees.n_nodes, None)
    for row, count, wanted in zip(reference.rows_of(trees), chosen.slo_counts, need, strict=True):
        target = min(wanted, depth + 1.0)
        reaching = [
            len(t) for t in reference.subtrees(row) if reference.expected_tokens([row], [t]) >= target - 1e-9
        ]
        assert count == (min(reaching) if reaching else len(row)) or (target <= 1 and count == 0)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.data())
def test_even_rows_are_selected_as_any_others(n, depth, width, data):
    """Beams, as a drafter makes them, with ties: Algorithm 2 by ranked rows."""
    trees = beam_trees(n, depth, width, data.draw(st.integers(0, 50)))
    if data.draw(st.booleans()):
        trees.logprob[:] = np.round(trees.logprob * 2) / 2  # many ties
    need = np.array(data.draw(st.lists(st.floats(-1, 5), min_size=n, max_size=n, unique=True)))
    budget = data.draw(st.integers(0, n + trees.n_nodes + 1))
    n_max = data.draw(st.one_of(st.none(), st.integers(1, 4)))
    f = path_probability(trees)
    even = two_phase(trees, f, need, depth, budget, n_max)
    want = reference.algorithm_2(reference.rows_of(trees), list(need), budget, depth, n_max)
    assert even.counts.sum() == sum(map(len, want.kept))
    assert even.expected_tokens.sum() == pytest.approx(want.value, rel=1e-6)
    if len(np.unique(f)) == len(f):
        assert [set(row) for row in want.kept] == kept_sets(trees, even)
    ranked = rank(trees, f)
    prefix = take_prefix(ranked, even.counts, even.slo_counts, trees.n_nodes)
    assert np.array_equal(prefix.keep, even.keep), "a row's kept nodes are the best of its ranking"


def literal_values(trees: CandidateTrees, factors: np.ndarray) -> list[float]:
    """f of every node, one after the other: the product of min(.985, q x factor) along its path."""
    values: list[float] = []
    for row, (start, end) in enumerate(itertools.pairwise(trees.row_start.tolist())):
        for node in range(start, end):
            step, above, parent = trees.logprob[node], 1.0, int(trees.parent[node])
            if parent >= 0:
                step, above = step - trees.logprob[start + parent], values[start + parent]
            q = 0.0 if math.isnan(step) else min(1.0, math.exp(min(step, 0.0)))
            values.append(above * min(CEILING, q * factors[row, int(q * N_BINS)]))
    return values


@settings(max_examples=150, deadline=None)
@given(tree_rows(max_rows=6), st.data())
def test_priced_buys_the_best_prefix_of_calibrated_values(rows, data):
    """Node by node in plain numbers: the same f, the same nodes, while the policy learns."""
    trees, n = trees_from(rows), len(rows)
    batch = data.draw(batches(n))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    if data.draw(st.booleans()):
        trees.logprob[rng.random(trees.n_nodes) < 0.1] = data.draw(st.sampled_from([math.nan, -math.inf]))
    policy = build_policy("priced", PolicyConfig(latency=STEPS, early_stop=True))
    assert isinstance(policy, PricedPolicy)
    for _ in range(data.draw(st.integers(1, 12))):
        plan = policy.plan(batch, 1.0)
        plan = replace(
            plan, draft=DraftPlan(int(trees.depth.max(initial=0))), budget=n + trees.n_nodes, cap=None
        )
        factors = policy.calibrator.batch_factors(batch.rids, batch.slo_class)
        f = literal_values(trees, factors)
        assert policy.values(plan, trees) == pytest.approx(f)
        weight = np.ones(n) if plan.weight is None else plan.weight
        seconds = policy.seconds(plan, trees, trees.n_nodes)
        value = [float(weight[row] * f[i]) for i, row in enumerate(trees.row)]
        order = sorted(range(len(f)), key=value.__getitem__, reverse=True)
        worth = [float(weight.sum())]
        worth += [worth[0] + sum(value[i] for i in order[: k + 1]) for k in range(len(order))]
        possible = 1 + sum(v > 0 for v in value)
        rate = [w / s for w, s in zip(worth, seconds, strict=True)][:possible]
        kept = policy.select(plan, trees)
        assert rate[int(kept.counts.sum())] == pytest.approx(max(rate))
        least = min((value[i] for i in np.flatnonzero(kept.keep)), default=math.inf)
        assert all(v <= least for v, keep in zip(value, kept.keep, strict=True) if not keep)
        accepted = kept.keep & (trees.depth == 1) & (rng.random(trees.n_nodes) < 0.6)
        policy.observe(outcome(plan, trees, kept, accepted))


@pytest.mark.parametrize("name", NAMES)
def test_more_requests_than_budget_draft_nothing(name):
    policy = build(name, PolicyConfig(budget=4))
    plan = policy.plan(running(6), 1.0)
    assert plan.draft.depth == 0
    selection = policy.select(plan, CandidateTrees.empty(6))
    assert selection.verify_tokens == 6 and selection.expected_tokens.tolist() == [1.0] * 6


@pytest.mark.parametrize("name", NAMES)
def test_probability_one_and_rows_without_candidates(name):
    trees = trees_from([[(-1, 1.0), (0, 1.0), (1, 1.0)], [], [(-1, 1.0), (-1, 1.0)]])
    for budget in range(3, 9):
        policy, plan = planned(name, running(3, tpot_slo_s=0.01), trees, budget)
        selection = policy.select(plan, trees)
        assert parent_kept(trees, selection.keep)[selection.keep].all()
        assert selection.counts[1] == 0 and selection.keep.sum() <= budget - 3


@pytest.mark.parametrize("name", NAMES)
def test_impossible_candidates_are_never_bought(name):
    """-inf everywhere below the first level: nothing there may be kept, although budget is left."""
    trees = beam_trees(3, 3, 2)
    trees.logprob[trees.depth > 1] = -math.inf
    policy, plan = planned(name, running(3), trees, None)
    assert not policy.select(plan, trees).keep[trees.depth > 1].any()


@pytest.mark.parametrize("name", NAMES)
def test_duplicates_and_nan_are_refused_by_every_policy(name):
    policy = build(name, PolicyConfig())
    with pytest.raises(ValueError, match="duplicate request ids"):
        policy.plan(running(3, rids=("a", "b", "a")), 1.0)
    for field in ("tpot_slo_s", "decode_start_s"):
        with pytest.raises(ValueError, match="must not be NaN"):
            policy.plan(running(2, **{field: np.array([0.1, math.nan])}), 1.0)
    policy.plan(running(2), 1.0)  # and goes on


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(NAMES), st.data())
def test_long_runs_stay_sane_whatever_happens(name, data):
    """Clock jumps, batches that come and go, latencies of any size: plans and selections stay valid."""
    policy = build(name, PolicyConfig(latency=STEPS))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    now = 0.0
    for i in range(data.draw(st.integers(2, 12))):
        now = data.draw(st.sampled_from([now + 0.01, now - 5.0, now + 1e6, now]))
        n = data.draw(st.integers(1, 20))
        batch = replace(running(n, max_depth=4), rids=tuple(f"r{i % 3}-{j}" for j in range(n)))
        plan = policy.plan(batch, now)
        trees = beam_trees(n, plan.draft.depth, plan.draft.width, i)
        selection = policy.select(plan, trees)
        assert np.isfinite(selection.expected_tokens).all()
        accepted = np.zeros(trees.n_nodes, np.bool_)
        first = np.flatnonzero(selection.keep & (trees.depth == 1))
        accepted[first[rng.random(len(first)) < 0.5]] = True
        seconds = data.draw(st.sampled_from([1e-4, 0.02, 0.5, 60.0, math.nan]))
        policy.observe(outcome(plan, trees, selection, accepted, verify_s=seconds, draft_s=seconds))
        if rng.random() < 0.3:
            policy.forget(batch.rids[0])
    assert isinstance(plan, IterationPlan) and plan.draft.depth >= 0


def test_priced_survives_a_latency_that_falls_with_tokens():
    """A broken table must not make it verify what can't be accepted."""
    falling = TabulatedCost((1.0, 8.0, 64.0), (0.05, 0.02, 0.01))
    policy = build_policy("priced", PolicyConfig(latency=LatencyModel(ForwardCost(1e-4), falling)))
    plan = policy.plan(running(2), 1.0)
    trees = beam_trees(2, 3, 2)
    trees.logprob[6:] = -math.inf
    plan = replace(plan, draft=DraftPlan(3, 2), budget=100, cap=None)
    assert not policy.select(plan, trees).keep[6:].any()
