"""Costs learned from served iterations: wrong starts, any shape, stalls, hosts that are busy for a while."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.costs.latency import (
    ForwardCost,
    KVReadCost,
    LatencyModel,
    StepCost,
    TabulatedCost,
    forward_s,
)
from adaserve.scheduler.costs.learned import FirstStep, LearnedCosts, LearnedForward, known_sizes
from adaserve.scheduler.costs.learned_table import PATIENCE_S, LearnedCostTable
from adaserve.scheduler.interface import CandidateTrees, Context, DraftPlan, IterationOutcome
from adaserve.scheduler.policies import build_policy
from adaserve.scheduler.simulator.hardware import hardware_latency
from adaserve.scheduler.simulator.replica import ReplicaConfig
from adaserve.scheduler.simulator.run import SimulationConfig, build_replica, simulate
from adaserve.scheduler.simulator.workload import TextModel, make_requests, synthetic_trace
from adaserve.slo.classes import SLOConfig
from tests.scheduler.sched_factories import beam_trees, outcome, running

STEPPED = TabulatedCost(
    (1.0, 2.0, 4.0, 8.0, 10.0, 12.0, 13.0, 16.0, 24.0, 32.0, 64.0),
    (13.8e-3, 14.2e-3, 15e-3, 16.2e-3, 17.8e-3, 18.9e-3, 16.4e-3, 17.5e-3, 22e-3, 26e-3, 44e-3),
    1e-7,
)
"""The embedded target on two cores: 16 tokens cost less than 12."""


class Host:
    """Forwards that take ``cost`` x noise x what ``disturb`` says, and never less than ``cost``."""

    def __init__(self, cost: StepCost, seed: int = 0, stalls: float = 0.0) -> None:
        self.cost, self.stalls, self.rng, self.clock = cost, stalls, np.random.default_rng(seed), 0.0

    def serve(self, table: LearnedCostTable, sizes: list[int], seconds: float, busy: float = 1.0) -> None:
        """Runs of forwards of ``sizes`` for that many seconds, ``busy`` times as slow on average."""
        end = self.clock + seconds
        while self.clock < end:
            size = int(self.rng.choice(sizes))
            for _ in range(int(self.rng.integers(1, 6))):
                took = float(self.cost.alone(np.float64(size)))
                took *= 1.0 + abs(float(self.rng.normal(0, 0.03)))
                if busy > 1:
                    took *= busy * float(self.rng.uniform(0.6, 1.4))
                elif self.rng.random() < self.stalls:
                    took *= float(self.rng.uniform(2, 12))
                self.clock += took
                observe(table, size, took)


def observe(table: LearnedCostTable, size: int, seconds: float) -> None:
    """A forward that read nothing of the KV cache."""
    table.judge(size, seconds, 0.0)
    table.learn(size, seconds)


def worst(table: LearnedCostTable, truth: StepCost, sizes: list[int]) -> float:
    """Largest relative error of the quiet costs."""
    right = truth.alone(np.array(sizes, np.float64))
    return max(abs(table.quiet_s(t) / r - 1) for t, r in zip(sizes, right.tolist(), strict=True))


def scaled(cost: TabulatedCost, times: float) -> TabulatedCost:
    return replace(cost, seconds_at=tuple(times * s for s in cost.seconds_at))


SERVED = [1, 2, 3, 4, 6, 8, 10, 12, 13, 16, 20, 24, 32]


class TestTable:
    @pytest.mark.parametrize("times", [0.1, 0.5, 1.0, 3.0, 9.0])
    def test_a_start_that_is_times_wrong_is_right_after_a_minute(self, times):
        """The profile of another machine, or one measured while the host was busy."""
        table = LearnedCostTable(scaled(STEPPED, times).alone)
        Host(STEPPED).serve(table, SERVED, 60.0)
        assert worst(table, STEPPED, SERVED) < 0.1
        assert worst(table, STEPPED, [5, 14, 28, 48, 64]) < 0.15, "nor served, but between or beside what was"

    def test_a_shape_that_was_measured_wrong_is_mended(self):
        """Each size by another factor, as on a host where something else came and went."""
        rng = np.random.default_rng(3)
        odd = replace(STEPPED, seconds_at=tuple(s * rng.uniform(1.5, 9) for s in STEPPED.seconds_at))
        table = LearnedCostTable(odd.alone)
        Host(STEPPED).serve(table, SERVED, 60.0)
        assert worst(table, STEPPED, SERVED) < 0.1

    def test_costs_may_fall_with_tokens(self):
        flat = TabulatedCost((1.0, 10.0, 32.0), (13.8e-3, 17.9e-3, 17.9e-3))
        table = LearnedCostTable(flat.alone)
        Host(STEPPED).serve(table, SERVED, 30.0)
        assert table.quiet_s(12) > 1.05 * table.quiet_s(13)

    @pytest.mark.parametrize("stalls", [0.05, 0.3, 0.5])
    def test_stalls_teach_nothing(self, stalls):
        table = LearnedCostTable(STEPPED.alone)
        Host(STEPPED, stalls=stalls).serve(table, SERVED, 60.0)
        assert worst(table, STEPPED, SERVED) < 0.1

    def test_a_first_forward_that_stalled_does_not_condemn_a_size(self):
        """It would not be tried again, so nothing could put it right."""
        table = LearnedCostTable(STEPPED.alone)
        observe(table, 16, 1.0)
        for _ in range(16):
            observe(table, 4, 15e-3)
        assert table.quiet_s(16) < 1.2 * 17.5e-3

    def test_a_busy_host_is_noticed_and_its_quiet_costs_are_remembered(self):
        table, host = LearnedCostTable(STEPPED.alone), Host(STEPPED)
        host.serve(table, SERVED, 30.0)
        assert table.slowdown == pytest.approx(1.0, abs=0.1)
        host.serve(table, SERVED, 120.0, busy=8.0)
        assert table.slowdown == pytest.approx(8.0, rel=0.4)
        assert worst(table, STEPPED, SERVED) < 0.1
        host.serve(table, SERVED, 2.0)
        assert table.slowdown == pytest.approx(1.0, abs=0.1)
        assert worst(table, STEPPED, SERVED) < 0.1

    @pytest.mark.parametrize("begin_s", [2.0, 30.0])
    def test_a_busy_start_is_mended_when_it_is_over(self, begin_s):
        """The table was measured on a busy host, which stays busy for a while: nothing quiet was seen."""
        rng = np.random.default_rng(1)
        measured = replace(STEPPED, seconds_at=tuple(s * rng.uniform(5, 9) for s in STEPPED.seconds_at))
        table, host = LearnedCostTable(measured.alone), Host(STEPPED)
        host.serve(table, SERVED, begin_s, busy=7.0)
        host.serve(table, SERVED, 60.0)
        assert worst(table, STEPPED, SERVED) < 0.1
        assert table.slowdown == pytest.approx(1.0, abs=0.1)

    @pytest.mark.parametrize("begins", [1.0, 6.0])
    def test_what_is_not_served_again_after_a_busy_start_is_no_longer_believed(self, begins):
        """Or it would look dear for ever, and would not be tried."""
        table = LearnedCostTable(scaled(STEPPED, begins).alone)
        Host(scaled(STEPPED, 6.0)).serve(table, SERVED, 60.0)
        assert table.quiet_s(32) > 5 * 26e-3
        Host(STEPPED).serve(table, [1, 2, 4], 2.0)
        assert worst(table, STEPPED, SERVED) < 1.0

    def test_a_host_that_stays_slow_is_believed_in_the_end(self):
        table, host = LearnedCostTable(STEPPED.alone), Host(STEPPED)
        host.serve(table, SERVED, 20.0)
        slower = Host(scaled(STEPPED, 2.0))
        slower.serve(table, SERVED, PATIENCE_S / 2)
        assert worst(table, STEPPED, SERVED) < 0.1, "busy, perhaps"
        slower.serve(table, SERVED, PATIENCE_S)
        assert worst(table, slower.cost, SERVED) < 0.1

    def test_a_busy_host_whose_known_sizes_are_served_no_longer_learns_again(self):
        """All that is served now takes longer than was guessed, and nothing says how busy the host is."""
        guessed = replace(STEPPED, seconds_at=(*STEPPED.seconds_at[:-1], 0.5 * STEPPED.seconds_at[-1]))
        largest = int(STEPPED.tokens[-1])
        known = [t for t in SERVED if t <= STEPPED.tokens[-2] and 2 * t < largest]
        table, host = LearnedCostTable(guessed.alone), Host(STEPPED)
        host.serve(table, known, 30.0)
        host.serve(table, known, 10.0, busy=4.0)
        assert table.slowdown > 2
        host.serve(table, [largest], 10.0)
        assert table.slowdown < 1.3 and worst(table, STEPPED, [largest]) < 0.1

    @settings(max_examples=50)
    @given(st.lists(st.tuples(st.integers(0, 6000), st.floats(0, 1e6), st.floats(-1, 100)), max_size=60))
    def test_whatever_comes_costs_stay_finite_and_positive(self, seen):
        forward = LearnedForward(STEPPED)
        for size, context, seconds in [*seen, (4, 100.0, math.nan), (4, 100.0, math.inf)]:
            forward.observe(size, Context(context, 2), seconds)
        curve = forward.quiet_curve(0, 5000, Context(500.0, 2))
        assert np.isfinite(curve).all() and (curve > 0).all() and 0 < forward.sizes.slowdown < math.inf


TRUTH = ForwardCost(0.01, per_token_s=1e-4, per_context_s=2e-7, per_pair_s=5e-8)
"""40,000 cached tokens take as long as the weights, and a quarter of that more for every token that looks."""


def serve(
    forward: LearnedForward, contexts: list[int], times: int, truth: StepCost = TRUTH, seed: int = 0
) -> None:
    """Forwards of 1 to 8 requests with 1 to 6 tokens each."""
    rng = np.random.default_rng(seed)
    for _ in range(times):
        n, q = int(rng.integers(1, 9)), int(rng.integers(1, 7))
        context = Context(n * float(rng.choice(contexts)), n)
        took = forward_s(truth, np.array([n * q]), context)[0]
        forward.observe(n * q, context, took * (1 + abs(float(rng.normal(0, 0.03)))))


def off(forward: LearnedForward, length: float, truth: StepCost = TRUTH) -> float:
    """Largest relative error at contexts of ``length`` each."""
    errors = []
    for n, q in [(1, 1), (1, 5), (4, 4), (8, 24)]:
        context = Context(n * length, n)
        right = forward_s(truth, np.array([q]), context)[0]
        errors.append(abs(forward.quiet_s(q, context) / right - 1))
    return max(errors)


class TestReading:
    @pytest.mark.parametrize("guess", [(2e-7, 5e-8), (2e-7, 0.0), (0.0, 2e-7), (2e-6, 5e-7), (2e-8, 0.0)])
    def test_what_cached_tokens_cost_is_learned(self, guess):
        """Both that requests have them and that many tokens attend to them, from any guess."""
        forward = LearnedForward(ForwardCost(0.01, 0.0, 1e-4, *guess))
        serve(forward, [256, 2048, 8192, 32768], 800)
        assert forward.sizes.slowdown == pytest.approx(1.0, abs=0.15), "the guess was wrong, nobody is busy"
        for length in (256, 8192, 32768):
            assert off(forward, length) < 0.12, length

    def test_long_contexts_after_short_ones_are_no_busy_host(self):
        """They take ten times what was guessed, and are believed at once."""
        forward = LearnedForward(replace(TRUTH, per_context_s=2e-8, per_pair_s=5e-9))
        serve(forward, [256, 1024], 300)
        serve(forward, [32768], 60)
        assert forward.sizes.slowdown == pytest.approx(1.0, abs=0.1)
        assert off(forward, 32768) < 0.2

    def test_short_contexts_say_little_of_long_ones(self):
        forward = LearnedForward(TRUTH)
        serve(forward, [64, 512], 1000)
        assert off(forward, 8192) < 0.25

    def test_a_busy_host_teaches_nothing_about_reading(self):
        forward = LearnedForward(TRUTH)
        serve(forward, [1024, 16384], 400)
        slow = ForwardCost(*(5 * c for c in (0.01, 0.0, 1e-4, 2e-7, 5e-8)))
        serve(forward, [1024, 16384], 200, slow)
        assert forward.sizes.slowdown == pytest.approx(5.0, rel=0.2)
        assert off(forward, 16384) < 0.25

    def test_a_host_that_was_busy_is_not_for_ever_where_long_contexts_come_in_other_sizes(self):
        """Their time teaches what reading takes, and no size that could say how busy the host is."""
        forward = LearnedForward(TRUTH)
        serve(forward, [256], 300)
        serve(forward, [256], 100, ForwardCost(*(4 * c for c in (0.01, 0.0, 1e-4, 2e-7, 5e-8))))
        assert forward.sizes.slowdown > 3
        context = Context(16 * 32768.0, 16)
        took = float(forward_s(TRUTH, np.array([100.0]), context)[0])
        for _ in range(40):
            forward.observe(100, context, took)
        assert forward.sizes.slowdown == 1.0

    def test_what_was_learned_is_kept(self):
        costs = LearnedCosts(LatencyModel(ForwardCost(2e-4), replace(TRUTH, per_context_s=0.0)))
        serve(costs.verify, [1024, 16384], 400)
        model = costs.learned()
        assert model is not None
        again = LatencyModel.from_json(json.loads(json.dumps(model.to_json())))
        assert off(LearnedForward(again.verify), 16384) < 0.15


def test_first_step_and_later_steps_are_told_apart():
    """Only whole drafts are timed."""
    rng, costs = np.random.default_rng(0), LearnedCosts(START)
    for _ in range(600):
        n, depth = int(rng.integers(1, 9)), int(rng.integers(1, 6))
        drafted = served(n, depth, 3, draft_s=9e-4 + 5e-5 * n + (depth - 1) * (2.5e-4 + 8e-6 * 3 * n))
        costs.observe(drafted, Context(512.0))
    for n in (1, 4, 8):
        assert costs.first.seconds(n) == pytest.approx(9e-4 + 5e-5 * n, rel=0.15)
        assert costs.step.quiet_s(3 * n) == pytest.approx(2.5e-4 + 2.4e-5 * n, rel=0.15)
        assert costs.draft_s(n, 5, 3, Context(512.0)) == pytest.approx(9e-4 + 14.6e-5 * n + 1e-3, rel=0.1)


def test_two_timed_parts_tell_a_start_from_steps_though_all_drafts_are_alike():
    """As on a server whose load is steady. Here the first guess has far too cheap steps."""
    costs, rng = (
        LearnedCosts(replace(START, draft=ForwardCost(5e-5, per_token_s=1e-6))),
        np.random.default_rng(1),
    )
    for _ in range(600):
        n = int(rng.integers(10, 13))
        first_s, later_s = 1.4e-3 + 1e-5 * n, 2 * (3e-4 + 4e-6 * 3 * n)
        first_s, later_s = ((1.0 + abs(rng.normal(0, 0.05))) * x for x in (first_s, later_s))
        costs.observe(served(n, 3, 3, draft_s=first_s + later_s, first_level_s=first_s), Context(512.0))
    assert costs.first.seconds(11) == pytest.approx(1.51e-3, rel=0.15)
    assert costs.draft_step_s(33, Context(512.0)) == pytest.approx(4.3e-4, rel=0.15)
    assert costs.draft_s(11, 5, 3, Context(512.0)) == pytest.approx(1.51e-3 + 4 * 4.3e-4, rel=0.15)


def test_a_draft_that_stalled_hardly_counts():
    first = FirstStep(ForwardCost(2e-4), KVReadCost())
    for i in range(64):
        later_s = i % 4 * 2e-4
        first.observe(1 + i % 3, later_s, 0.4 if i % 5 == 0 else 1e-3 + 2 * later_s)
    assert first.seconds(1) == pytest.approx(1e-3, rel=0.15)
    assert first.factor == pytest.approx(2.0, rel=0.15)


def test_a_clock_that_hardly_moved_says_little():
    """A draft that took a billionth of what it should neither ends the server nor counts for all others."""
    first = FirstStep(ForwardCost(2e-4), KVReadCost())
    for i in range(128):
        later_s = i % 4 * 2e-4
        first.observe(1 + i % 3, later_s, 1e-13 if i < 16 else 1e-3 + 2 * later_s, read=1e5, pairs=1e6)
    assert 0 <= first.seconds(1) < 2e-3 and np.isfinite(first.kv_read).all()


START = LatencyModel(ForwardCost(2e-4, per_token_s=1e-5), STEPPED, 1e-3)


def served(n: int, depth: int, width: int, **times: float) -> IterationOutcome:
    """An iteration that verified everything it drafted."""
    policy = build_policy("none", PolicyConfig(latency=START))
    plan = replace(
        policy.plan(running(n), 1.0), draft=DraftPlan(depth, width), budget=n * (1 + depth * width)
    )
    trees = beam_trees(n, depth, width) if depth else CandidateTrees.empty(n)
    selection = policy.select(plan, trees)
    cost = START.verify_s(float(selection.verify_tokens), Context(512.0))
    return outcome(plan, trees, selection, np.zeros(trees.n_nodes, np.bool_), verify_s=cost, **times)


class TestCosts:
    def test_what_is_around_the_forwards_is_learned_without_prefills_and_pauses(self):
        costs, rng = LearnedCosts(START), np.random.default_rng(0)
        for _ in range(100):
            one = served(1, 0, 1, draft_s=1e-4)
            pause = 5.0 if rng.random() < 0.3 else 0.0
            costs.observe(replace(one, since_last_s=one.verify_s + 1e-4 + 2.5e-3 + pause), Context(512.0))
        assert costs.other_s() == pytest.approx(2.5e-3, rel=0.01)
        assert costs.baseline_s() == pytest.approx(START.verify_s(1.0, Context(256.0)) + 2.5e-3, rel=0.02)

    def test_the_baseline_is_that_of_a_lone_request(self):
        """What is around an iteration grows with the requests whose answers it sends."""
        costs = LearnedCosts(START)
        for n in [1] * 50 + [16] * 50:
            one = served(n, 0, 1, draft_s=1e-4)
            costs.observe(replace(one, since_last_s=one.verify_s + 1e-4 + n * 1e-3), Context(512.0))
        assert costs.other_s() == pytest.approx(16e-3, rel=0.01)
        around_s = costs.baseline_s() - START.verify_s(1.0, Context(256.0))
        assert around_s == pytest.approx(1e-3, rel=0.05)

    def test_prompts_in_a_verification_teach_nothing_about_its_size(self):
        """Their tokens are cheaper. Taken for tokens that are verified, they would make large trees look
        cheap."""
        costs, right = LearnedCosts(START), LearnedCosts(START)
        for _ in range(100):
            alone = served(3, 2, 1)
            shared = replace(alone, prefill_tokens=20, verify_s=1.05 * alone.verify_s, prefilled=True)
            for one in (alone, shared):
                costs.observe(one, Context(512.0))
            right.observe(alone, Context(512.0))
        sizes = np.arange(1.0, 64.0)
        assert costs.verify_s(sizes).tolist() == right.verify_s(sizes).tolist()
        assert costs.slowdown == right.slowdown

    def test_prefills_are_no_part_of_the_baseline(self):
        """Prompts that come without end put a chunk of 40 ms before every iteration."""
        costs = LearnedCosts(START)
        for chunk in [False] * 20 + [True] * 180:
            one = served(2, 0, 1, draft_s=1e-4)
            since_s = one.verify_s + 1e-4 + 2.5e-3 + 40e-3 * chunk
            costs.observe(replace(one, since_last_s=since_s, prefilled=chunk), Context(512.0))
        assert costs.other_s() == pytest.approx(2.5e-3, rel=0.01)

    def test_the_baseline_is_that_of_the_quiet_host(self):
        costs = LearnedCosts(START)
        for _ in range(40):
            costs.observe(served(1, 0, 1), Context(512.0))
        quiet = costs.baseline_s()
        for _ in range(60):
            slow = served(1, 0, 1)
            costs.observe(replace(slow, verify_s=6 * slow.verify_s), Context(512.0))
        assert costs.slowdown == pytest.approx(6.0, rel=0.05)
        assert costs.verify_s(1.0, Context(512.0)) == pytest.approx(
            6 * START.verify_s(1.0, Context(512.0)), rel=0.1
        )
        assert costs.baseline_s() == pytest.approx(quiet, rel=0.01)

    def test_what_was_learned_is_a_start_for_the_next_run(self):
        costs, host = LearnedCosts(replace(START, verify=scaled(STEPPED, 4.0))), Host(STEPPED)
        assert costs.learned() is None
        host.serve(costs.verify.sizes, SERVED, 30.0)
        model = costs.learned()
        assert model is not None and known_sizes(model.verify)
        back = LatencyModel.from_json(json.loads(json.dumps(model.to_json())))
        assert back == model
        again = LearnedCosts(back)
        assert worst(again.verify.sizes, STEPPED, SERVED) < 0.1
        host.serve(
            again.verify.sizes, SERVED, 20.0, busy=6.0
        )  # known from the first moment, so: the host is busy
        assert again.slowdown > 3 and worst(again.verify.sizes, STEPPED, SERVED) < 0.1

    def test_a_stall_right_after_a_restart_condemns_no_size(self):
        table = LearnedCostTable(STEPPED.alone, known=SERVED)
        for size in SERVED:
            observe(table, size, 1.0)
        for _ in range(8):
            observe(table, 1, STEPPED.seconds_at[0])
        assert worst(table, STEPPED, SERVED) < 0.1

    def test_a_model_that_is_right_is_left_alone(self):
        costs = LearnedCosts(START, learn=False)
        for _ in range(50):
            costs.observe(replace(served(4, 0, 1), verify_s=1.0), Context(512.0))
        assert costs.verify_s(4.0, Context(512.0)) == pytest.approx(
            START.verify_s(4.0, Context(512.0)), rel=0.01
        )

    def test_policies_of_one_server_learn_together(self):
        shared = LearnedCosts(START)
        one, two = (
            build_policy(name, PolicyConfig(latency=START, costs=shared)) for name in ("none", "priced")
        )
        for i in range(40):
            plan = one.plan(running(4), float(i))
            trees = CandidateTrees.empty(4)
            selection = one.select(plan, trees)
            one.observe(outcome(plan, trees, selection, np.zeros(0, np.bool_), verify_s=0.05))
        slow = build_policy("priced", PolicyConfig(latency=START)).plan(running(4), 99.0).t_spec_s
        assert two.plan(running(4), 99.0).t_spec_s > 1.8 * slow


class TestSimulated:
    """Whole policies on a simulated host whose start table is wrong."""

    LATENCY = hardware_latency("llama-3.1-8b", "a100", 1)
    MIX = {"coding": 0.6, "chat": 0.2, "summarization": 0.2}  # noqa: RUF012

    @staticmethod
    @cache
    def run(times: float, busy: tuple[tuple[float, float, float], ...] = ()):
        truth = TestSimulated.LATENCY
        assert isinstance(truth.verify, ForwardCost) and isinstance(truth.draft, ForwardCost)
        wrong = replace(
            truth,
            verify=ForwardCost(times * (truth.verify.fixed_s + truth.verify.weights_s), 0.0, times * 2e-4),
            draft=ForwardCost(times * (truth.draft.fixed_s + truth.draft.weights_s)),
        )
        replica = ReplicaConfig(truth, busy=busy)
        config = SimulationConfig(replica, "priced", PolicyConfig(latency=wrong))
        trace = synthetic_trace(220, 4.0, 1, TestSimulated.MIX)
        requests = make_requests(trace, SLOConfig(), truth.baseline_s(), TextModel(), 1)
        return simulate(requests, config)

    def error(self, result) -> float:
        """Largest relative error at the sizes that were verified often."""
        replica = result.replicas[0]
        sizes = np.array([entry.verify + entry.prefill for entry in replica.log], np.int64)
        often = [int(t) for t in np.unique(sizes) if np.count_nonzero(sizes == t) >= 40]
        assert len(often) >= 5
        costs, context = replica.policy.costs, Context(2000.0, 8)
        right = self.LATENCY.verify_s(np.array(often, np.float64), context)
        learned = [costs.verify.quiet_s(t, context) for t in often]
        return float(np.max(np.abs(np.array(learned) / right - 1)))

    @pytest.mark.parametrize("times", [0.25, 4.0])
    def test_the_table_converges_and_slos_are_met_as_with_a_right_one(self, times):
        wrong, right = self.run(times), self.run(1.0)
        assert self.error(wrong) < 0.1
        met = [np.mean([r.attained for r in result.records()]) for result in (wrong, right)]
        assert met[0] > met[1] - 0.05

    def test_a_busy_start_that_ends(self):
        result = self.run(6.0, busy=((0.0, 15.0, 6.0),))
        assert self.error(result) < 0.1
        assert result.replicas[0].policy.costs.slowdown == pytest.approx(1.0, abs=0.15)

    def test_busy_for_a_while(self):
        result = self.run(1.0, busy=((20.0, 30.0, 5.0),))
        assert self.error(result) < 0.1


def test_replicas_know_when_their_host_is_busy():
    config = ReplicaConfig(TestSimulated.LATENCY, noise=0.0, busy=((0.0, 1e9, 3.0),))
    replica = build_replica(SimulationConfig(config, "none", PolicyConfig(latency=TestSimulated.LATENCY)))
    assert replica._noisy(1.0) == 3.0


@pytest.mark.parametrize("learned", [ForwardCost(0.0, 0.0), ForwardCost(0.0, 2e-6), ForwardCost(1e-5, 0.0)])
def test_a_first_step_that_was_learned_to_cost_nothing_is_no_start(learned: ForwardCost) -> None:
    """Long contexts may take all of a draft's time in the fit; the next run starts, and learns better."""
    start = LatencyModel(ForwardCost(2e-3, 1e-4), ForwardCost(10e-3, 1e-3), 1e-3)
    saved = LatencyModel.from_json(replace(start, draft_first=learned).to_json())
    first = LearnedCosts(saved).first
    assert first.seconds(4) == pytest.approx(start.draft.alone(np.array([4.0]))[0], rel=0.2)
    for _ in range(200):
        first.observe(4, 0.0, 3e-3)
    assert first.seconds(4) == pytest.approx(3e-3, rel=0.1)


def test_what_a_draft_takes_is_the_same_for_a_start_and_for_who_learns_from_it() -> None:
    """A first step that was learned leaves out what it reads of contexts: that is added as for later ones."""
    start = LatencyModel(
        ForwardCost(1e-3, per_context_s=1e-6), ForwardCost(10e-3), draft_first=ForwardCost(3e-3)
    )
    long = Context(8192.0)
    assert start.draft_s(1, 3, 1, long) == pytest.approx(3e-3 + 2 * 1e-3 + 3 * 8192e-6)
    assert LearnedCosts(start).draft_s(1, 3, 1, long) == pytest.approx(start.draft_s(1, 3, 1, long))


def test_a_static_tree_whose_steps_differ_in_rows_teaches_nothing_wrong_about_steps() -> None:
    """Its first steps have a row for each request, and only later ones as many as the tree is wide."""
    truth = LatencyModel(ForwardCost(1e-3, per_token_s=1e-3), ForwardCost(10e-3))
    requests = make_requests(synthetic_trace(8, 0.1, 0, {"chat": 1.0}), SLOConfig(), 0.01, TextModel(), 0)
    served = simulate(requests, SimulationConfig(ReplicaConfig(truth, noise=0.0), "fixed-tree"))
    (replica,) = served.replicas
    assert len(replica.log) > 100 and replica.policy.costs.draft_step_s(3.0) == pytest.approx(4e-3)
