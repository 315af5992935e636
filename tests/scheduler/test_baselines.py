"""The rules of today's other servers: adaptive verification (vLLM) and urgency order (xLLM)."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sched_factories import outcome, running, trees_from

from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.costs.latency import ForwardCost, LatencyModel
from adaserve.scheduler.interface import CandidateTrees, IterationPlan, RunningBatch
from adaserve.scheduler.policies import chain_length, is_slo_aware
from adaserve.scheduler.policies.adaptive_verify import RATE, AcceptanceModel, AdaptiveVerifyPolicy
from adaserve.scheduler.policies.urgency import UrgencyPolicy

K = 3
LATENCY = LatencyModel(
    verify=ForwardCost(fixed_s=0.010, per_token_s=0.002), draft=ForwardCost(fixed_s=0.001, per_token_s=0.0)
)
CONFIG = PolicyConfig(latency=LATENCY, learn_costs=False)


def chains(steps: list[list[float]]) -> CandidateTrees:
    return trees_from([[(i - 1, q) for i, q in enumerate(row)] for row in steps])


def seconds(policy: AdaptiveVerifyPolicy | UrgencyPolicy, plan: IterationPlan, tokens: int) -> float:
    n = len(plan.running)
    return float(
        policy.costs.verify_s(n + tokens, policy.context(plan.running))
        + policy.costs.draft_s(n, K, 1, policy.context(plan.running))
        + policy.costs.other_s()
    )


@settings(max_examples=60)
@given(st.lists(st.lists(st.floats(0.05, 0.95), min_size=K, max_size=K), min_size=1, max_size=3))
def test_adaptive_verification_takes_the_lengths_with_the_best_rate(steps: list[list[float]]) -> None:
    policy = AdaptiveVerifyPolicy("adaptive-verify-3", CONFIG, K)
    plan = policy.plan(running(len(steps)), 1.0)
    selection = policy.select(plan, chains(steps))

    def rate(lengths: tuple[int, ...]) -> float:
        tokens = sum(
            1 + sum(np.prod(row[: i + 1]) for i in range(k)) for row, k in zip(steps, lengths, strict=True)
        )
        return float(tokens) / seconds(policy, plan, sum(lengths))

    best = max(rate(lengths) for lengths in itertools.product(range(K + 1), repeat=len(steps)))
    assert rate(tuple(selection.counts.tolist())) == pytest.approx(best, rel=1e-3)


def test_adaptive_verification_tries_again_what_once_did_not_pay() -> None:
    """A draft may get better, or a text easier."""
    policy, kept = AdaptiveVerifyPolicy("adaptive-verify-3", CONFIG, K), []
    policy.acceptance.weights = np.array([-6.0, 1.0, 0.0])
    for _ in range(2000):
        plan, trees = policy.plan(running(4), 1.0), chains([[0.9] * K] * 4)
        selection = policy.select(plan, trees)
        policy.observe(outcome(plan, trees, selection, selection.keep))
        kept.append(int(selection.keep.sum()))
    assert np.flatnonzero(kept[:100]).tolist() == list(range(15, 100, 16)) and all(kept[-32:])
    assert kept[15] == 4 and set(kept[-32:]) == {4 * K}, "one a request, until they pay"


def test_adaptive_verification_knows_no_slo() -> None:
    steps = [[0.9, 0.5, 0.4], [0.8, 0.6, 0.1]]
    chosen = []
    for slo_s in (0.01, 10.0):
        policy = AdaptiveVerifyPolicy("adaptive-verify-3", CONFIG, K)
        plan = policy.plan(running(2, tpot_slo_s=np.array([slo_s, 0.05])), 1.0)
        chosen.append(policy.select(plan, chains(steps)).counts.tolist())
    assert chosen[0] == chosen[1] and not is_slo_aware("adaptive-verify-3")


def test_the_acceptance_model_learns_an_overconfident_draft() -> None:
    model, rng = AcceptanceModel(), np.random.default_rng(0)
    for _ in range(3000):
        q, depth = rng.uniform(0.2, 0.95, 32), rng.integers(1, 5, 32)
        model.learn(q, depth, rng.random(32) < 0.6 * q)
    for q in (0.4, 0.6, 0.8):
        assert model.predict(np.array([q]), np.array([2]))[0] == pytest.approx(0.6 * q, abs=0.06)


def test_the_acceptance_model_steps_down_the_gradient_of_its_loss() -> None:
    model = AcceptanceModel()
    model.weights = start = np.array([0.3, 0.8, -0.2])
    q, depth, accepted = np.array([0.2, 0.6, 0.9]), np.array([1, 2, 4]), np.array([False, True, True])

    def loss(weights: np.ndarray) -> float:
        model.weights = weights
        p = model.predict(q, depth)
        return float(-np.log(np.where(accepted, p, 1 - p)).mean())

    assert model.predict(np.array([0.5]), np.array([1]))[0] == pytest.approx(1 / (1 + np.exp(-0.3)))
    slope = np.array([(loss(start + h) - loss(start - h)) / 2e-5 for h in 1e-5 * np.eye(3)])
    model.weights = start.copy()
    model.learn(q, depth, accepted)
    assert model.weights - start == pytest.approx(-RATE * slope, rel=1e-4)


def late_and_early() -> RunningBatch:
    """Three requests whose next tokens are due in 30, 60 and 200 ms at t = 1."""
    return running(
        3, decoded_tokens=9, tpot_slo_s=np.array([0.1, 0.1, 0.1]), decode_start_s=np.array([0.03, 0.06, 0.2])
    )


def test_urgent_requests_get_their_whole_chains_first() -> None:
    policy = UrgencyPolicy("urgency-3", CONFIG, K)
    plan = policy.plan(late_and_early(), 1.0)
    trees = chains([[0.9] * K] * 3)
    assert policy.select(plan, trees).counts.tolist() == [3, 3, 3]  # 65 of 100 ms are always there
    tight = replace(late_and_early(), tpot_slo_s=np.array([0.028, 0.028, 0.028]))
    tight = replace(tight, decode_start_s=1.0 + np.array([0.026, 0.029, 0.04]) - 0.28)
    plan = policy.plan(tight, 1.0)
    least = seconds(policy, plan, 0)
    assert policy.latency_budget(tight, 1.0, least) == pytest.approx(0.026)
    assert seconds(policy, plan, 3) <= 0.026 < seconds(policy, plan, 6)
    assert policy.select(plan, trees).counts.tolist() == [3, 0, 0]


def test_who_is_late_already_does_not_set_the_budget() -> None:
    policy = UrgencyPolicy("urgency-3", CONFIG, K)
    batch = running(
        2, decoded_tokens=9, tpot_slo_s=np.array([0.1, 0.1]), decode_start_s=np.array([-5.0, 0.09])
    )
    assert policy.latency_budget(batch, 1.0, 0.02) == pytest.approx(0.09)


def test_where_everybody_is_late_nobody_limits_the_others() -> None:
    policy = UrgencyPolicy("urgency-3", CONFIG, K)
    late = replace(late_and_early(), tpot_slo_s=np.full(3, 0.02))  # 20 ms are less than one iteration
    plan = policy.plan(late, 1.0)
    assert policy.latency_budget(late, 1.0, seconds(policy, plan, 0)) == np.inf
    assert policy.select(plan, chains([[0.9] * K] * 3)).counts.tolist() == [3, 3, 3]


def test_names() -> None:
    assert chain_length("urgency-4") == 4 and chain_length("adaptive-verify-12") == 12
    assert chain_length("priced") is None and is_slo_aware("urgency-4") and not is_slo_aware("chain-4")
