"""The simulator: conservation, order of policies, routers, memory, prefill, fleets, recordings."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sched_factories import running

from adaserve.config import AdaServeConfig
from adaserve.scheduler.acceptance_calibration import N_BINS
from adaserve.scheduler.admission.interference import RecentWork
from adaserve.scheduler.admission.prefill import plan_prefill
from adaserve.scheduler.admission.situation import PrefillConfig, Situation, WaitingBatch
from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.costs.latency import ForwardCost, LatencyModel
from adaserve.scheduler.interface import Context, DraftPlan, IterationPlan, Selection
from adaserve.scheduler.iteration_recording import (
    FLUSH_EVERY,
    RecordedPrefill,
    Recorder,
    ReplayError,
    read_events,
    read_recording,
    replay,
)
from adaserve.scheduler.policies import build_policy
from adaserve.scheduler.simulator.capacity import min_replicas
from adaserve.scheduler.simulator.hardware import hardware_latency, kv_capacity_tokens
from adaserve.scheduler.simulator.order import build_order
from adaserve.scheduler.simulator.paced import PacedReplica, PaceTable, learn_pace
from adaserve.scheduler.simulator.recorded import (
    RECORDED_TEXT,
    RecordedChildren,
    load_children,
    load_recorded,
    prefill_cost,
)
from adaserve.scheduler.simulator.replica import ReplicaConfig
from adaserve.scheduler.simulator.router import build_router
from adaserve.scheduler.simulator.rows import Rows
from adaserve.scheduler.simulator.run import (
    SimulationConfig,
    build_replica,
    serve,
    simulate,
    to_record,
    violations,
)
from adaserve.scheduler.simulator.trees import SyntheticChildren, TreeSampler
from adaserve.scheduler.simulator.workload import TextModel, make_requests, synthetic_trace
from adaserve.slo.classes import SLOConfig
from adaserve.slo.lengths import OutputLengths

LATENCY = hardware_latency("llama-3.1-70b", "a100", 4)
MIX = {"coding": 0.6, "chat": 0.2, "summarization": 0.2}
SERVED = AdaServeConfig().for_prefills(chunk_tokens=256)


def requests(n=60, rate=3.0, seed=0):
    return make_requests(synthetic_trace(n, rate, seed, MIX), SLOConfig(), 0.03, TextModel(), seed)


def config(policy="adaserve", **over):
    replica = ReplicaConfig(
        LATENCY, **{k: over.pop(k) for k in list(over) if k in ReplicaConfig.__dataclass_fields__}
    )
    return SimulationConfig(replica, policy, PolicyConfig(latency=LATENCY), **over)


@pytest.mark.parametrize(
    "policy", ["adaserve", "priced", "chain-3", "none", "turbospec", "fcfs", "stta", "sep-pipe"]
)
@pytest.mark.parametrize("mixed", [True, False])
def test_every_request_gets_exactly_its_tokens(policy, mixed):
    result = simulate(requests(25), config(policy, mixed=mixed))
    for request in result.requests:
        assert request.finished and request.prefilled == request.prompt_tokens
        assert request.produced == request.output_tokens - 1
        assert request.arrival_s < request.first_token_s <= request.last_token_s
    replica = result.replicas[0]
    assert not replica.busy and replica._reserved == 0
    assert {r.rid for r in replica.done} == {r.rid for r in result.requests}


def test_same_seed_same_result_other_seed_another():
    def ends(seed):
        return [r.last_token_s for r in simulate(requests(20), config(seed=seed)).requests]

    assert ends(1) == ends(1) != ends(2)


def test_iterations_that_read_prompts_teach_no_time_around_forwards():
    """What the draft model takes to read a chunk is in no forward that is timed."""
    replica = build_replica(config("priced", mixed=True))
    replica.outcomes = []
    for request in requests(40, rate=6.0):
        replica.submit(request)
    while replica.busy:
        replica.step()
    chunked = [outcome.prefilled for outcome in replica.outcomes if outcome.prefill_tokens]
    assert chunked and all(chunked)


@pytest.mark.parametrize("play", [True, False])
@pytest.mark.parametrize("alone", [None, ForwardCost(0.05, per_token_s=4e-4)])
def test_what_a_chunk_adds_to_a_verification_is_learned(play, alone):
    """By which the rules go while requests decode, also where others use the host: target and draft, or what
    a token takes in forwards of prompts alone."""
    slow = ((0.0, math.inf, 3.0),)
    cfg = config("chain-2", noise=0.0, prefill_cost=alone, prefill=PrefillConfig(64), busy=slow)
    replica = build_replica(cfg) if play else TestLookedUpIterations().fleet(cfg)[0]
    for request in requests(40, rate=6.0):
        request.arrival_s = 0.0
        replica.submit(request)
    while replica.busy:
        replica.step()
    one = alone.per_token_s if alone else LATENCY.verify_s(65.0) - LATENCY.verify_s(64.0)
    more = 0.0 if alone else LATENCY.draft_step_s(64)
    assert replica._beside.seconds(64) == pytest.approx(3.0 * (64 * one + more), rel=0.1)
    assert replica._prefills.seconds(64) > 1.5 * replica._beside.seconds(64)


def test_overlap_lag_is_survived():
    result = simulate(requests(25), config("priced", lag=True))
    assert all(r.finished for r in result.requests)


@pytest.mark.parametrize("lag", [False, True])
def test_a_policy_is_called_as_the_engine_calls_it(lag):
    """Batches are up to date; under overlap an outcome comes between the next plan and its selection. What it
    says of a request that has ended is forgotten afterwards."""
    replica, calls = build_replica(config("priced", lag=lag)), []
    policy, rows = replica.policy, replica.rows
    plan, select, observe, forget = policy.plan, policy.select, policy.observe, policy.forget

    def planned(batch, now_s):
        assert np.array_equal(batch.decoded_tokens, rows.decoded)
        assert np.array_equal(batch.context_tokens, rows.prompt + rows.decoded)
        calls.append("plan")
        return plan(batch, now_s)

    policy.plan = planned
    policy.select = lambda *given: calls.append("select") or select(*given)
    policy.observe = lambda outcome: calls.append(outcome.plan.running.rids) or observe(outcome)
    policy.forget = lambda rid: calls.append(f"forget {rid}") or forget(rid)
    for request in requests(6):
        replica.submit(request)
    while replica.busy:
        replica.step()
    steps = [c if isinstance(c, str) else "observe" for c in calls if isinstance(c, tuple) or " " not in c]
    once = ["plan", "observe", "select"] if lag else ["plan", "select", "observe"]
    expected = once * (len(steps) // 3 + 1)
    if lag:  # the first plan has nothing to learn from, and the last outcome is not heard of any more
        expected.remove("observe")
    assert steps == expected[: len(steps)]
    for at, call in enumerate(calls):
        if isinstance(call, str) and call.startswith("forget"):
            assert not any(call.split()[1] in c for c in calls[at:] if isinstance(c, tuple))


def test_one_request_alone_takes_the_latency_model_s_time():
    lone = requests(1)
    lone[0].output_tokens = lone[0].cap_tokens = 101
    simulate(lone, config("none", noise=0.0))
    context = lone[0].prompt_tokens + 50
    assert lone[0].last_token_s - lone[0].first_token_s == pytest.approx(
        100 * LATENCY.verify_s(1.0, Context(context)), rel=0.01
    )


def test_kv_limit_holds_requests_back_and_refuses_the_impossible():
    crowd = requests(12, rate=1000.0)
    crowd[3].prompt_tokens = 10_000
    result = simulate(crowd, config("none", kv_tokens=2500))
    assert crowd[3].shed and not crowd[3].finished
    assert all(r.finished for r in crowd if r is not crowd[3])
    peak = max(entry.rows for entry in result.replicas[0].log)
    assert peak < 11


def test_only_who_was_turned_away_got_an_answer_that_says_so():
    load = requests(3)
    load[0].prompt_tokens = 10_000
    records = simulate(load, config("none", kv_tokens=2500, drain_s=0.0)).records()
    assert [r.http_status for r in records][::2] == [429, None]
    assert [r.error for r in records][::2] == ["rejected-saturated", "unfinished"]


def test_sampler_accepts_as_often_as_it_says():
    sampler = TreeSampler(SyntheticChildren(miscalibration=0.0), np.random.default_rng(0))
    n = 400
    plan = build_policy("adaserve").plan(running(n, max_depth=4), 1.0)
    plan = replace(plan, draft=DraftPlan(3, 2), budget=10 * n)
    expected = seen = 0.0
    for _ in range(20):
        drafted = sampler.draft(plan.draft, np.full(n, 0.7), np.zeros(n), lambda s, f: True)
        m = drafted.trees.n_nodes
        everything = Selection(np.ones(m, np.bool_), np.full(n, m // n), np.zeros(n, np.int64), np.ones(n))
        accepted = drafted.fate(everything.keep)
        expected += float(np.exp(drafted.trees.logprob).sum())
        seen += float(accepted.sum())
        assert (accepted.reshape(n, -1).sum(axis=1) <= 3).all()
    assert seen / expected == pytest.approx(1.0, abs=0.03)


def test_miscalibration_makes_the_draft_overconfident():
    rng = np.random.default_rng(0)
    q, p = SyntheticChildren(miscalibration=0.5).children(rng, np.full(3000, 0.8), np.zeros(3000), 1, 2)
    sure = q[:, 0, 0] > 0.9
    assert p[sure, 0, 0].mean() < q[sure, 0, 0].mean() - 0.03


def test_speculation_beats_continuous_batching_under_load():
    load = requests(150, rate=3.3)
    got = {}
    for policy in ("priced", "adaserve", "none"):
        for request in load:  # fresh copies of the same requests
            request.produced = request.prefilled = request.iterations = 0
            request.first_token_s = request.last_token_s = math.nan
        got[policy] = violations(simulate(load, config(policy)).records())
    assert got["priced"] <= got["none"] / 2 and got["adaserve"] <= got["none"] / 1.5


@pytest.mark.parametrize("name", ["clairvoyant", "true-probabilities"])
def test_a_policy_that_knows_the_truth_may_draft_nothing(name):
    """A draft that costs more than decoding: after a probe most iterations have no candidates."""
    slow_draft = replace(LATENCY, draft=LATENCY.verify)
    config = SimulationConfig(
        ReplicaConfig(slow_draft), name, PolicyConfig(latency=slow_draft, early_stop=True)
    )
    requests = make_requests(synthetic_trace(30, 4.0, 0, MIX), SLOConfig(), 0.03, TextModel(), 0)
    result = simulate(requests, config)
    depths = [entry.depth for entry in result.replicas[0].log]
    assert 0 in depths and max(depths) > 0 and all(r.finished for r in requests)


def test_a_prompt_that_the_draft_skips_does_not_wait_for_the_draft():
    """TurboSpec: above the batch size where speculation first did not pay, only the target reads prompts."""
    slow_draft = replace(LATENCY, draft=LATENCY.verify)
    first_token_s, drafts = [], []
    for skips in (False, True):
        load = requests(3)
        for i, request in enumerate(load):
            request.arrival_s, request.prompt_tokens = 1.0 + 0.4 * i, 100
            request.output_tokens = request.cap_tokens = 40
        settings = PolicyConfig(latency=slow_draft, turbo_skip_prefill=skips)
        replica = ReplicaConfig(slow_draft, mixed=False, noise=0.0)
        simulate(load, SimulationConfig(replica, "turbospec", settings))
        first_token_s.append([r.first_token_s for r in load])
        drafts.append([r.drafts for r in load])
    assert drafts == [[True] * 3, [True, True, False]]
    waited = np.subtract(*first_token_s)
    assert waited == pytest.approx([0.0, 0.0, slow_draft.draft_step_s(100)])


def test_a_host_that_reads_slowly_is_simulated_as_well():
    """A large model on a CPU: a chunk of a prompt takes a minute, and that is no error."""
    latency = LatencyModel(ForwardCost(0.01), ForwardCost(0.2, per_token_s=0.12))
    load = requests(2)
    for request in load:
        request.prompt_tokens, request.output_tokens, request.cap_tokens = 900, 5, 5
    simulate(load, SimulationConfig(ReplicaConfig(latency), "none"))
    assert all(r.finished and r.first_token_s - r.arrival_s > 60 for r in load)


def test_streaming_costs_time_per_request():
    """Twice the requests, twice what is spent outside the models."""
    requests = [
        make_requests(synthetic_trace(n, 1e6, 0, MIX), SLOConfig(), 0.03, TextModel(), 0) for n in (4, 8)
    ]
    added = []
    for mine in requests:
        seconds = []
        for row_s in (0.0, 0.01):
            config = SimulationConfig(ReplicaConfig(LATENCY, noise=0.0, row_overhead_s=row_s), "none")
            log = simulate([replace(r) for r in mine], config).replicas[0].log
            seconds.append(next(entry.seconds for entry in log if entry.rows == len(mine)))
        added.append(seconds[1] - seconds[0])
    assert added == pytest.approx([0.04, 0.08])


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("play", [True, False])
def test_a_busy_host_slows_everything_down(play, mixed):
    """Also what is around the forwards, and what drafts read of prompts: a run takes three times as long."""
    latency = LatencyModel(ForwardCost(1e-3, 1e-5), ForwardCost(2e-3, 1e-5), overhead_s=5e-3)
    ends = []
    for times in (1.0, 3.0):
        load = requests(3)
        for request in load:
            request.arrival_s, request.prompt_tokens = 0.0, 100
        cfg = SimulationConfig(
            ReplicaConfig(
                latency, mixed=mixed, prefill=PrefillConfig(150), noise=0.0, row_overhead_s=1e-3,
                busy=((0.0, math.inf, times),),
            ),
            "chain-2", PolicyConfig(latency=latency),
        )  # fmt: skip
        fleet = [build_replica(cfg)] if play else TestLookedUpIterations().fleet(cfg)
        serve(load, fleet, cfg)
        ends.append([r.last_token_s for r in load])
    assert ends[1] == pytest.approx([3.0 * s for s in ends[0]])


def test_prompts_that_nobody_decodes_beside_are_split_as_on_a_server():
    """Two halves of a short prompt would cost more than they spare, so the chunk ends with the first one."""
    load = requests(2)
    for request in load:
        request.arrival_s, request.prompt_tokens, request.tpot_slo_s = 0.0, 100, math.inf
    rule = AdaServeConfig().for_prefills(chunk_tokens=150)
    cfg = config("none", prefill=rule, mixed=False)
    replica = build_replica(cfg)
    for request in load:
        replica.submit(request)
    plan = plan_prefill(replica._situation(load), 0)
    assert [tokens for _, tokens in replica._take_chunk()] == [100] == [plan.tokens]


def rows_of(slos, classes=None):
    """Running requests with these TPOT SLOs, whose first tokens came at 0, and none since."""
    rows, load = Rows(OutputLengths()), requests(len(slos))
    for i, request in enumerate(load):
        request.first_token_s, request.tpot_slo_s = 0.0, slos[i]
        request.slo_class = "chat" if classes is None else classes[i]
    rows.join(load)
    return rows


def test_the_orders_of_continuous_batching():
    """Who decodes: the oldest 32; as many as end before the next deadline; the class of who is due first."""
    latency = LatencyModel(ForwardCost(1e-3), ForwardCost(0.0, per_token_s=0.010))
    fcfs, stta, sep_pipe = (build_order(name, latency) for name in ("fcfs", "stta", "sep-pipe"))
    assert fcfs and stta and sep_pipe and build_order("none", latency) is None
    many = rows_of(np.ones(34))
    many.requests[3].arrival_s, many.requests[0].arrival_s = 1e6, 1e5
    assert fcfs(many, 0.0).tolist() == [i for i in range(34) if i not in (0, 3)]
    assert fcfs(rows_of(np.ones(32)), 0.0) is None
    due = rows_of([1.0, 0.025, 9.0, 0.030], ["chat", "coding", "chat", "coding"])
    assert stta(due, 0.0).tolist() == [1, 3], "two tokens take 20 ms of 25"
    assert stta(due, 0.012).tolist() == [1]
    assert stta(due, 0.020).tolist() == [0, 1, 2, 3], "who is late already does not shrink the batch"
    assert stta(due, 9.0) is None
    assert sep_pipe(due, 0.0).tolist() == [1, 3]
    assert sep_pipe(rows_of(np.ones(2)), 0.0) is None


def test_routers_spread_the_load():
    for router in ("round-robin", "least-work", "slo"):
        result = simulate(requests(60, rate=12.0), config("none", replicas=4, router=router))
        done = [len(r.done) for r in result.replicas]
        assert sum(done) == 60 and min(done) >= 5
    with pytest.raises(ValueError, match=r"unknown router 'x'.*least-work"):
        simulate(requests(2), config(router="x"))


def test_lax_requests_are_packed_where_they_still_attain():
    """On the busiest replica that is fast enough and not crowded; strict ones go where least work is left."""
    route, lax = build_router("slo"), requests(1)[0]

    def chosen(slo_s, pace_s=(0.03, 0.03, 0.03, 0.03)):
        work = zip((100, 140, 90, 900), pace_s, strict=True)
        replicas = [SimpleNamespace(load_tokens=w, seconds_per_token=s) for w, s in work]
        return route(replicas, replace(lax, tpot_slo_s=slo_s))

    assert chosen(0.1) == 1 and chosen(0.1, (0.03, 0.06, 0.03, 0.03)) == 0
    assert chosen(0.05) == chosen(math.inf) == 2


class TestPrefill:
    def plan(self, config, now_s):
        queue = WaitingBatch(np.array([0.0, 1.0, 2.0]), np.array([9.0, 2.0, 9.0]), np.array([50, 40, 30]),
                             np.array([False, False, True]), np.full(3, np.inf), np.zeros(3))  # fmt: skip
        chunks = np.array([1, 512]), np.array([0.03, 0.1])
        interference = RecentWork().interference(LATENCY, running(3), 3, chunks, now_s)
        return plan_prefill(Situation(config, queue, now_s, interference), 3)

    @pytest.mark.parametrize(
        ("order", "want"), [("fcfs", [2, 0, 1]), ("slack", [2, 1, 0]), ("short", [2, 1, 0])]
    )
    def test_orders_started_prompts_first(self, order, want):
        assert self.plan(PrefillConfig(order=order), 2.5).order.tolist() == want


def test_hardware_figures_match_the_published_table():
    got = LATENCY.verify_s(np.array([128.0, 256.0, 512.0, 1024.0]))
    assert got * 1e3 == pytest.approx([54, 77, 124, 217], rel=0.02)
    assert hardware_latency("qwen2.5-32b", "a100", 2).baseline_s() == pytest.approx(0.028, rel=0.05)
    assert kv_capacity_tokens("llama-3.1-70b", "a100", 4) > 300_000
    with pytest.raises(ValueError, match="does not fit"):
        kv_capacity_tokens("llama-3.1-70b", "l40s", 1)
    with pytest.raises(ValueError, match=r"unknown GPU 'b900'.*h100"):
        hardware_latency("llama-3.1-8b", "b900", 1)


class TestCapacity:
    @given(st.integers(1, 60))
    def test_finds_the_smallest_size(self, need):
        answer = min_replicas(lambda n: 1.0 if n >= need else 0.5, 0.95, 64)
        assert answer.replicas == need and len(answer.tried) <= 13

    def test_says_when_nothing_is_enough(self):
        assert min_replicas(lambda n: 0.5, 0.95, 8).replicas is None


class TestLookedUpIterations:
    TABLE = PaceTable(
        n=np.array([1.0, 64.0]),
        seconds=np.array([0.03, 0.06]),
        verified=np.array([3.0, 200.0]),
        tokens={name: np.array([2.0, 1.5]) for name in MIX},
        middle=dict.fromkeys(MIX, 1.0),
        slope=0.3,
    )

    def fleet(self, cfg, table=None):
        rngs = np.random.default_rng(0).spawn(cfg.replicas)
        return [PacedReplica(table or self.TABLE, cfg.replica, rng, cfg.policy != "none") for rng in rngs]

    def test_agree_with_played_ones(self):
        """On one replica and a middling load, attainment within 6 points and mean TPOT within 12%."""
        cfg = config("chain-3", mixed=False)
        played, paced = requests(300, 2.8, 5), requests(300, 2.8, 5)
        result = simulate(played, cfg)
        serve(paced, self.fleet(cfg, learn_pace(paced, cfg)), cfg)
        records = [to_record(r) for r in paced]
        tpot, quick = (np.array([r.tpot_s for r in rs], float) for rs in (result.records(), records))
        assert np.nanmean(quick) == pytest.approx(np.nanmean(tpot), rel=0.12)
        assert violations(records) == pytest.approx(violations(result.records()), abs=0.06)

    def test_lines_go_on_and_one_size_is_a_line_without_a_slope(self):
        assert self.TABLE.at(self.TABLE.seconds, 127) == pytest.approx(0.09)
        one = replace(self.TABLE, n=np.array([1.0]))
        assert one.at(np.array([0.03]), 5) == 0.03

    @pytest.mark.parametrize("mixed", [True, False])
    def test_prompts_cost_what_they_cost_a_played_replica(self, mixed):
        """Chunk by chunk, each with what a forward takes whatever is in it."""
        ttft = []
        for play in (True, False):
            long = requests(1)
            long[0].prompt_tokens, long[0].output_tokens, long[0].cap_tokens = 2000, 5, 5
            cfg = config("chain-3", mixed=mixed, noise=0.0)
            serve(long, [build_replica(cfg)] if play else self.fleet(cfg), cfg)
            ttft.append(long[0].first_token_s - long[0].arrival_s)
        chunks = [512, 512, 512, 464]
        assert (
            ttft[0]
            == ttft[1]
            == pytest.approx(sum(LATENCY.verify_s(float(t)) + LATENCY.draft_step_s(float(t)) for t in chunks))
        )

    @pytest.mark.parametrize("mixed", [True, False])
    @pytest.mark.parametrize(("prefill", "shed"), [(PrefillConfig(), False), (SERVED, False), (SERVED, True)])
    def test_nothing_is_lost(self, mixed, prefill, shed):
        """Every request ends once, with exactly its tokens or with 429; nothing stays booked."""
        load = requests(80, rate=12.0)
        for request in load[::2]:
            request.ttft_slo_s = 1.0
        cfg = config(mixed=mixed, prefill=prefill, shed=shed, kv_tokens=5000, replicas=3)
        fleet = self.fleet(cfg)
        serve(load, fleet, cfg)
        done = [r for replica in fleet for r in replica.done]
        assert sorted(r.rid for r in done) == sorted(r.rid for r in load)
        for request in load:
            assert request.finished != request.shed
            assert not request.shed or math.isfinite(request.ttft_slo_s)
            if request.finished:
                assert request.produced == request.output_tokens - 1 >= request.iterations >= 0
                assert request.arrival_s < request.first_token_s <= request.last_token_s
        assert any(r.shed for r in load) == shed
        for replica in fleet:
            assert not replica.busy and replica._reserved == replica.load_tokens == 0

    def test_the_gate_holds_prompts_back(self):
        """As on a server: fewer requests run at a time, so TPOT SLOs are met."""
        met = []
        for prefill in (PrefillConfig(256), SERVED):
            load = requests(150, rate=4.0)
            cfg = config(mixed=False, prefill=prefill)
            serve(load, self.fleet(cfg), cfg)
            met.append(np.mean([to_record(r).met_tpot for r in load]))
        assert met[1] > met[0] + 0.1


def test_the_work_that_is_left_is_counted():
    """What routers compare, at every step: outputs by their caps, a tenth of the prompts."""
    load = make_requests(synthetic_trace(30, 8.0, 0, MIX), SLOConfig(), 0.03, TextModel(eos_share=0.5), 0)
    replica = build_replica(config("chain-2", prefill=PrefillConfig(128), shed=True, kv_tokens=4000))
    left = list(load)
    while left or replica.busy:
        while left and (left[0].arrival_s <= replica.now_s or not replica.busy):
            replica.submit(left.pop(0))
        replica.step()
        gone = [*left, *replica.done, *replica.rows.requests]
        waiting = [r for r in load if r not in gone]
        outputs = sum(r.cap_tokens for r in waiting) + (replica.rows.limit - replica.rows.decoded).sum()
        prompts = sum(r.prompt_tokens - r.prefilled for r in waiting)
        assert replica.load_tokens == pytest.approx(outputs + 0.1 * prompts)
    assert replica.load_tokens == 0 and len(replica.done) == 30


def test_a_prompt_that_overtakes_but_does_not_fit_stops_nobody():
    """The started one goes on, so that its memory is free some time."""
    long, urgent = requests(2)
    long.prompt_tokens, long.output_tokens, long.cap_tokens, long.ttft_slo_s = 2000, 10, 10, 60.0
    urgent.prompt_tokens, urgent.output_tokens, urgent.cap_tokens = 100, 10, 2000
    urgent.ttft_slo_s, urgent.arrival_s = 1.0, long.arrival_s + 0.1
    cfg = config("none", prefill=PrefillConfig(256, "deadline"), kv_tokens=3000, drain_s=20.0)
    simulate([long, urgent], cfg)
    assert long.finished and urgent.finished


class TestReplay:
    def record(self, path, policy="priced", n=15, **over):
        cfg = config(policy, **over)
        replica = build_replica(cfg)
        with Recorder(path) as recorder:
            spy(replica.policy, recorder)
            for request in requests(n, rate=50.0):
                replica.submit(request)
            while replica.busy:
                replica.step()
        return cfg

    @pytest.mark.parametrize("policy", ["adaserve", "priced", "turbospec"])
    def test_recorded_iterations_select_the_same(self, tmp_path, policy):
        cfg = self.record(tmp_path / "run.jsonl.gz", policy)
        assert sum(1 for _ in read_recording(tmp_path / "run.jsonl.gz")) > 30
        assert replay(tmp_path / "run.jsonl.gz", build_policy(policy, cfg.policy_config)) == []

    @pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
    def test_a_recording_ends_with_its_server(self, tmp_path, name):
        """Even within a line or a compressed block; what is whole can be read."""
        path = tmp_path / name
        self.record(path)
        whole = list(read_recording(path))
        path.write_bytes(path.read_bytes()[:-500])
        rest = list(read_recording(path))
        assert 0.5 * len(whole) < len(rest) < len(whole)
        assert [r.plan.iteration for r in rest] == [r.plan.iteration for r in whole[: len(rest)]]

    def test_a_compressed_recording_can_be_read_while_it_is_written(self, tmp_path):
        cfg = config("priced")
        replica = build_replica(cfg)
        recorder = Recorder(tmp_path / "run.jsonl.gz")
        spy(replica.policy, recorder)
        for request in requests(15, rate=50.0):
            replica.submit(request)
        while replica.busy:
            replica.step()
        written = sum(1 for _ in read_recording(tmp_path / "run.jsonl.gz"))
        recorder.close()
        total = sum(1 for _ in read_recording(tmp_path / "run.jsonl.gz"))
        assert total - FLUSH_EVERY <= written <= total and written > 0

    @pytest.mark.parametrize("name", ["run.jsonl", "v1.2-run.jsonl.gz", "run"])
    def test_a_restart_and_another_replica_record_to_files_of_their_own(self, tmp_path, name, caplog):
        with Recorder(tmp_path / name), Recorder(tmp_path / name):
            pass
        first = (tmp_path / name).read_bytes()
        self.record(tmp_path / name)
        assert (tmp_path / name).read_bytes() == first and caplog.text.count("holds another recording") == 2
        stem, dot, end = name.partition(".jsonl")
        assert {p.name for p in tmp_path.iterdir()} == {name, f"{stem}-2{dot}{end}", f"{stem}-3{dot}{end}"}
        assert sum(1 for _ in read_recording(tmp_path / f"{stem}-3{dot}{end}")) > 30

    def test_a_full_disk_ends_the_recording_and_nothing_else(self, tmp_path, caplog):
        replica = build_replica(config("priced"))
        recorder = Recorder(tmp_path / "run.jsonl")
        recorder.close()
        recorder._file = open("/dev/full", "w", buffering=1)  # noqa: SIM115
        spy(replica.policy, recorder)
        for request in requests(15, rate=50.0):
            replica.submit(request)
        while replica.busy:
            replica.step()
        assert caplog.text.count("no longer recorded") == 1
        recorder.close()

    def test_a_different_policy_is_noticed(self, tmp_path):
        self.record(tmp_path / "run.jsonl", "adaserve")
        other = build_policy("adaserve", PolicyConfig(latency=LATENCY, budget=60))
        assert {m.field for m in replay(tmp_path / "run.jsonl", other)} >= {"budget", "keep"}

    def test_trees_can_be_drawn_from_a_recording(self, tmp_path):
        self.record(tmp_path / "run.jsonl", "adaserve")
        source = load_children(tmp_path / "run.jsonl")
        q, p = source.children(np.random.default_rng(0), np.full(50, 0.7), np.zeros(50), 2, 3)
        assert q.shape == p.shape == (50, 2, 3)
        assert (p.sum(axis=2) <= 1 + 1e-9).all() and (q[:, :, 0] >= q[:, :, 1]).all()
        result = simulate(requests(10), replace(config("priced"), children=source))
        assert all(r.finished for r in result.requests)

    @pytest.mark.parametrize("policy", ["chain-1", "chain-3"])
    def test_requests_that_draw_from_a_recording_get_as_much_accepted(self, tmp_path, policy):
        """Whatever the simulator thinks of classes: the recording has the acceptance of that very text."""
        self.record(tmp_path / "run.jsonl", policy, n=60)
        made = [item.outcome.new_tokens for item in read_recording(tmp_path / "run.jsonl")]
        children = load_children(tmp_path / "run.jsonl")
        load = make_requests(synthetic_trace(60, 50.0, 1, MIX), SLOConfig(), 0.03, RECORDED_TEXT, 1)
        simulate(load, replace(config(policy), children=children))
        drawn = sum(r.produced for r in load) / sum(r.iterations for r in load)
        assert drawn == pytest.approx(np.concatenate(made).mean(), rel=0.05)

    def test_what_was_sure_in_a_recording_is_accepted_as_often_as_that(self):
        """And what was next to impossible as seldom: not as often as in the middle of a bin of claims."""
        sure = RecordedChildren(np.array([0.998]), 0.5, np.ones(N_BINS))
        q, p = sure.children(np.random.default_rng(0), np.full(9, 0.5), np.zeros(9), 1, 3)
        assert q[0, 0] == pytest.approx([0.998, 0.001, 0.0005]) and p == pytest.approx(q)

    def test_drafts_that_read_little_are_not_taken_for_a_fast_host(self, tmp_path):
        """Where contexts are long, most of a draft step is what it reads of them."""
        latency = LatencyModel(ForwardCost(1e-3, per_context_s=1e-5), ForwardCost(10e-3))
        settings = PolicyConfig(latency=latency, draft_windows=(64,))
        replica = build_replica(SimulationConfig(ReplicaConfig(latency), "chain-3", settings))
        with Recorder(tmp_path / "run.jsonl") as recorder:
            spy(replica.policy, recorder)
            for request in requests(8, rate=50.0):
                replica.submit(replace(request, prompt_tokens=2000))
            while replica.busy:
                replica.step()
        assert load_recorded([tmp_path / "run.jsonl"], latency).slowdown == pytest.approx(1.0, abs=0.05)

    def test_no_trees_can_be_drawn_where_none_was_verified(self, tmp_path):
        self.record(tmp_path / "run.jsonl", "adaserve")
        lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
        for line in lines:
            if line.get("selection"):
                line["selection"]["keep"] = [False] * len(line["selection"]["keep"])
        (tmp_path / "none.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        with pytest.raises(ValueError, match=r"no candidate was verified in .*none\.jsonl"):
            load_children(tmp_path / "none.jsonl")

    def test_a_recording_tells_how_busy_the_host_was(self, tmp_path):
        self.record(tmp_path / "run.jsonl", "adaserve")
        slowdown = load_recorded([tmp_path / "run.jsonl"], LATENCY).slowdown
        assert slowdown == pytest.approx(1.0, abs=0.05)
        lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
        for line in lines:
            if line.get("outcome"):  # however long prompts took that were read in every other cycle
                line["outcome"]["prefilled"] |= line["iteration"] % 2 == 0
                times = 100.0 if line["outcome"]["prefilled"] else 2.5
                line["outcome"]["total_s"] *= times
                line["outcome"]["since_last_s"] *= times
        (tmp_path / "busy.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (tmp_path / "empty.jsonl").write_text('{"schema_version": 3}\n')
        busy, empty = tmp_path / "busy.jsonl", tmp_path / "empty.jsonl"
        assert load_recorded([empty, busy], LATENCY).slowdown == pytest.approx(2.5 * slowdown, rel=0.05)
        with pytest.raises(ValueError, match=r"no iteration without prefills in .*empty\.jsonl"):
            load_recorded([empty], LATENCY)

    def test_recordings_of_several_replicas_count_alike(self, tmp_path):
        paths = [tmp_path / "0.jsonl", tmp_path / "1.jsonl"]
        for path, policy in zip(paths, ("adaserve", "chain-3"), strict=True):
            self.record(path, policy)
        each, both = [load_children(path) for path in paths], load_recorded(paths, LATENCY).children
        assert both.best.tolist() == sorted([*each[0].best, *each[1].best])

    def test_a_recording_tells_what_prefills_took(self, tmp_path):
        """Which differs from what verifications of as many tokens would take."""
        path = tmp_path / "run.jsonl"
        assert prefill_cost([], LATENCY, 3.0) is None
        with Recorder(path) as recorder:
            for tokens in (40, 200, 90, 256) * 5:
                recorder.prefilled(RecordedPrefill(tokens, 3.0 * (0.01 + 1e-4 * tokens)))
        cost = prefill_cost(list(read_events(path)), LATENCY, 3.0)
        assert (cost.fixed_s, cost.per_token_s) == pytest.approx((0.01, 1e-4), rel=0.05)
        assert list(read_recording(path)) == []

    @pytest.mark.parametrize("mixed", [True, False])
    def test_a_recording_tells_whether_prompts_shared_forwards(self, tmp_path, mixed):
        path = tmp_path / "run.jsonl"
        self.record(path, mixed=mixed)
        assert load_recorded([path], LATENCY).mixed == mixed

    def test_broken_recordings_are_named(self, tmp_path):
        for version, what in ((3, r"x.jsonl:2 is not a recorded iteration"), (2, "another version")):
            (tmp_path / "x.jsonl").write_text(f'{{"schema_version": {version}}}\n{{"iteration": 3}}\n')
            with pytest.raises(ReplayError, match=what):
                list(read_recording(tmp_path / "x.jsonl"))


def spy(policy, recorder):
    """Makes a policy's calls pass through the recorder."""
    plan, select, observe, forget = policy.plan, policy.select, policy.observe, policy.forget

    def planned(*args) -> IterationPlan:
        made = plan(*args)
        recorder.planned(made)
        return made

    def selected(plan, trees):
        selection = select(plan, trees)
        recorder.selected(plan)
        return selection

    def observed(outcome):
        observe(outcome)
        recorder.observed(outcome)

    def forgotten(rid):
        forget(rid)
        recorder.forget(rid)

    policy.plan, policy.select = planned, selected
    policy.observe, policy.forget = observed, forgotten
