"""Latency fits, acceptance under censoring, calibration."""

from __future__ import annotations

import json
import resource
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sched_factories import beam_trees, outcome, running, trees_from

from adaserve.scheduler.acceptance import (
    AcceptanceRate,
    AcceptanceRates,
    Verified,
    find_tested,
    find_tested_in,
)
from adaserve.scheduler.acceptance_calibration import (
    CEILING,
    Calibrator,
    bin_of,
    claimed_probability,
    path_product,
)
from adaserve.scheduler.averages import MovingAverage
from adaserve.scheduler.costs.fit import fit_latency, fit_roofline
from adaserve.scheduler.costs.latency import (
    ForwardCost,
    LatencyModel,
    ProfileError,
    TabulatedCost,
    default_latency,
    forward_s,
)
from adaserve.scheduler.costs.profile import Profile, load_profile, validate_profile
from adaserve.scheduler.interface import CandidateTrees, Context, DraftPlan, Selection
from adaserve.scheduler.policies import build_policy
from adaserve.scheduler.selection import everything

TOKENS = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512], np.float64)


def points(cost: ForwardCost, noise: float = 0.0, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    grid = [
        (t, Context(n * c, n)) for t in TOKENS for c in (1000.0, 20000.0) for n in {1, max(1, int(t) // 4)}
    ]
    return np.array(
        [[t, *c, forward_s(cost, np.array([t]), c)[0] * np.exp(rng.normal(0, noise))] for t, c in grid]
    )


class TestLatency:
    def test_default_is_the_published_table(self):
        got = default_latency().verify_s(np.array([128.0, 256.0, 512.0, 1024.0]))
        assert got * 1e3 == pytest.approx([54, 77, 124, 217], rel=0.01)

    def test_linear_data_is_fitted_by_the_line(self):
        truth = ForwardCost(0.03, per_token_s=2e-4, per_context_s=1e-7, per_pair_s=2e-8)
        fit = fit_latency(Profile(points(truth), points(truth)))
        assert fit.chosen["verify"] == "linear"
        assert fit.errors["verify"]["linear"].worst < 1e-6
        few = points(truth)[:3]  # too few to leave one out
        assert fit_latency(Profile(few, few)).errors["verify"]["linear"].held_out < 1e-6

    def test_a_roofline_is_recognised_and_beats_the_line(self):
        truth = ForwardCost(0.002, weights_s=0.02, per_token_s=2e-4, per_context_s=1e-7, sharpness=4)
        data = points(truth, noise=0.01)
        fit = fit_latency(Profile(data, data))
        errors = fit.errors["verify"]
        assert errors["roofline"].mean < 0.02 < errors["linear"].mean
        assert fit_roofline(data).sharpness > 1

    def test_a_host_that_was_very_busy_while_it_was_measured_can_be_fitted(self):
        sizes, rng = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64), np.random.default_rng(0)
        for _ in range(100):
            data = np.array(
                [
                    (n, c * max(1, n // 4), max(1, n // 4), rng.lognormal(-6, 1.5))
                    for c in (128, 512)
                    for n in sizes
                ]
            )
            some = data[: rng.integers(1, len(data) + 1)]
            cost = fit_roofline(some)
            assert np.isfinite(forward_s(cost, some[:, 0], Context(256.0))).all()
            assert cost.fixed_s <= some[:, 3].max()

    def test_steps_are_kept_by_the_table(self):
        steps = np.array([[t, 0.0, 1, 0.01 * np.ceil(t / 16)] for t in range(1, 65)])
        fit = fit_latency(Profile(steps, steps))
        assert fit.chosen["verify"] == "table"
        assert fit.model.verify_s(17.0) == pytest.approx(0.02)

    @given(st.floats(1, 8), st.floats(0, 1e-3), st.floats(0, 0.05))
    def test_cost_never_falls_with_tokens(self, sharpness, per_token, weights):
        cost = ForwardCost(0.001, weights, per_token, sharpness=sharpness)
        assert (np.diff(cost.alone(TOKENS)) >= -1e-15).all()

    def test_models_and_profiles_survive_a_file(self, tmp_path):
        table = TabulatedCost((1.0, 8.0), (0.01, 0.02), 1e-7, 1e-8)
        model = LatencyModel(table, ForwardCost(0.1, 0.2, 0.3, 0.0, 0.0, 2.0), 0.001, "x")
        assert LatencyModel.from_json(json.loads(json.dumps(model.to_json()))) == model
        profile = Profile(points(ForwardCost(0.1)), points(ForwardCost(0.2)), 0.001, {"device": "d"})
        profile.save(tmp_path / "p.json")
        back = load_profile(tmp_path / "p.json")
        assert np.array_equal(back.verify, profile.verify) and back.meta["device"] == "d"

    def test_a_profile_that_finds_no_room_leaves_the_earlier_one(self, tmp_path):
        """It took minutes to measure, and servers that start meanwhile read it."""
        path = tmp_path / "p.json"
        Profile(points(ForwardCost(0.1)), points(ForwardCost(0.2))).save(path)
        earlier, room = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(earlier) // 2, room[1]))  # as on a full disk
        try:
            with pytest.raises(OSError):
                Profile(points(ForwardCost(0.3)), points(ForwardCost(0.4))).save(path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, room)
        assert path.read_bytes() == earlier

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"draft_points": []}, "non-empty list 'draft_points'"),
            ({"verify_points": [{"rows": 1, "seconds": 1}]}, "needs 'tokens'"),
            ({"verify_points": [{"tokens": 1, "seconds": -1}]}, "seconds finite and > 0"),
            ({"schema_version": 9}, "schema 9"),
            ({"overhead_s": -1}, "overhead_s"),
        ],
    )
    def test_bad_profiles_say_what_to_do(self, change, message):
        good = {"draft_points": [{"rows": 1, "seconds": 1}], "verify_points": [{"tokens": 1, "seconds": 1}]}
        with pytest.raises(ProfileError, match=message):
            validate_profile({**good, **change})

    def test_knee_doubles_the_cost_of_a_few_tokens(self):
        model = LatencyModel(ForwardCost(0.001), ForwardCost(0.03, per_token_s=3e-4))
        assert model.knee_tokens(2.0) == pytest.approx(109, abs=2)

    @pytest.mark.parametrize("one_ms", [5.0, 6.5, 8.6])
    def test_a_fast_single_token_does_not_move_the_knee(self, one_ms):
        """As on a host where two tokens took a third longer than one, and twenty hardly longer than two. By
        the time of one, B was between 3 and 9, and hardly anything was drafted."""
        sizes, ms = (1.0, 2.0, 8.0, 20.0, 24.0, 32.0), np.array([one_ms, 8.6, 9.6, 10.3, 11.7, 15.9])
        model = LatencyModel(ForwardCost(5e-4), TabulatedCost(sizes, tuple((1e-3 * ms).tolist())))
        assert model.knee_tokens(1.5) == 27


def test_a_moving_average_starts_where_its_stream_does_and_forgets():
    cold, warm = MovingAverage(0.1), MovingAverage(0.1, start=0.0)
    for average in (cold, warm):
        average.add(8.0)
    assert cold.value == 8.0 and warm.value == pytest.approx(0.8)
    for _ in range(200):
        cold.add(2.0)
    assert cold.value == pytest.approx(2.0)


def one_chain_outcome(accepted_levels: int, kept: int = 4):
    """A chain of ``kept`` nodes of which the first ``accepted_levels`` are accepted."""
    policy = build_policy("chain-4")
    plan = policy.plan(running(1), 1.0)
    trees = trees_from([[(i - 1, 0.8) for i in range(kept)]])
    selection = policy.select(plan, trees)
    return outcome(plan, trees, selection, np.arange(kept) < accepted_levels)


class TestAcceptance:
    @pytest.mark.parametrize(("accepted", "tried"), [(0, 1), (2, 3), (4, 4)])
    def test_proposals_after_a_rejection_were_never_tested(self, accepted, tried):
        out = one_chain_outcome(accepted)
        tests = find_tested(out)
        assert len(tests.node) == tried
        assert (tests.tried[0], tests.passed[0]) == (tried, accepted)

    def test_iterations_learned_from_together_tell_what_each_tells(self):
        """Nodes, rows and depths of trees of different shapes end up where they belong."""
        policy, rng = build_policy("chain-4"), np.random.default_rng(1)
        shapes, outcomes = ((3, 2), (1, 1), (4, 3), (2, 1)), []
        for d, w in shapes:
            trees = beam_trees(3, d, w, seed=d)
            plan = policy.plan(running(3), 1.0)
            selection = policy.select(plan, trees)
            accepted = selection.keep & (rng.random(trees.n_nodes) < 0.5)
            outcomes.append(outcome(plan, trees, selection, accepted))
        together, alone = find_tested_in(Verified.of(outcomes)), [find_tested(o) for o in outcomes]
        offset = np.cumsum([0, *(o.trees.n_nodes for o in outcomes)])
        assert together.node.tolist() == [i + k for t, k in zip(alone, offset, strict=False) for i in t.node]
        assert together.row.tolist() == [r + 3 * i for i, t in enumerate(alone) for r in t.row]
        for name in ("accepted", "tried", "passed"):
            assert getattr(together, name).tolist() == [x for t in alone for x in getattr(t, name)]

    def test_rates_find_the_truth_where_accepted_over_proposed_is_biased(self):
        rng, rate = np.random.default_rng(0), AcceptanceRate()
        naive = [0, 0]
        for _ in range(3000):
            passed = int(np.cumprod(rng.random(4) < 0.6).sum())
            tests = find_tested(one_chain_outcome(passed))
            rate.observe(tests.tried, tests.passed)
            naive = [naive[0] + passed, naive[1] + 4]
        assert rate.value == pytest.approx(0.6, abs=0.08)
        assert naive[0] / naive[1] < 0.4

    def test_requests_are_shrunk_to_their_class_and_forgotten(self):
        rates = AcceptanceRates()
        for _ in range(50):
            rates.observe(["good", "bad"], ["x", "y"], np.array([4, 4]), np.array([4, 1]))
        good, bad, new = rates.of_rows(["good", "bad", "new"], ["x", "y", "x"])
        assert good > 0.9 and bad < 0.4 and 0.5 < new <= good
        rates.forget("good")
        assert rates.of_rows(["good"], ["x"])[0] == pytest.approx(new)
        for _ in range(300):
            rates.observe(["bad"], ["y"], np.array([4]), np.array([1]))
        assert rates.of_rows(["good"], ["x"])[0] == pytest.approx(new, abs=0.1), "it is not tested meanwhile"


class TestCalibration:
    def test_path_product_equals_the_loop(self):
        trees = beam_trees(5, 8, 3, seed=4)
        p = np.random.default_rng(0).random(trees.n_nodes)
        parent = trees.above
        want = p.copy()
        for i in range(len(p)):
            if parent[i] < len(p):
                want[i] *= want[parent[i]]
        assert path_product(p, parent) == pytest.approx(want)

    def test_step_probability_inverts_the_path(self):
        trees = trees_from([[(-1, 0.5), (0, 0.25), (1, 1.0)]])
        assert claimed_probability(trees) == pytest.approx([0.5, 0.25, 1.0])

    def test_an_overconfident_draft_is_corrected(self):
        rng, calibrator = np.random.default_rng(0), Calibrator()
        rows = [[(-1, 0.9), (-1, 0.05)] for _ in range(20)]
        trees, rids = trees_from(rows), tuple(f"r{i}" for i in range(20))
        for _ in range(60):
            hit = rng.random(40) < np.tile([0.6, 0.1], 20)
            hit[1::2] &= ~hit[::2]
            calibrator.observe(np.exp(trees.logprob), np.repeat(np.arange(20), 2), hit, rids, ("chat",) * 20)
        f = calibrator.path_values(trees, tuple(f"new{i}" for i in range(20)), ("chat",) * 20)
        assert f[0] == pytest.approx(0.6, abs=0.05)
        (low, high) = calibrator.reliability()["chat"]
        assert high[0] == pytest.approx(0.9) and high[1] == pytest.approx(0.6, abs=0.05) and high[2] > 100
        assert low[0] == pytest.approx(0.05)

    def test_a_request_that_is_no_longer_tested_gets_another_chance(self):
        """Of what the draft claims to be sure of, nothing is accepted for a while. After that it is not worth
        its verification."""
        calibrator, rids = Calibrator(), ("hard", "easy")
        for _ in range(20):
            hit = np.array([False, True])
            calibrator.observe(np.full(2, 0.85), np.arange(2), hit, rids, ("chat",) * 2)
        fallen = calibrator.request_factors(rids)[0]
        for _ in range(300):
            calibrator.observe(np.full(1, 0.85), np.array([1]), np.array([True]), rids, ("chat",) * 2)
        assert fallen < 0.6 and calibrator.request_factors(rids)[0] == pytest.approx(1.0, abs=0.01)

    def test_requests_get_another_chance_where_nothing_is_drafted_any_more(self):
        """Only rare trials test them then, which alone would take thousands of iterations to tell."""
        policy, batch, trees = build_policy("priced"), running(32), beam_trees(32, 1, 1)
        plan = replace(policy.plan(batch, 1.0), draft=DraftPlan(1))
        selected, easy = everything(trees, None), np.arange(32) % 2 == 0
        for _ in range(40):
            policy.observe(outcome(plan, trees, selected, easy))
        fallen = policy.calibrator.request_factors(batch.rids)
        for _ in range(200):
            none = CandidateTrees.empty(32)
            policy.observe(outcome(plan, none, Selection.nothing(32), np.zeros(0, np.bool_)))
        policy.observe(outcome(plan, trees, selected, easy))
        assert fallen.min() < 0.7
        assert policy.calibrator.request_factors(batch.rids) == pytest.approx(1.0, abs=0.1)

    def test_a_rare_class_is_not_forgotten_beside_a_busy_one(self):
        """500 requests of one class with two tests each, and one of another; 40% are accepted of both."""
        calibrator, rids = Calibrator(), tuple(f"r{i}" for i in range(501))
        classes, row = ("busy",) * 500 + ("rare",), np.arange(501).repeat(2)
        for i in range(300):
            hit = (np.arange(1002) + 2 * i) % 5 < 2
            calibrator.observe(np.full(1002, 0.8), row, hit, rids, classes)
        f = calibrator.path_values(trees_from([[(-1, 0.8)]] * 2), ("new", "newer"), ("busy", "rare"))
        assert f == pytest.approx(0.4, abs=0.06)

    def test_a_class_forgets_half_in_4000_tests(self):
        calibrator, rids = Calibrator(), tuple(f"r{i}" for i in range(1000))
        for i in range(16):  # 8,000 tests are in vain, and the next 8,000 are not
            calibrator.observe(
                np.full(1000, 0.8), np.arange(1000), np.full(1000, i >= 8), rids, ("chat",) * 1000
            )
        assert calibrator.factors()[0, bin_of(np.array([0.8]))] == pytest.approx((1 / 1.25) / 0.8, abs=0.01)

    def test_values_are_products_along_the_path(self):
        """Each of what its row's class and request made of the claim."""
        calibrator, trees, rids, classes = Calibrator(), beam_trees(2, 3, 2), ("a", "b"), ("chat", "coding")
        q = claimed_probability(trees)
        calibrator.observe(q, trees.row, np.arange(12) % 3 > 0, rids, classes)
        p = np.minimum(calibrator.batch_factors(rids, classes)[trees.row, bin_of(q)] * q, CEILING)
        assert calibrator.path_values(trees, rids, classes) == pytest.approx(path_product(p, trees.above))
        swapped = calibrator.batch_factors(rids[::-1], classes[::-1])
        assert (swapped == calibrator.batch_factors(rids, classes)[::-1]).all(), "kept for this batch only"

    def test_values_never_rise_along_a_path_and_nan_is_zero(self):
        trees = trees_from([[(-1, 1.0), (0, 1.0), (1, 0.5)]])
        f = Calibrator().path_values(trees, ("r",), ("chat",))
        assert (np.diff(f) < 0).all() and f[0] < 1
        trees.logprob[1:] = np.nan
        assert Calibrator().path_values(trees, ("r",), ("chat",))[1:].tolist() == [0.0, 0.0]
