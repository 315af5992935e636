"""Every policy: within budget, always a tree, defined results at the edges; what each one adds."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sched_factories import beam_trees, outcome, running, trees_from

from adaserve.scheduler.acceptance import AcceptanceRate, expected_accept_length
from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.costs.latency import ForwardCost, LatencyModel
from adaserve.scheduler.interface import CandidateTrees, DraftPlan, IterationPlan
from adaserve.scheduler.node_pricing import price_nodes
from adaserve.scheduler.policies import build_policy, policy_names
from adaserve.scheduler.policies.paper import eurosys_shape, v1_shape
from adaserve.scheduler.policies.priced import PricedPolicy
from adaserve.scheduler.policies.turbospec import TurboSpecPolicy
from adaserve.scheduler.selection import parent_kept, path_probability
from adaserve.scheduler.simulator.trees import SyntheticChildren, TreeSampler

NAMES = [n.replace("-K", "-3") for n in policy_names()]


def drafted(plan: IterationPlan, seed: int = 0) -> CandidateTrees:
    n = len(plan.running)
    if plan.draft.depth == 0:
        return CandidateTrees.empty(n)
    sampler = TreeSampler(SyntheticChildren(), np.random.default_rng(seed))
    return sampler.draft(plan.draft, np.full(n, 0.7), np.zeros(n), lambda step, frontier: True).trees


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [1, 7, 64])
@pytest.mark.parametrize("budget", [None, 3, 40, 4000])
def test_plans_and_selections_are_valid(name, n, budget):
    policy = build_policy(name, PolicyConfig(budget=budget))
    for i in range(3):
        batch = running(n, max_depth=np.arange(n) % 4, remaining_tokens=1 + np.arange(n) % 5)
        plan = policy.plan(batch, 1.0 + i)
        assert plan.iteration == i
        if plan.budget <= n or (budget is not None and budget <= n):
            assert plan.draft.depth == 0
        trees = drafted(plan, i)
        selection = policy.select(plan, trees)
        assert selection.verify_tokens <= max(n, plan.budget, n if budget is None else budget)
        assert parent_kept(trees, selection.keep)[selection.keep].all()
        deepest = np.repeat(np.minimum(batch.max_depth, batch.remaining_tokens - 1), np.diff(trees.row_start))
        assert (trees.depth[selection.keep] <= deepest[selection.keep]).all()
        policy.observe(outcome(plan, trees, selection, np.zeros(trees.n_nodes, np.bool_)))
    policy.forget("r0")
    policy.forget("never seen")


def test_a_short_phase_of_faster_single_tokens_does_not_move_the_budget(monkeypatch):
    """The time of one token is learned when a request is alone. Two thirds of it, for some minutes, and the
    published rules drafted next to nothing."""
    policy = build_policy("adaserve", PolicyConfig(knee=1.5))
    batch, known = running(7), {"knee": 14}
    monkeypatch.setattr(policy.costs, "knee_tokens", lambda factor: known["knee"])

    def budget_after(phases: int) -> int:
        for _ in range(64 * phases):
            plan = policy.plan(batch, 1.0)
        return plan.budget

    assert budget_after(100) == 14
    known["knee"] = 9
    assert budget_after(60) == 14
    assert budget_after(200) == 9  # the host has changed


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_learned_of_a_selection_that_is_dropped(name):
    """Under overlap: a policy that goes through one before each selection does what another one does."""
    latency = LatencyModel(ForwardCost(1e-3), ForwardCost(7e-3, per_token_s=3e-5, per_context_s=1e-8))
    plain, prepared = (build_policy(name, PolicyConfig(latency=latency, d_max=5)) for _ in range(2))
    like, kept, pending = CandidateTrees.empty(8), 0, []
    for i in range(80):
        caps = 16 if i % 3 else [0, 1, 2, 3, 16, 16, 16, 16]
        batch, told = running(8, max_depth=caps, decoded_tokens=10 + i), list(pending)
        plan, same = (policy.plan(batch, 1.0 + 0.02 * i) for policy in (plain, prepared))
        assert (plan.draft.depth, plan.draft.width, plan.budget) == (
            same.draft.depth,
            same.draft.width,
            same.budget,
        )
        trees = drafted(plan, i)
        for policy, last in zip((plain, prepared), told, strict=False):
            policy.observe(last)
        prepared.prepare(same, like)
        selection, again = plain.select(plan, trees), prepared.select(same, trees)
        assert selection.keep.tolist() == again.keep.tolist()
        times = {"draft_s": 1e-3 * (1 + i % 3), "verify_s": 7e-3 * (1 + i % 2)}
        good = selection.keep & (trees.depth <= i % 4)
        pending = [outcome(p, trees, s, good, **times) for p, s in ((plan, selection), (same, again))]
        like, kept = trees, kept + selection.keep.sum()
    assert kept or name == "none"
    if isinstance(plain, PricedPolicy) and isinstance(prepared, PricedPolicy):
        rates = [policy._regime(plan.running).rate.value for policy in (plain, prepared)]
        assert rates[0] == rates[1] > 0, "what a second is worth"


@pytest.mark.parametrize("name", NAMES)
def test_strange_slos_and_clocks_give_a_defined_result(name):
    policy = build_policy(name)
    slos = np.array([0.0, math.inf, 1e-9, 0.05])
    batch = running(4, tpot_slo_s=slos, decode_start_s=np.array([0.0, 0.0, 5.0, 1e9]))
    for now in (0.0, 100.0, 1.0, 1e6):  # jumps ahead and back
        plan = policy.plan(batch, now)
        assert not np.isnan(plan.need).any()
        assert plan.need[0] == math.inf and plan.need[1] <= 0
        assert plan.weight is None or (np.isfinite(plan.weight).all() and (plan.weight > 0).all())
        trees = drafted(plan)
        selection = policy.select(plan, trees)
        assert np.isfinite(selection.expected_tokens).all()


def test_bad_batches_are_refused_with_the_reason():
    policy = build_policy("adaserve")
    with pytest.raises(ValueError, match=r"duplicate request ids.*'r0'"):
        policy.plan(running(2, rids=("r0", "r0")), 1.0)
    with pytest.raises(ValueError, match="must not be NaN"):
        policy.plan(running(1, tpot_slo_s=math.nan), 1.0)
    with pytest.raises(ValueError, match="at least one"):
        policy.plan(running(0), 1.0)
    with pytest.raises(ValueError, match=r"unknown policy 'best'.*priced.*chain-K"):
        build_policy("best")


@pytest.mark.parametrize(
    "wrong",
    [{"budget": 0}, {"w_max": 0}, {"knee": 0.5}, {"knee": math.nan}, {"probe_every": 0},
     {"turbo_probe_every": 0}, {"turbo_reset_steps": 0}, {"turbo_k_max": -1},
     {"c1": -4}],
)  # fmt: skip
def test_bad_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PolicyConfig(**wrong)


def test_need_follows_the_paper():
    """A(r) = (l + t_spec) / t_TPOT - o; 2 s at 50 ms are 40 tokens, 30 are out."""
    plan = build_policy("none").plan(running(1, decoded_tokens=30, decode_start_s=1.0), 3.0)
    assert plan.need[0] == pytest.approx((2.0 + plan.t_spec_s) / 0.05 - 30)


def test_nothing_is_drafted_for_equal_shares_of_a_root():
    """15 tokens for ten requests are one for each, so no candidate could be verified."""
    depths = [build_policy("equal-greedy", PolicyConfig(budget=b)).plan(running(10), 1.0).draft.depth
              for b in (15, 19, 20, 40)]  # fmt: skip
    assert depths[:2] == [0, 0] and min(depths[2:]) > 0


@pytest.mark.parametrize("name", ["adaserve", "adaserve-v1", "priced"])
def test_wide_drafts_are_for_few_requests(name):
    """A GPU has graphs of them for 24 beams in all; three beams are for everybody."""
    latency = LatencyModel(ForwardCost(1.2e-3, per_token_s=2e-6), ForwardCost(4.7e-3, per_token_s=4e-6))
    policy = build_policy(name, PolicyConfig(latency=latency, budget=512, w_max=8, most_beams=24))
    widths = [policy.plan(running(n), 1.0).draft.width for n in (1, 3, 4, 5, 8, 64)]
    assert all(w <= most for w, most in zip(widths, (8, 8, 6, 4, 3, 3), strict=True))
    assert widths[0] > 3, "side beams of a lone request cost next to nothing"
    assert [PolicyConfig(w_max=2, most_beams=24).widest(n) for n in (1, 64)] == [2, 2]
    assert [PolicyConfig(w_max=8).widest(n) for n in (1, 64)] == [8, 8]


def test_shape_rules_of_both_papers():
    def artifact(n: int) -> tuple[int, int]:  # Llama-70B: D 4..8, W 3, B1 512, B2 96
        return eurosys_shape(n, B1=512, B2=96, c1=0, c2=0, d=(4, 8), w_max=3)

    assert [artifact(n) for n in (1, 32, 80, 200)] == [(8, 3), (8, 3), (5, 1), (4, 1)]
    assert [v1_shape(n, 156, 8, 4) for n in (1, 20, 40, 200)] == [(8, 4), (8, 4), (4, 3), (1, 1)]


def test_fixed_tree_has_the_shape_of_specinfer():
    plan = build_policy("fixed-tree").plan(running(2), 1.0)
    assert plan.draft.branching == (1, 1, 3, 1, 1, 1, 1, 1)
    assert np.diff(drafted(plan).row_start).tolist() == [20, 20]


class TestTurboSpec:
    def test_the_accept_length_includes_the_bonus(self):
        assert expected_accept_length(0.5, 2) == pytest.approx(1.75)
        assert expected_accept_length(1.0, 3) == 4
        assert expected_accept_length(0.0, 3) == 1

    @given(st.floats(0.0, 1.0), st.integers(0, 12))
    def test_the_accept_length_is_the_sum_of_powers(self, acc, k):
        assert expected_accept_length(acc, k) == pytest.approx(sum(acc**i for i in range(k + 1)))

    def test_goodput_is_expected_tokens_over_the_time_of_a_step(self, monkeypatch):
        """k draft steps, and a verification of k + 1 tokens per request; one request may go one deep only."""
        latency = LatencyModel(
            ForwardCost(1e-3, per_token_s=1e-4), ForwardCost(2e-2, per_token_s=3e-4, per_context_s=1e-6), 2e-3
        )
        policy = build_policy("turbospec", PolicyConfig(latency=latency, turbo_k_max=3, learn_costs=False))
        assert isinstance(policy, TurboSpecPolicy)
        monkeypatch.setattr(AcceptanceRate, "value", 0.6)
        got = policy.goodput(running(3), np.array([8, 1, 8]))
        want = []
        for k in range(4):
            lengths = [k, min(k, 1), k]
            tokens = sum(0.6**i for length in lengths for i in range(length + 1))
            verify_s = 2e-2 + 3e-4 * (3 + sum(lengths)) + 1e-6 * 3 * 200
            want.append(tokens / (k * (1e-3 + 3e-4) + verify_s + 2e-3))
        assert got == pytest.approx(want)

    def test_chains_that_cannot_be_drafted_promise_nothing(self):
        """A start that eight tokens pay for and two do not."""
        latency = LatencyModel(ForwardCost(1e-4), ForwardCost(0.01), draft_first=ForwardCost(0.012))
        plans = [
            build_policy("turbospec", PolicyConfig(latency=latency, d_max=d)).plan(running(1), 0.0)
            for d in (8, 2)
        ]
        assert [plan.draft.depth for plan in plans] == [8, 0]

    def costly(self) -> PolicyConfig:
        """Compute-bound target and dear draft: speculation never pays."""
        return PolicyConfig(latency=LatencyModel(ForwardCost(0.05), ForwardCost(0.001, per_token_s=0.01)))

    def test_off_when_it_does_not_pay_and_probes_to_come_back(self):
        policy = build_policy("turbospec", self.costly())
        depths = [policy.plan(running(4), float(i)).draft.depth for i in range(64)]
        assert depths.count(1) == 2 and depths.count(0) == 62

    def test_a_probe_that_the_next_iteration_does_not_draft_is_asked_for_again(self):
        """As on a GPU while nothing is drafted: the next iteration is queued before its plan is known."""
        policy, depths, then = build_policy("turbospec", self.costly()), [], DraftPlan(0)
        for _ in range(200):
            plan = policy.plan(running(8, underway=None if then.depth else then), 1.0)
            assert plan.then is not None
            then = plan.then
            depths.append(plan.draft.depth)
        probes = np.flatnonzero(depths)
        assert len(probes) >= 3 and (np.diff(probes) >= self.costly().turbo_probe_every).all()

    def test_rows_that_may_not_speculate_set_no_threshold(self):
        config = replace(self.costly(), turbo_skip_prefill=True)
        policy = build_policy("turbospec", config)
        assert isinstance(policy, TurboSpecPolicy)
        policy.plan(running(1, remaining_tokens=1), 1.0)
        assert policy.wants_draft_prefill(2)

    def test_draft_prefill_stops_above_the_threshold_and_resets(self):
        policy = build_policy("turbospec", replace(self.costly(), turbo_skip_prefill=True))
        assert isinstance(policy, TurboSpecPolicy)
        assert policy.wants_draft_prefill(50)
        policy.plan(running(4), 0.0)  # k* = 0 at n = 4 sets the threshold
        assert policy.wants_draft_prefill(4)
        answers = [policy.wants_draft_prefill(5) for _ in range(33)]
        assert answers == [False] * 32 + [True]

    def test_longer_chains_for_better_drafts(self):
        depths = []
        for hit in (0.1, 0.95):
            policy = build_policy("turbospec")
            for i in range(120):
                plan = policy.plan(running(4), float(i))
                trees = drafted(plan)
                selection = policy.select(plan, trees)
                rng = np.random.default_rng(i)
                hits = rng.random((4, plan.draft.depth)) < hit
                accepted = np.logical_and.accumulate(hits, axis=1).ravel()
                policy.observe(outcome(plan, trees, selection, accepted))
            depths.append(policy.plan(running(4), 999.0).draft.depth)
        assert depths[0] < depths[1]


def below_the_best(n: int, f: np.ndarray) -> CandidateTrees:
    """n times the path probabilities ``f`` [depth, width], each level below the best node of the last one."""
    depth, width = f.shape
    parent = np.repeat((np.arange(depth) - 1) * width, width)
    return CandidateTrees(
        np.arange(n + 1) * f.size,
        np.zeros(n * f.size, np.int64),
        np.tile(np.maximum(parent, -1), n),
        np.tile(np.repeat(np.arange(1, depth + 1), width), n),
        np.tile(np.log(f).ravel(), n),
    )


class TestPriced:
    def test_cheap_tokens_are_bought_and_dear_ones_are_not(self):
        kept = []
        for per_token_s in (1e-5, 2e-2):
            latency = LatencyModel(ForwardCost(1e-4), ForwardCost(0.03, per_token_s=per_token_s))
            policy = build_policy("priced", PolicyConfig(latency=latency))
            plan = policy.plan(running(8), 1.0)
            kept.append(policy.select(plan, drafted(plan)).keep.sum() if plan.draft.depth else 0)
        assert kept[0] > 8 * 5 and kept[1] < 8

    def test_selection_is_the_best_prefix(self):
        """No other number of nodes has a better expected value per second."""
        policy = build_policy("priced", PolicyConfig(calibrate=False, learn_costs=False))
        plan = policy.plan(running(6), 1.0)
        trees = drafted(plan)
        selection = policy.select(plan, trees)
        assert plan.weight is not None
        value = np.sort(np.exp(trees.logprob) * np.repeat(plan.weight, np.diff(trees.row_start)))[::-1]
        latency, c = policy.config.latency, policy.context(plan.running)
        draft = latency.draft_s(6, plan.draft.depth, plan.draft.width, c)
        total = plan.weight.sum() + np.concatenate([[0.0], np.cumsum(value)])
        rate = total / (draft + latency.verify_s(6.0 + np.arange(len(total)), c))
        assert selection.keep.sum() == int(np.argmax(rate))

    @pytest.mark.parametrize("most", [0, 4, 9, 14, 18])
    @pytest.mark.parametrize("steps_s", [(0.0, 0.1, 0.3), (0.0, 0.01), (-0.02, 0.01)])
    def test_prices_by_hand(self, most, steps_s):
        """Three requests of different weights, costs in steps, and nodes that are worth nothing."""
        rng = np.random.default_rng(most)
        n, trees, weight = 3, beam_trees(3, 3, 2, most), rng.uniform(0.5, 4.0, 3)
        m, f = trees.n_nodes, np.where(trees.depth < 3, path_probability(trees), 0.0)
        seconds = 1.0 + np.cumsum(rng.choice(steps_s, most + 1))
        bought = price_nodes(trees, f, weight, seconds)

        value = f * weight[trees.row]
        order = np.argsort(-value, kind="stable")
        rates = (weight.sum() + np.append(0.0, value[order][:most].cumsum())) / seconds
        best = int(rates[: 1 + np.count_nonzero(value)].argmax())
        keep = np.isin(np.arange(m), order[:best])
        assert bought.selection.keep.tolist() == keep.tolist()
        assert bought.selection.counts.tolist() == np.bincount(trees.row[keep], minlength=n).tolist()
        expected = 1.0 + np.bincount(trees.row, f * keep, n)
        assert bought.selection.expected_tokens == pytest.approx(expected)
        low, high = max(0, best - n), min(most, best + n)
        price = rates[best] * (seconds[high] - seconds[low]) / max(1, high - low)
        if 0 < best == most < m:
            price = max(price, value[order[best - 1]])
        assert (bought.rate, bought.price) == pytest.approx((rates[best], price))

    def test_of_equals_the_first_are_bought(self):
        """A chain of certain tokens: a child is worth as much as its parent, and must not come before it."""
        trees = trees_from([[(i - 1, 1.0) for i in range(5)]])
        for most in range(6):
            bought = price_nodes(trees, np.ones(5), np.ones(1), 1.0 + np.arange(most + 1) * 1e-6)
            assert bought.selection.keep.tolist() == [i < most for i in range(5)]

    def test_a_riding_prefill_does_not_buy_more_speculation(self):
        policy = build_policy("priced", PolicyConfig(calibrate=False, learn_costs=False))
        plan = policy.plan(running(6), 1.0)
        trees = drafted(plan)
        alone = policy.select(plan, trees).keep.sum()
        other = build_policy("priced", PolicyConfig(calibrate=False, learn_costs=False))
        with_chunk = other.plan(running(6, prefill_tokens=512), 1.0)
        assert other.select(with_chunk, trees).keep.sum() == alone

    def test_beams_that_bring_nothing_are_given_up(self):
        """Although drafting stops before the deepest levels, where nothing was ever learned of them."""
        latency = LatencyModel(ForwardCost(4e-4, per_token_s=2.5e-5), ForwardCost(0.01, per_token_s=1e-3))
        policy = build_policy("priced", PolicyConfig(latency=latency, early_stop=True, learn_costs=False))
        widths = []
        for i in range(160):
            plan = policy.plan(running(8), 1.0 + i)
            depth, width = min(2, plan.draft.depth), plan.draft.width
            f = np.full((depth, width), 1e-3)
            f[:, 0] = 0.9 ** np.arange(1, depth + 1)
            trees = below_the_best(8, f)
            selection = policy.select(plan, trees)
            policy.observe(outcome(plan, trees, selection, selection.keep))
            widths.append(width)
        assert max(widths[:16]) > 1, "tried at first"
        assert widths[-32:].count(1) >= 28, "and only probed in the end"

    def test_what_a_level_and_a_beam_are_worth_is_learned_where_they_are(self):
        latency = LatencyModel(ForwardCost(1e-4), ForwardCost(0.03))  # verify tokens cost nothing
        config = PolicyConfig(latency=latency, surplus_rate=0.5, calibrate=False, learn_costs=False)
        policy, f = build_policy("priced", config), np.array([[0.9, 0.3, 0.1], [0.6, 0.2, 0.05]])
        assert isinstance(policy, PricedPolicy)
        for _ in range(30):
            plan = replace(policy.plan(running(16, tpot_slo_s=math.inf), 1.0), draft=DraftPlan(2, 3))
            trees = below_the_best(16, f)
            selection = policy.select(plan, trees)
            policy.observe(outcome(plan, trees, selection, selection.keep))
        (regime,) = policy._regimes._known.values()
        assert plan.weight is not None and regime.surplus[:2] == pytest.approx(f * plan.weight[0], abs=0.01)

    def test_everybody_at_risk_makes_a_draft_worth_no_more(self):
        """What levels and seconds were worth was learned with other weights, and only who comes first among
        the requests depends on these."""
        latency = LatencyModel(ForwardCost(3e-3), ForwardCost(0.03, per_token_s=1e-4))
        config = PolicyConfig(latency=latency, calibrate=False, learn_costs=False)
        policy, f = build_policy("priced", config), 0.7 ** np.arange(1, config.d_max + 1)[:, None]

        def next_depth(slo_s: float) -> int:
            plan = policy.plan(running(16, tpot_slo_s=slo_s), 1.0)
            trees = below_the_best(16, f[: plan.draft.depth])
            selection = policy.select(plan, trees)
            policy.observe(outcome(plan, trees, selection, selection.keep))
            assert plan.weight is not None
            return plan.draft.depth

        safe = [next_depth(math.inf) for _ in range(150)]
        at_risk = [next_depth(0.04) for _ in range(8)]
        assert 0 < safe[-10] < config.d_max and at_risk == [safe[-10]] * 8

    def test_a_request_without_candidates_says_nothing_of_its_pace(self):
        """As one that joins a batch whose draft was queued before."""
        policy = build_policy("priced")
        assert isinstance(policy, PricedPolicy)
        plan = policy.plan(running(16), 1.0)
        trees = trees_from([[(-1, 0.9), (0, 0.8)] if i else [] for i in range(16)])
        selection = policy.select(plan, trees)
        policy.observe(outcome(plan, trees, selection, selection.keep))
        known = policy._potential.of(plan.running.rids)[:, 0]
        assert known[0] == 0.0 and (known[1:] > 1.5).all()

    def played(
        self, policy: PricedPolicy, n: int, share: float, iterations: int, early: bool = False
    ) -> list[int]:
        """Depths of iterations in which ``share`` of the requests get through each level of a chain.

        ``early``: as on a GPU. A draft is queued before its iteration is planned, where the draft model has
        read what came before; where nothing is to be drafted, the next iteration is queued."""
        depths: list[int] = []
        then: DraftPlan | None = None
        for _ in range(iterations):
            drafted, waits = then is not None and then.depth, depths and depths[-1]
            underway = then if early and then is not None and (not drafted or waits) else None
            plan = policy.plan(running(n, tpot_slo_s=math.inf, underway=underway), 1.0)
            then = plan.then
            f = np.zeros((plan.draft.depth, plan.draft.width)) + 1e-3
            f[:, 0] = share ** np.arange(1, plan.draft.depth + 1)
            trees = below_the_best(n, f) if plan.draft.depth else CandidateTrees.empty(n)
            selection = policy.select(plan, trees)
            good = selection.keep & (np.random.default_rng(plan.iteration).random(trees.n_nodes) < share)
            policy.observe(outcome(plan, trees, selection, good))
            depths.append(plan.draft.depth)
        return depths

    @pytest.mark.parametrize("n", [1, 8, 32])
    def test_levels_that_pay_are_found_soon(self, n):
        """By what the ones above bring, not by a probe of one more level every 16 iterations. On a GPU the
        first answers were drafted for with three levels where five pay."""
        latency = LatencyModel(ForwardCost(1.7e-3), ForwardCost(7e-3, per_token_s=1e-6))
        config = PolicyConfig(latency=latency, d_max=5, calibrate=False, learn_costs=False)
        policy = build_policy("priced", config)
        assert isinstance(policy, PricedPolicy)
        depths = self.played(policy, n, 0.93, 40)
        assert depths[0] < 5 and depths[24:] == [5] * 16

    def test_a_level_that_pays_again_is_found_by_one_probe(self):
        """After a text that is hard to draft for. A probe tells what all iterations since the last one would
        have told."""
        latency = LatencyModel(ForwardCost(1.7e-3), ForwardCost(7e-3, per_token_s=1e-6))
        config = PolicyConfig(latency=latency, d_max=5, calibrate=False, learn_costs=False)
        policy = build_policy("priced", config)
        assert isinstance(policy, PricedPolicy)
        assert self.played(policy, 8, 0.93, 60)[-1] == 5
        assert max(self.played(policy, 8, 0.4, 100)[-15:]) <= 3
        assert min(self.played(policy, 8, 0.93, 60)[-8:]) >= 4

    @pytest.mark.parametrize("n", [8, 32])
    def test_probes_are_drafted_and_learned_from_where_drafts_are_queued_early(self, n):
        """What a plan wants is then drafted in the iteration after it, or not at all."""
        latency = LatencyModel(ForwardCost(1.7e-3), ForwardCost(7e-3, per_token_s=1e-6))
        config = PolicyConfig(latency=latency, d_max=5, calibrate=False, learn_costs=False)
        policy = build_policy("priced", config)
        assert isinstance(policy, PricedPolicy)
        assert self.played(policy, n, 0.93, 60, early=True)[-1] == 5
        hard = self.played(policy, n, 0.02, 400, early=True)
        assert 0 < np.count_nonzero(hard[-200:]) < 20
        assert min(self.played(policy, n, 0.93, 300, early=True)[-8:]) >= 4

    def test_a_busy_host_still_drafts(self):
        """Verifications take longer as well."""
        latency = LatencyModel(ForwardCost(1e-3), ForwardCost(7e-3, per_token_s=1e-6))
        config = PolicyConfig(latency=latency, d_max=5, calibrate=False, learn_costs=False)
        policy = build_policy("priced", config)
        assert isinstance(policy, PricedPolicy)
        assert min(self.played(policy, 8, 0.9, 60)[-32:]) >= 4
        policy.costs.verify.sizes.slowdown = 4.0
        assert policy.plan(running(8, tpot_slo_s=math.inf), 1.0).draft.depth >= 4

    def test_what_costs_say_is_worked_out_while_a_device_drafts(self, monkeypatch):
        """Under overlap, where an iteration is observed between the next one's plan and its selection."""
        latency = LatencyModel(ForwardCost(1e-3), ForwardCost(7e-3, per_token_s=3e-5, per_context_s=1e-8))
        policy = build_policy("priced", PolicyConfig(latency=latency, d_max=5))
        assert isinstance(policy, PricedPolicy)
        batch, pending = running(8, tpot_slo_s=math.inf), None
        for i in range(40):
            plan = policy.plan(batch, 1.0)
            trees = drafted(plan, i)
            with monkeypatch.context() as patch:
                if pending is not None:
                    policy.observe(pending)
                    policy.prepare(plan, None)
                    most = plan.budget - 8
                    told = policy.seconds(plan, trees, most)
                    assert told.tolist() == policy._seconds(plan, plan.draft.depth, most).tolist()
                    patch.setattr(policy.costs, "verify_curve", None)
                selection = policy.select(plan, trees)
            times = {"draft_s": 1e-3 * (1 + i % 3), "verify_s": 7e-3 * (1 + i % 2)}
            pending = outcome(plan, trees, selection, selection.keep & (trees.depth == 1), **times)
        stopped = replace(plan, draft=DraftPlan(plan.draft.depth + 1))
        monkeypatch.setattr(policy, "_prepared", (stopped, policy.seconds(plan, trees, 0)))
        assert len(policy.seconds(stopped, trees, 5)) == 6, "drafted less than was planned"

    def test_starting_a_draft_has_to_pay_as_well(self):
        """A start that eight levels pay for and two do not."""
        latency = LatencyModel(ForwardCost(1e-4), ForwardCost(0.01), draft_first=ForwardCost(0.022))
        plans = [
            build_policy("priced", PolicyConfig(latency=latency, d_max=d)).plan(running(1), 0.0)
            for d in (8, 2)
        ]
        assert [plan.draft.depth > 0 for plan in plans] == [True, False]

    @pytest.mark.parametrize(("least_gain", "drafts"), [(0.0, True), (50.0, False)])
    def test_little_gain_is_not_worth_a_tree(self, least_gain, drafts):
        """But it is probed now and then, or it could never be learned that drafting pays again."""
        latency = LatencyModel(ForwardCost(4e-4), ForwardCost(0.03, per_token_s=1e-5))
        policy = build_policy("priced", PolicyConfig(latency=latency, least_gain=least_gain))
        depths = []
        for i in range(64):
            plan = policy.plan(running(4), 1.0 + i)
            trees = drafted(plan, i)
            selection = policy.select(plan, trees)
            policy.observe(outcome(plan, trees, selection, selection.keep & (trees.depth == 1)))
            depths.append(plan.draft.depth)
        assert (depths.count(0) == 0) if drafts else (0 < 64 - depths.count(0) <= 4)

    def test_an_iteration_that_drafts_nothing_is_worth_the_weights_of_its_requests(self):
        """In the unit of all others: else drafts look cheaper after it than they are."""
        latency = LatencyModel(ForwardCost(5e-3), ForwardCost(0.03, per_token_s=2e-3))
        config = PolicyConfig(latency=latency, least_gain=50.0, learn_costs=False)
        policy = build_policy("priced", config)
        assert isinstance(policy, PricedPolicy)
        batch, nothing = running(32, tpot_slo_s=0.15), CandidateTrees.empty(32)
        for _ in range(3):
            plan = policy.plan(batch, 1.0)
            assert plan.draft.depth == 0 and plan.weight is not None
            policy.select(plan, nothing)
        (regime,) = policy._regimes._known.values()
        assert regime.rate.value == pytest.approx(plan.weight.sum() / policy.seconds(plan, nothing, 0)[0])

    def test_probes_in_vain_get_rarer_but_never_end(self):
        latency = LatencyModel(ForwardCost(4e-4), ForwardCost(0.03, per_token_s=1e-5))
        policy = build_policy("priced", PolicyConfig(latency=latency, least_gain=50.0, early_stop=True))
        probes = [i for i in range(800) if policy.plan(running(4), 1.0).draft.depth]
        assert probes[0] == 15 and np.diff(probes).tolist() == [32, 32, 64, 128, 128, 128, 128, 128]

    def test_a_probe_in_vain_drafts_for_a_few(self):
        """The draft would have to take in what all of them wrote since the last one."""
        latency = LatencyModel(ForwardCost(5e-3), ForwardCost(0.03, per_token_s=2e-3))
        policy = build_policy("priced", PolicyConfig(latency=latency, least_gain=50.0))
        drafted_for = []
        for i in range(160):
            plan = policy.plan(running(32), 1.0 + i)
            trees = drafted(plan, i)
            assert (np.diff(trees.row_start) > 0).sum() == (plan.drafting_rows if plan.draft.depth else 0)
            selection = policy.select(plan, trees)
            policy.observe(outcome(plan, trees, selection, selection.keep & (trees.depth == 1)))
            drafted_for += [plan.drafting_rows] if plan.draft.depth else []
        assert drafted_for and set(drafted_for) == {8}

    def test_a_probe_verifies_nothing_that_cannot_be_accepted(self):
        """Neither what lies deeper than its request allows nor what the draft calls impossible."""
        latency = LatencyModel(ForwardCost(5e-3), ForwardCost(1e-3, per_token_s=1.0))
        config = PolicyConfig(latency=latency, least_gain=50.0, early_stop=True, learn_costs=False)
        policy = build_policy("priced", config)
        batch, probed = running(4, max_depth=[0, 0, 1, 3]), 0
        for i in range(160):
            plan = policy.plan(batch, 1.0 + i)
            trees = drafted(plan, i)
            trees.logprob[trees.row_start[3] :] = -math.inf
            selection = policy.select(plan, trees)
            policy.observe(outcome(plan, trees, selection, np.zeros(trees.n_nodes, np.bool_)))
            assert (selection.counts[[0, 1, 3]] == 0).all()
            probed += int(selection.counts.sum())
        assert probed

    def test_the_frontier_of_a_few_pays_for_their_steps_alone(self):
        latency = LatencyModel(ForwardCost(1e-4, per_token_s=1e-4), ForwardCost(0.03, per_token_s=1e-4))
        policy = build_policy("priced", PolicyConfig(latency=latency, early_stop=True, learn_costs=False))
        plan = policy.plan(running(32), 1.0)
        few = np.arange(32) % 8 == 0
        frontier = np.where(few[:, None], np.log(0.9), -np.inf)
        some = replace(plan, draft=replace(plan.draft, rows=few))
        assert policy.keep_drafting(some, 1, frontier)
        assert not policy.keep_drafting(plan, 1, frontier)
        frontier[~few] = math.nan
        assert policy.keep_drafting(some, 1, frontier), "others go on"

    def test_rows_that_may_not_speculate_count_for_nothing(self):
        """A step takes 3 ms of 10: it pays if most of the rows have a use for it."""
        latency = LatencyModel(ForwardCost(3e-3), ForwardCost(1e-2, per_token_s=1e-6))
        for on, drafts in ((8, True), (6, True), (1, False)):
            batch = running(8, tpot_slo_s=math.inf, max_depth=np.where(np.arange(8) < on, 16, 0))
            plan = build_policy("priced", PolicyConfig(latency=latency)).plan(batch, 1.0)
            assert (plan.draft.depth > 0) == drafts and plan.drafting_rows == (on if drafts else 8)

    def test_probes_go_on_beside_rows_that_may_not_speculate(self):
        """However little drafts were worth of late."""
        latency = LatencyModel(ForwardCost(1e-3, per_token_s=1e-3), ForwardCost(0.01))
        policy = build_policy("priced", PolicyConfig(latency=latency))
        assert isinstance(policy, PricedPolicy)
        batch = running(4, max_depth=[0, 16, 16, 16])
        policy.plan(batch, 1.0)
        for regime in policy._regimes._known.values():
            regime.surplus[:] = 0.0
        probes = [p.draft.rows for p in (policy.plan(batch, 1.0) for _ in range(32)) if p.draft.depth]
        assert [rows.tolist() for rows in probes] == [[False, True, True, True]]

    def test_one_level_is_drafted_where_no_more_is_allowed(self):
        assert build_policy("priced").plan(running(4, max_depth=1), 1.0).draft.depth == 1

    def test_requests_in_the_balance_weigh_most(self):
        policy = build_policy("priced")
        slo = np.resize([0.03, 1.0], 32)  # tight, safe, tight, ...
        plan = policy.plan(running(32, tpot_slo_s=slo, decoded_tokens=50), 1.0)
        assert plan.weight is not None and plan.weight[::2].min() > 1.5 * plan.weight[1::2].max()
        few = policy.plan(running(2, tpot_slo_s=slo[:2], decoded_tokens=50), 1.0)
        assert few.weight is not None and few.weight[0] > few.weight[1], "two are weighed as well"
        alone = policy.plan(running(1, tpot_slo_s=slo[:1], decoded_tokens=50), 1.0)
        assert alone.weight is not None and alone.weight.tolist() == [1.0]
