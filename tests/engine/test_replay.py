"""Replay parity: what the policy chose inside SGLang, it chooses again from the recording."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from adaserve.config import AdaServeConfig
from adaserve.engine.cpu.device import MIN_GAIN
from adaserve.scheduler.costs.latency import LatencyModel
from adaserve.scheduler.costs.learned import known_sizes
from adaserve.scheduler.iteration_recording import RecordedPrefill, read_events, read_recording, replay
from adaserve.scheduler.policies import PolicyConfig, build_policy
from tests.engine.conftest import adaserve_server
from tests.engine.harness import Job, Zygote, run_jobs, workload

LIMITS = {"budget": 40, "max_depth": 4, "max_width": 3}


@dataclass(frozen=True)
class Recorded:
    """A recording of a real server, and what its policy was built from."""

    policy: str
    path: Path
    config: PolicyConfig


@pytest.fixture(scope="module", params=[("priced", False), ("adaserve", True)], ids=["priced", "adaserve"])
def recorded(
    request: pytest.FixtureRequest, zygote: Zygote, pair: Path, tmp_path_factory: pytest.TempPathFactory
) -> Recorded:
    """Staggered requests, some of whose clients leave; ``adaserve`` under the overlap schedule."""
    name, overlap = request.param
    folder = tmp_path_factory.mktemp(f"replay-{name}")
    path = folder / "iterations.jsonl"
    config: dict[str, Any] = {"policy": name, "record": str(path), **LIMITS}
    server, _ = adaserve_server(folder, pair, "noisy", config, overlap=overlap)
    with server.running(zygote):
        for seed in range(5, 13):  # a restless host may need more than the first ones to know any size
            run_jobs(server, workload(40, seed, leave_every=8, spread_s=3.0))
            state = server.internal_state()["adaserve"]
            if state["latency_learned"] is not None:
                break
        stops = {"temperature": 1.0, "max_new_tokens": 40, "stop_token_ids": list(range(0, 512, 8))}
        for again in range(2):  # one batch that shows where answers stop, and one that is told
            run_jobs(server, [Job((7 + again, 9 + k), stops) for k in range(48)])
        latency = LatencyModel.from_json(state["latency"])
        assert known_sizes(LatencyModel.from_json(state["latency_learned"]).verify)
        assert not known_sizes(latency.verify)
        server.assert_idle_and_clean()
    # As the worker builds it, which stops drafting where the frontier says so; but priced in Python.
    settings = AdaServeConfig(**LIMITS).for_policies(latency=latency, early_stop=True, least_gain=MIN_GAIN)
    return Recorded(name, path, settings)


def test_a_recording_replays_to_identical_plans_and_selections(recorded: Recorded) -> None:
    iterations = list(read_recording(recorded.path))
    drafted = [i for i in iterations if i.trees.n_nodes]
    assert len(drafted) > 50
    assert any(i.selection.keep.any() and not i.selection.keep.all() for i in drafted), "nothing was chosen"
    assert max(len(i.plan.running) for i in iterations) > 2
    assert '"forget"' in recorded.path.read_text()
    prefills = [e for e in read_events(recorded.path) if isinstance(e, RecordedPrefill)]
    assert sum(p.tokens for p in prefills) > 100 and all(p.seconds > 0 for p in prefills)
    assert replay(recorded.path, build_policy(recorded.policy, recorded.config)) == []


def test_of_drafts_with_several_levels_it_is_known_when_the_first_was_there(recorded: Recorded) -> None:
    """Of those alone can a policy learn what starting a draft costs and what a step does."""
    outcomes = [json.loads(line) for line in recorded.path.read_text().splitlines()]
    several = [o for o in outcomes if "trees" in o and max(o["trees"]["depth"], default=0) > 1]
    assert len(several) > 20
    assert all(0 < o["outcome"]["first_level_s"] < o["outcome"]["draft_s"] for o in several)


def test_answers_that_stopped_say_where_others_will(recorded: Recorded) -> None:
    batches = [i.plan.running for i in read_recording(recorded.path)]
    assert batches[0].likely_tokens is None
    assert any((b.tokens_ahead < b.remaining_tokens).any() for b in batches)


def test_another_setting_does_not_replay(recorded: Recorded) -> None:
    """Or the comparison would compare nothing."""
    other = build_policy(recorded.policy, replace(recorded.config, budget=14))
    assert replay(recorded.path, other)
