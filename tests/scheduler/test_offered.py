"""Candidates that cost no draft step: how policies price them, and what is left for a draft."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from adaserve.scheduler.acceptance import AcceptanceRate
from adaserve.scheduler.acceptance_calibration import GROUPS, Calibrator, group_of
from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.costs.latency import ForwardCost, LatencyModel
from adaserve.scheduler.interface import (
    MODEL,
    SECOND_MODEL,
    CandidateTrees,
    DraftPlan,
    IterationOutcome,
    RunningBatch,
    Selection,
)
from adaserve.scheduler.iteration_recording import Recorder, read_recording, replay
from adaserve.scheduler.node_pricing import uncovered
from adaserve.scheduler.policies import build_policy
from adaserve.scheduler.policies.priced import PricedPolicy
from adaserve.scheduler.selection import parent_kept
from tests.scheduler.sched_factories import beam_trees, running, trees_from

OFFERED = 4
CHEAP = LatencyModel(
    ForwardCost(fixed_s=1e-3, per_token_s=1e-4), ForwardCost(fixed_s=1e-2, per_token_s=1e-5), 1e-3
)
DEAR = LatencyModel(
    ForwardCost(fixed_s=1.0, per_token_s=1.0), ForwardCost(fixed_s=1e-2, per_token_s=1e-5), 1e-3
)


def offers(*rows: list[float]) -> CandidateTrees:
    """A chain per row with these one-step probabilities."""
    trees = trees_from([[(i - 1, p) for i, p in enumerate(row)] for row in rows])
    return replace(trees, source=np.full(trees.n_nodes, OFFERED))


def offered_to(n: int, trees: CandidateTrees) -> RunningBatch:
    return replace(running(n), offered=trees)


def test_uncovered_is_what_the_best_offers_leave() -> None:
    left = uncovered(offers([0.9, 0.5], [], [1.0]), 3, 3)
    assert np.allclose(left, [[0.1, 0.55, 1], [1, 1, 1], [0, 1, 1]])
    assert (uncovered(None, 2, 2) == 1).all()


def test_the_slo_phase_knows_how_deep_offers_are() -> None:
    """Nothing is drafted, and the request that is behind still gets its nodes before the likelier ones."""
    policy = build_policy("adaserve", PolicyConfig(latency=CHEAP, drafts=0, budget=6))
    trees = offers([0.6] * 4, [0.95] * 4)
    batch = replace(offered_to(2, trees), decoded_tokens=np.array([10, 13]))
    plan = policy.plan(batch, 0.65)
    assert plan.need[0] > 3.0 and plan.need[1] < 1.0
    assert policy.select(plan, trees).slo_counts.tolist() == [plan.n_max, 0] == [3, 0]


@pytest.mark.parametrize("name", ["priced", "adaserve", "chain-2", "turbospec", "global-greedy"])
def test_offers_are_verified_where_nothing_can_be_drafted(name: str) -> None:
    policy = build_policy(name, PolicyConfig(latency=CHEAP, drafts=0))
    trees = offers([0.9, 0.9, 0.9], [0.9])
    plan = policy.plan(offered_to(2, trees), 1.0)
    assert plan.draft.depth == 0 and plan.budget >= 2 + trees.n_nodes
    selection = policy.select(plan, trees)
    assert selection.keep.all() and selection.counts.tolist() == [3, 1]


def test_an_equal_share_of_the_budget_does_not_depend_on_who_has_offers() -> None:
    trees = offers([0.9] * 5, [])
    for budget, kept in ((100, 5), (8, 3), (2, 0)):
        policy = build_policy("equal-greedy", PolicyConfig(latency=CHEAP, drafts=0, budget=budget))
        plan = policy.plan(offered_to(2, trees), 1.0)
        assert policy.select(plan, trees).counts.tolist() == [kept, 0]


def test_priced_verifies_offers_where_drafting_does_not_pay() -> None:
    policy = build_policy("priced", PolicyConfig(latency=DEAR))
    for _ in range(40):
        plan = policy.plan(offered_to(2, offers([0.9, 0.9], [0.8])), 1.0)
        selection = policy.select(plan, offers([0.9, 0.9], [0.8]))
        assert selection.counts.tolist() == [2, 1]
    assert plan.draft.depth == 0 or plan.iteration % 16 == 15


def test_offers_are_weighed_by_what_their_requests_need() -> None:
    policy = build_policy("priced", PolicyConfig(latency=CHEAP, drafts=0))
    late = replace(running(2, tpot_slo_s=np.array([0.5, 0.0125])), offered=offers([0.5], [0.5]))
    plan = policy.plan(late, 0.2)
    assert plan.weight is not None and plan.weight[1] > plan.weight[0]


def test_priced_leaves_out_offers_that_do_not_pay() -> None:
    slope = LatencyModel(
        ForwardCost(fixed_s=1.0, per_token_s=1.0), ForwardCost(fixed_s=1e-2, per_token_s=1e-2), 1e-3
    )
    policy = build_policy("priced", PolicyConfig(latency=slope))
    trees = offers([0.1, 0.1], [0.9])
    selection = policy.select(policy.plan(offered_to(2, trees), 1.0), trees)
    assert selection.counts.tolist() == [0, 1]


def test_a_small_gain_is_not_worth_a_tree() -> None:
    trees = offers([0.2])
    for gain, kept in ((0.0, 1), (0.5, 0)):
        policy = build_policy("priced", PolicyConfig(latency=DEAR, least_gain=gain))
        assert policy.select(policy.plan(offered_to(1, trees), 1.0), trees).verify_tokens == 1 + kept


def test_priced_drafts_less_where_offers_are_sure() -> None:
    sure, unsure = [1.0] * 8, [0.3, 0.3]

    def plan(*rows: list[float]):
        policy = build_policy("priced", PolicyConfig(latency=CHEAP))
        return policy.plan(offered_to(len(rows), offers(*rows)), 1.0)

    without = build_policy("priced", PolicyConfig(latency=CHEAP)).plan(running(2), 1.0)
    assert without.draft.depth > 0 and without.draft.rows is None
    assert plan(sure, sure).draft.depth == 0
    mixed = plan(sure, unsure)
    assert mixed.draft.depth > 0 and mixed.draft.rows is not None
    assert mixed.draft.rows.tolist() == [False, True] and mixed.drafting_rows == 1


def test_drafting_pays_beyond_sure_offers() -> None:
    """The first two levels bring nothing, and those behind them pay for all."""
    batch = replace(running(4, tpot_slo_s=np.inf), offered=offers(*([1.0] * 2 for _ in range(4))))
    quick = LatencyModel(ForwardCost(4e-4), ForwardCost(1e-2, per_token_s=1e-5), 1e-3)
    for latency, drafts in ((quick, True), (DEAR, False)):
        plan = build_policy("priced", PolicyConfig(latency=latency)).plan(batch, 1.0)
        assert (plan.draft.depth > 2) == drafts and (plan.draft.depth == 0) != drafts


def test_a_level_that_was_not_drafted_of_late_pays_for_none_above_it() -> None:
    """No level is worth more than the one above it, whatever it was worth when it was drafted last."""
    policy = build_policy("priced", PolicyConfig(latency=CHEAP))
    assert isinstance(policy, PricedPolicy)
    batch = running(4, tpot_slo_s=np.inf)
    assert policy.plan(batch, 1.0).draft.depth > 0
    for regime in policy._regimes._known.values():
        regime.surplus[0] = 0.0
    assert policy.plan(batch, 1.0).draft.depth == 0


@pytest.mark.parametrize("every", [1, 2])
def test_probes_leave_out_rows_whose_offers_are_sure(every: int) -> None:
    latency = LatencyModel(ForwardCost(1e-3), ForwardCost(1e-2, per_token_s=1e-5))
    policy = build_policy("priced", PolicyConfig(latency=latency, least_gain=50.0))
    sure = np.arange(32) % every == 0
    batch = offered_to(32, offers(*([1.0] * 8 if s else [] for s in sure)))
    probes = [p.draft.rows for p in (policy.plan(batch, 1.0) for _ in range(64)) if p.draft.depth]
    assert bool(probes) == (not sure.all())
    assert all(rows is not None and rows.sum() == 8 and not rows[sure].any() for rows in probes)


def joined(drafted: CandidateTrees, bits: list[int]) -> CandidateTrees:
    return replace(drafted, source=np.array(bits))


def test_draft_steps_are_those_of_drafted_nodes() -> None:
    trees = joined(trees_from([[(-1, 0.9), (0, 0.9), (1, 0.9)]]), [MODEL, SECOND_MODEL | OFFERED, OFFERED])
    assert trees.draft_steps == 2 and trees_from([[(-1, 0.5)]]).draft_steps == 1
    assert replace(trees, source=np.full(3, OFFERED)).draft_steps == 0


SOURCES = (MODEL, OFFERED, MODEL | OFFERED, SECOND_MODEL, MODEL | SECOND_MODEL)


@pytest.mark.parametrize("taught", SOURCES)
def test_calibration_keeps_sources_apart(taught: int) -> None:
    """And what several agree on. Those who were not observed keep what they claim."""
    calibrator, n = Calibrator(), 4000
    q, zeros = np.full(n, 0.52), np.zeros(n, np.int64)
    chain = trees_from([[(-1, 0.52)]])
    of = {bits: replace(chain, source=np.array([bits])) for bits in SOURCES}
    group = group_of(of[taught])
    assert group is not None
    calibrator.observe(q, zeros, np.ones(n, np.bool_), ["r"], ["c"], np.repeat(group, n))
    calibrator.forget("r")
    values = {bits: float(calibrator.path_values(trees, ["r"], ["c"])[0]) for bits, trees in of.items()}
    assert len(SOURCES) == GROUPS and values.pop(taught) > 0.9
    assert all(value == pytest.approx(0.52) for value in values.values())
    assert (calibrator.path_values(chain, ["r"], ["c"])[0] > 0.9) == (taught == MODEL)


def test_what_models_offer_beside_earlier_text_is_one_group() -> None:
    trees = joined(trees_from([[(-1, 0.9), (0, 0.9), (1, 0.9)]]), [b | OFFERED for b in (1, 2, 3)])
    assert group_of(trees).tolist() == [2, 2, 2]


def test_the_worth_of_levels_counts_what_only_the_draft_had() -> None:
    """Nodes that were offered as well would have been there without a draft."""

    def surplus(*source: int) -> float:
        policy = build_policy("priced", PolicyConfig(latency=CHEAP, surplus_rate=0.5))
        assert isinstance(policy, PricedPolicy)
        for _ in range(64):
            plan = replace(policy.plan(running(1), 1.0), draft=DraftPlan(1))
            trees = replace(beam_trees(1, 1, len(source)), source=np.array(source))
            selection = policy.select(plan, trees)
            policy.observe(outcome_of(plan, trees, selection))
        return float(next(iter(policy._regimes._known.values())).surplus[0, 0])

    one, both = surplus(MODEL), surplus(MODEL, SECOND_MODEL)
    assert one > 0.3 and surplus(MODEL | OFFERED) == pytest.approx(0.0, abs=1e-3)
    assert both > one, "what only the second model had is worth something, too"


def outcome_of(plan, trees: CandidateTrees, selection: Selection) -> IterationOutcome:
    accepted = selection.keep & parent_kept(trees, selection.keep)
    return IterationOutcome(
        plan=plan, trees=trees, selection=selection, accepted=accepted,
        new_tokens=selection.counts + 1, end_s=1.0, draft_s=1e-3, select_s=0.0, verify_s=1e-2, total_s=1.1e-2,
    )  # fmt: skip


def test_a_recording_knows_what_was_offered(tmp_path: Path) -> None:
    config = PolicyConfig(latency=CHEAP, learn_costs=False)
    policy, path = build_policy("priced", config), tmp_path / "recorded.jsonl"
    with Recorder(path) as recorder:
        for p in (0.9, 0.2, 0.6):
            trees = offers([p, p], [1.0, 1.0])
            plan = policy.plan(offered_to(2, trees), 1.0)
            recorder.planned(plan)
            outcome = outcome_of(plan, trees, policy.select(plan, trees))
            recorder.selected(plan)
            policy.observe(outcome)
            recorder.observed(outcome)
    first, *_ = read_recording(path)
    offered = first.plan.running.offered
    assert offered is not None and offered.source is not None
    assert offered.source.tolist() == [OFFERED] * 4 and offered.depth.tolist() == [1, 2, 1, 2]
    assert replay(path, build_policy("priced", config)) == []


def test_turbospec_verifies_as_much_of_a_fixed_proposal_as_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt lookup, TurboSpec section 4: the proposal is there, and k is how much of it is verified."""
    steep = LatencyModel(ForwardCost(fixed_s=1.0), ForwardCost(fixed_s=1e-2, per_token_s=2e-3), 1e-3)
    trees = offers([0.9] * 6, [0.9] * 2)
    kept = []
    for latency, rate in ((CHEAP, 0.9), (steep, 0.5), (steep, 0.0)):
        policy = build_policy("turbospec", PolicyConfig(latency=latency, drafts=0))
        monkeypatch.setattr(AcceptanceRate, "value", rate)
        plan = policy.plan(offered_to(2, trees), 1.0)
        assert plan.draft.depth == 0
        kept.append(policy.select(plan, trees).counts.tolist())
    assert kept[0] == [6, 2] and 0 < kept[1][0] < 6 and kept[2] == [0, 0]


def test_turbospec_keeps_one_chain_per_row() -> None:
    policy = build_policy("turbospec", PolicyConfig(latency=CHEAP, drafts=0))
    branches = trees_from([[(-1, 0.9), (-1, 0.8), (0, 0.9), (1, 0.9), (2, 0.9)]])
    branches = replace(branches, source=np.full(5, OFFERED))
    selection = policy.select(policy.plan(offered_to(1, branches), 1.0), branches)
    assert selection.keep.tolist() == [True, False, True, False, True]
