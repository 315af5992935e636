"""The simulator on a sweep's requests: what it learns of the host, and how its answers are judged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaserve.bench.jsonl import write_records
from adaserve.bench.sweep.aggregate import Block, Results
from adaserve.bench.sweep.host_model import as_served, fitted_means, fitted_overhead, prefills_as_served
from adaserve.bench.sweep.plan import Point, SweepPlan
from adaserve.bench.sweep.simulated import (
    LIMIT,
    TOLD,
    Simulator,
    SimulatorCheck,
    markdown,
    sim_requests,
    to_json,
)
from adaserve.bench.sweep.store import Store
from adaserve.bench.sweep.systems import system
from adaserve.scheduler.admission.situation import PrefillConfig
from adaserve.scheduler.costs.latency import LatencyModel, TabulatedCost
from adaserve.scheduler.simulator.trees import SyntheticChildren, acceptance_of_chains
from adaserve.scheduler.simulator.workload import TextModel
from tests.bench.sweep.factories import SLO_MS, TTFT_SLO_MS, finished_sweep

PROFILE = LatencyModel(
    draft=TabulatedCost((1.0, 64.0), (0.0003, 0.001)),
    verify=TabulatedCost((1.0, 64.0), (0.010, 0.060)),
    overhead_s=0.001,
)
PLAN = SweepPlan(
    policies=("chain-2", "priced"), side_policies=("priced",), loads=(0.3, 0.6), seeds=(0,), seconds=10.0
)


def served(folder: Path, plan: SweepPlan = PLAN, **server: Any) -> Store:
    """A sweep whose servers counted ``server``: values, or functions of the block's position."""
    store = finished_sweep(folder, plan, lambda _, i: 13.0 if i % 4 else 9.0, n=24)
    store.write_head({**store.head(), "latency_model": PROFILE.to_json()})
    for k, line in enumerate(list(store.finished().values())):
        made = {name: v(k) if callable(v) else v for name, v in server.items()}
        store.add({**line, "server": {**line["server"], **made}})
    return store


def test_time_outside_the_models_is_a_line_over_running_requests(tmp_path: Path) -> None:
    store = served(
        tmp_path, running=lambda k: 1.0 + k, iterations=100, seconds={"draft": 0.1, "verify": 1.0},
        loop_s=lambda k: 0.011 + 0.003 + 0.0005 * (1.0 + k),
    )  # fmt: skip
    assert fitted_overhead(Results(store)) == (pytest.approx(0.003), pytest.approx(0.0005))


def test_a_few_odd_blocks_do_not_bend_the_line(tmp_path: Path) -> None:
    """Of twelve, the two with the most running requests: least squares would have a slope below 0."""
    store = served(
        tmp_path, replace(PLAN, seeds=(0, 1, 2)), running=lambda k: 1.0 + k, iterations=100,
        seconds={"draft": 0.1, "verify": 1.0},
        loop_s=lambda k: 0.011 + (0.003 + 0.0005 * (1.0 + k) if k < 10 else 0.0),
    )  # fmt: skip
    fixed_s, row_s = fitted_overhead(Results(store))
    assert fixed_s == pytest.approx(0.003, rel=0.2) and row_s == pytest.approx(0.0005, rel=0.2)


def test_without_counts_the_profiles_own_overhead_stays(tmp_path: Path) -> None:
    assert fitted_overhead(Results(served(tmp_path, loop_s=None))) == (0.001, 0.0)


def test_forwards_take_what_they_took_under_load(tmp_path: Path) -> None:
    """Blocks of 2 and of 32 tokens, the small ones as profiled and the large ones half as slow again."""

    def size(k: int) -> float:
        return 2.0 if k % 2 else 32.0

    store = served(
        tmp_path, running=size, tree_nodes=0.0, iterations=100, depth=0.0,
        seconds=lambda k: {"draft": 0.0, "verify": 100 * PROFILE.verify_s(size(k)) * (1.0 if k % 2 else 1.5)},
    )  # fmt: skip
    model = as_served(PROFILE, Results(store))
    assert model.verify_s(2.0) == pytest.approx(PROFILE.verify_s(2.0), rel=0.01)
    assert model.verify_s(32.0) == pytest.approx(1.5 * PROFILE.verify_s(32.0), rel=0.01)
    assert PROFILE.verify_s(8.0) < model.verify_s(8.0) < 1.5 * PROFILE.verify_s(8.0)


def test_prefills_take_what_servers_counted(tmp_path: Path) -> None:
    """24 prompts of 20 tokens in 60 forwards or in 3: 5 ms for each forward, and 1 ms per token."""

    def forwards(k: int) -> int:
        return 60 if k % 2 else 3

    store = served(
        tmp_path, prefills=forwards, iterations=100,
        seconds=lambda k: {"draft": 0.0, "verify": 1.0, "prefill": 0.005 * forwards(k) + 0.001 * 480},
    )  # fmt: skip
    cost = prefills_as_served(PROFILE, Results(store))
    assert cost is not None
    assert cost.alone(np.array([8.0, 128.0])).tolist() == pytest.approx([0.013, 0.133])
    assert float(cost.alone(np.array([1.0]))[0]) == pytest.approx(PROFILE.verify_s(1.0) + 0.0003)
    assert prefills_as_served(PROFILE, Results(served(tmp_path / "none", iterations=100))) is None


def test_forwards_with_prompts_in_them_tell_no_time_if_others_do(tmp_path: Path) -> None:
    """Every second block took three times as long: its verifications read prompts, too."""
    store = served(
        tmp_path, running=4.0, tree_nodes=0.0, iterations=100, prefills=10, mixed=lambda k: 10 * (k % 2),
        loop_s=lambda k: 0.015 + 0.02 * (k % 2),
        seconds=lambda k: {
            "draft": 0.0, "verify": 100 * PROFILE.verify_s(4.0) * (3.0 if k % 2 else 1.0),
            "prefill": 1e-9 if k % 2 else 0.5,
        },
    )  # fmt: skip
    results = Results(store)
    assert as_served(PROFILE, results).verify_s(4.0) == pytest.approx(PROFILE.verify_s(4.0), rel=0.01)
    cost = prefills_as_served(PROFILE, results)
    assert cost is not None and 10 * float(cost.alone(np.array([48.0]))[0]) == pytest.approx(0.5, rel=0.1)
    every = list(store.finished().values())
    for line in every:
        store.add({**line, "server": {**line["server"], "mixed": 10}})
    assert as_served(PROFILE, Results(store)).verify_s(4.0) > 1.5 * PROFILE.verify_s(4.0), (
        "nothing else is known"
    )


def test_prompts_share_forwards_in_a_replay_if_they_did(tmp_path: Path) -> None:
    """By what the server of the block counted: those of sweeps before there was that had none."""
    simulator = Simulator(Results(served(tmp_path)))
    priced, chain = system("priced"), system("chain-2")
    for server, mixed in (({"mixed": 7}, True), ({"mixed": 0}, False), ({}, False), (None, False)):
        replica = simulator._replica(priced, server)
        assert replica.mixed == mixed and replica.prefill.pacing == "slack" and replica.prefill.gate
    for without_gate in (chain, system("sglang")):
        assert simulator._replica(without_gate, {"mixed": 0}).prefill == PrefillConfig(256)


def test_drafts_take_what_they_took_under_load(tmp_path: Path) -> None:
    """The first step takes four times and every other one twice as long as profiled."""
    plan = replace(PLAN, policies=("chain-2", "chain-4"))
    store = finished_sweep(tmp_path, plan, lambda _, i: 13.0, n=24)
    store.write_head({**store.head(), "latency_model": PROFILE.to_json()})
    for k, line in enumerate(list(store.finished().values())):
        n = 5 if k // 2 % 2 else 20
        steps = int(line["setting"][-1])
        first_s, later_s = PROFILE.draft_s(n, 1, 1), (steps - 1) * PROFILE.draft_step_s(n)
        seconds = {"draft": 100 * (4 * first_s + 2 * later_s), "verify": 100 * PROFILE.verify_s(n * 2.0)}
        made = {"running": float(n), "tree_nodes": 1.0, "iterations": 100, "seconds": seconds}
        store.add({**line, "server": {**line["server"], **made}})
    model = as_served(PROFILE, Results(store))
    for n in (5, 20):
        assert model.draft_s(n, 1, 1) == pytest.approx(4 * PROFILE.draft_s(n, 1, 1), rel=0.02)
        assert model.draft_step_s(n) == pytest.approx(2 * PROFILE.draft_step_s(n), rel=0.02)


def test_drafts_of_one_length_tell_no_first_step_from_later_ones(tmp_path: Path) -> None:
    """What takes a little less than profiled with few requests and a little more with many would be put down
    to later steps that take many times as long."""
    store = finished_sweep(tmp_path, replace(PLAN, policies=("chain-2",)), lambda _, i: 13.0, n=24)
    store.write_head({**store.head(), "latency_model": PROFILE.to_json()})
    for k, line in enumerate(list(store.finished().values())):
        n, times = ((5, 0.7), (20, 1.15))[k % 2]
        seconds = {"draft": 100 * times * PROFILE.draft_s(n, 2, 1), "verify": 100 * PROFILE.verify_s(n * 2.0)}
        made = {"running": float(n), "tree_nodes": 1.0, "iterations": 100, "seconds": seconds}
        store.add({**line, "server": {**line["server"], **made}})
    model = as_served(PROFILE, Results(store))
    for n in (5, 20):
        assert 0.69 <= model.draft_s(n, 1, 1) / PROFILE.draft_s(n, 1, 1) <= 1.16
        assert 0.69 <= model.draft_step_s(n) / PROFILE.draft_step_s(n) <= 1.16


def test_acceptance_is_that_of_the_chains(tmp_path: Path) -> None:
    """The records say 1.8 tokens per verification of chain-2."""
    means = fitted_means(Results(served(tmp_path)))
    assert set(means) == set(SLO_MS) and len(set(means.values())) == 1
    made = acceptance_of_chains(SyntheticChildren(), TextModel(other=means["chat"]), 2)
    assert made == pytest.approx(1.8, abs=0.02)


def test_acceptance_is_that_of_the_same_kind_of_traffic(tmp_path: Path) -> None:
    """Two of the three chain blocks are of plain traffic, and one is of text that repeats itself."""
    plan = replace(PLAN, axes=("load", "kinds"), side_policies=("chain-2",), kinds=("repetition",))
    store = served(tmp_path, plan)
    name = "load0.60=repetition.chain-2.s0.b0"
    write_records(store.records_path(name), [replace(r, accept_length=1.2) for r in store.records(name)])
    results = Results(store)
    plain, repeating = (fitted_means(results, kind)["chat"] for kind in (None, "repetition"))
    assert repeating < plain - 0.2
    assert fitted_means(results, "long")["chat"] == pytest.approx((2 * plain + repeating) / 3, abs=0.05)


def test_it_is_said_where_acceptance_is_the_default(tmp_path: Path) -> None:
    assert "chains of this sweep" in Simulator(Results(served(tmp_path / "chains"))).acceptance
    bare = served(tmp_path / "bare", replace(PLAN, policies=("adaserve", "priced")))
    simulator = Simulator(Results(bare))
    assert "No chain played" in simulator.acceptance
    assert simulator._text == {None: TextModel()}, "which knows that classes differ"


def test_the_simulator_has_the_requests_of_the_records(tmp_path: Path) -> None:
    store = served(tmp_path)
    records = store.records("load0.60.priced.s0.b0")
    requests = sim_requests(records, TextModel(), 0)
    assert [r.arrival_s for r in requests] == sorted(r.scheduled_s for r in records)
    for r in requests:
        assert (r.prompt_tokens, r.output_tokens) == (20, 41)
        assert r.tpot_slo_s == SLO_MS[r.slo_class] / 1e3 and r.ttft_slo_s == TTFT_SLO_MS / 1e3


def test_later_turns_of_a_conversation_find_the_earlier_ones_in_the_cache(tmp_path: Path) -> None:
    """20 tokens, an answer of 41, and 61 + 12 tokens in the second turn; others share nothing."""
    records = served(tmp_path).records("load0.60.priced.s0.b0")[:3]
    turns = [
        replace(r, scheduled_s=float(k), session_id=name, prompt_tokens=tokens)
        for k, (r, name, tokens) in enumerate(zip(records, "aba", (20, 20, 73), strict=True))
    ]
    assert [r.prompt_tokens for r in sim_requests(turns, TextModel(), 0)] == [20, 20, 12]


def test_a_request_that_failed_is_as_long_as_others_of_its_class(tmp_path: Path) -> None:
    records = served(tmp_path).records("load0.60.priced.s0.b0")
    failed = replace(records[0], error="not answered in time", prompt_tokens=0, output_tokens=0)
    requests = sim_requests([failed, *records[1:]], TextModel(), 0)
    assert {(r.prompt_tokens, r.output_tokens) for r in requests} == {(20, 41)}


def test_every_system_is_replayed_and_the_limit_with_them(tmp_path: Path) -> None:
    store = served(tmp_path)
    simulator, shown = Simulator(Results(store)), list[str]()
    found = simulator.agreements(shown.append)
    assert len(shown) == simulator.steps == len(found), "for a progress bar"
    assert {(a.point.load, a.policy) for a in found} == {
        (load, name) for load in (0.3, 0.6) for name in ("chain-2", "priced", LIMIT, TOLD)
    }
    assert all(a.simulated.requests == a.engine.requests == 24 for a in found)
    limit = {a.point: a.simulated.attained for a in found if a.policy == LIMIT}
    assert all(a.simulated.attained <= limit[a.point] + 1 for a in found if a.policy == "priced")
    text = markdown(found)
    assert "Told every outcome" in text and "tells it the end of every answer" in text
    assert text.count("| priced |") == 2 and TOLD not in text and len(to_json(found)) == len(found)


def test_what_agrees_and_what_is_in_the_same_order_is_counted() -> None:
    def row(policy: str, engine: float, simulated: float) -> SimulatorCheck:
        made, told = (Block(100, 100 * v, 0, 100 * v, 100) for v in (engine, simulated))
        return SimulatorCheck(Point(0.6), policy, made, told)

    text = markdown([row("a", 0.9, 0.94), row("b", 0.6, 0.7), row("c", 0.58, 0.75), row("d", 0.2, 0.8)])
    # b and c are too close in the engine to have an order; the simulator has d above b and c.
    assert "1 of 4 systems within 5 points; 3 of 5 pairs" in text
    assert text.index("| a |") < text.index("| b |") < text.index("| d |")
    assert "| a | 90.0% | 94.0% | +4.0 |" in text
    assert replace(row("a", 0.9, 0.9)).points == 0
