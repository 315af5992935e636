"""Drafts that were queued before a plan was made: what policies make of them, and what they want next."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.costs.latency import ForwardCost, LatencyModel
from adaserve.scheduler.interface import DraftPlan, IterationOutcome, RunningBatch
from adaserve.scheduler.iteration_recording import Recorder, read_recording, replay
from adaserve.scheduler.policies import build_policy
from tests.scheduler.sched_factories import beam_trees, outcome, running

CHEAP = LatencyModel(
    ForwardCost(fixed_s=1e-3, per_token_s=1e-4), ForwardCost(fixed_s=1e-2, per_token_s=1e-5), 1e-3
)
NAMES = ["priced", "adaserve", "chain-2", "turbospec", "global-greedy", "fixed-tree", "equal-greedy"]


def batch(n: int, underway: DraftPlan | None = None) -> RunningBatch:
    return replace(running(n), underway=underway)


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_takes_what_is_underway(name: str) -> None:
    """And says what it would have drafted, which is what it plans where nothing is."""
    config = PolicyConfig(latency=CHEAP)
    free = build_policy(name, config).plan(batch(3), 1.0)
    assert free.then is free.draft
    underway = DraftPlan(7, 1, None, np.array([True, False, True]))
    plan = build_policy(name, config).plan(batch(3, underway), 1.0)
    assert plan.draft is underway and plan.then == free.then
    trees = beam_trees(3, 7, 1)
    selection = build_policy(name, config).select(plan, trees) if name != "priced" else None
    assert selection is None or selection.verify_tokens <= plan.budget


@pytest.mark.parametrize("name", NAMES)
def test_requests_that_may_not_speculate_are_not_counted_as_drafted(name: str) -> None:
    """What drafts cost is learned by how many requests they are made for."""
    config = PolicyConfig(latency=CHEAP)
    some = replace(batch(4), max_depth=np.array([0, 9, 9, 9]), remaining_tokens=np.array([50, 50, 1, 50]))
    plan = build_policy(name, config).plan(some, 1.0)
    assert plan.draft.rows is not None and plan.draft.rows.tolist() == [False, True, False, True]
    assert plan.drafting_rows == 2
    assert plan.t_spec_s < build_policy(name, config).plan(batch(4), 1.0).t_spec_s


def test_nodes_below_what_a_request_may_still_write_are_left_out() -> None:
    """It was not known when they were drafted."""
    short = replace(batch(2, DraftPlan(5)), remaining_tokens=np.array([3, 100]))
    plan = build_policy("chain-2", PolicyConfig(latency=CHEAP)).plan(short, 1.0)
    assert plan.cap is not None and plan.cap.tolist()[0] == 2


@pytest.mark.parametrize("name", ["priced", "adaserve"])
def test_recordings_tell_of_it(name: str, tmp_path: Path) -> None:
    config = PolicyConfig(latency=CHEAP, learn_costs=False)
    policy, path = build_policy(name, config), tmp_path / "recording.jsonl"
    underway = None
    with Recorder(path) as recorder:
        for step in range(12):
            plan = policy.plan(batch(3, underway), 1.0 + 0.02 * step)
            recorder.planned(plan)
            trees = beam_trees(3, plan.draft.depth, plan.draft.width, step)
            selection = policy.select(plan, trees)
            recorder.selected(plan)
            none = np.zeros(trees.n_nodes, np.bool_)
            outcome = IterationOutcome(
                plan, trees, selection, none, np.ones(3, np.int64), 1.02 + 0.02 * step, 1e-3, 1e-4, 1e-2, 0.02
            )
            policy.observe(outcome)
            recorder.observed(outcome)
            assert plan.then is not None
            underway = replace(plan.then, rows=np.array([True, True, step % 2 == 0]))
    assert replay(path, build_policy(name, config)) == []
    recorded = [item.plan for item in read_recording(path)]
    assert recorded[0].running.underway is None
    read = recorded[5].running.underway
    assert read is not None and read.rows is not None and read.rows.tolist() == [True, True, True]
    assert recorded[5].then is not None and recorded[5].then.depth > 0


def test_a_policy_that_takes_over_is_recorded_beside_the_last_outcome_of_the_other(tmp_path: Path) -> None:
    """Each counts its own iterations, and under overlap the other's last one is still to be heard of."""
    path = tmp_path / "recording.jsonl"
    with Recorder(path) as recorder:

        def begun(name: str) -> IterationOutcome:
            policy = build_policy(name, PolicyConfig(latency=CHEAP))
            plan, trees = policy.plan(batch(3), 1.0), beam_trees(3, 1, 1)
            recorder.planned(plan)
            selection = policy.select(plan, trees)
            recorder.selected(plan)
            return outcome(plan, trees, selection, selection.keep)

        for each in [begun("chain-1"), begun("adaserve")]:
            recorder.observed(each)
    assert [r.plan.iteration for r in read_recording(path)] == [0, 0]
