"""What one more request is told: its TPOT from iterations that were seen, its wait from the queue."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from adaserve.scheduler.admission.interference import Interference, Stakes
from adaserve.scheduler.admission.prediction import TPOTPredictor, predicted_wait_s
from adaserve.scheduler.admission.situation import PrefillConfig, Situation, WaitingBatch
from adaserve.scheduler.costs.latency import ForwardCost, LatencyModel
from adaserve.scheduler.interface import DraftPlan, IterationPlan, Selection
from adaserve.scheduler.simulator.forecast_accuracy import close_share, predict_requests
from adaserve.scheduler.simulator.hardware import hardware_latency
from adaserve.scheduler.simulator.replica import ReplicaConfig
from adaserve.scheduler.simulator.run import SimulationConfig
from adaserve.scheduler.simulator.workload import TextModel, make_requests, synthetic_trace
from adaserve.slo.classes import SLOConfig, kind_of
from tests.scheduler.sched_factories import outcome, running, trees_from

# 10 ms and 1 ms per verified token; a draft step takes 1 ms.
LATENCY = LatencyModel(ForwardCost(0.001), ForwardCost(0.010, per_token_s=0.001))
CONFIG = PrefillConfig(order="deadline", pacing="slack", gate=1.1, patience_s=3.0, most_decodes=4)


def iteration(classes, tokens, cycle_s, total_s=0.5, kept=0, decoded=1):
    """One iteration of plain decoding, or with ``kept`` verified nodes for each request, which had
    ``decoded`` tokens."""
    n = len(classes)
    batch = running(n, slo_class=tuple(classes), context_tokens=0, decoded_tokens=decoded)
    trees = trees_from([[(-1, 0.9)] * kept for _ in range(n)])
    plan = IterationPlan(0, 0.0, batch, DraftPlan(int(kept > 0)), n * (1 + kept))
    counts = np.full(n, kept)
    selection = Selection(np.ones(n * kept, np.bool_), counts, counts, np.ones(n))
    made = outcome(plan, trees, selection, np.zeros(n * kept, np.bool_))
    return replace(made, new_tokens=np.asarray(tokens), since_last_s=cycle_s, total_s=total_s)


def predictor(*iterations):
    seen = TPOTPredictor(LATENCY)
    for one in iterations:
        seen.observe(one)
    return seen


def test_before_anything_was_served_it_is_plain_decoding():
    assert TPOTPredictor(LATENCY).tpot_s("chat", 1) == pytest.approx(0.011)
    assert TPOTPredictor(LATENCY).tpot_s("chat", 5) == pytest.approx(0.015)


def test_who_waits_fills_the_batch_up_to_its_usual_size():
    seen = predictor(*[iteration(["chat"] * 8, [1] * 8, cycle_s=0.020)] * 500)
    assert seen.with_one_more(running=3, waiting=0, slots=64) == 4
    assert seen.with_one_more(running=3, waiting=2, slots=64) == 6
    assert seen.with_one_more(running=3, waiting=50, slots=64) == 9
    assert seen.with_one_more(running=12, waiting=50, slots=64) == 13
    assert seen.with_one_more(running=12, waiting=50, slots=12) == 12
    assert TPOTPredictor(LATENCY).with_one_more(running=0, waiting=9, slots=64) == 10, "no size is usual yet"


def test_custom_requests_get_what_those_got_that_asked_for_as_much():
    batch = iteration(["custom", "custom"], [4, 2], cycle_s=0.040)
    slos = replace(batch.plan.running, tpot_slo_s=np.array([0.024, 0.100]))
    seen = predictor(replace(batch, plan=replace(batch.plan, running=slos)))
    assert seen.pace(kind_of("custom", 0.025), 2) == 4
    assert seen.pace(kind_of("custom", 0.105), 2) == 2
    assert seen.pace(kind_of("custom", 0.050), 2) == pytest.approx(3), "nobody asked for that: as all"
    assert seen.pace("custom", 2) == pytest.approx(3)


def test_a_class_gets_what_it_got():
    seen = predictor(iteration(["coding", "chat", "chat"], [4, 1, 3], cycle_s=0.040))
    # One more adds one verified token: a millisecond.
    assert seen.tpot_s("coding", 4) == pytest.approx(0.041 / 4)
    assert seen.tpot_s("chat", 4) == pytest.approx(0.041 / 2)
    assert seen.tpot_s("unseen", 4) == pytest.approx(0.041 / (8 / 3))
    assert seen.tpot_s("coding", 8) == pytest.approx(0.045 / 4)


def test_requests_that_may_not_speculate_say_nothing_of_others():
    both = iteration(["coding", "coding"], [4, 1], cycle_s=0.040)
    both.plan.running.max_depth[1] = 0
    alone = iteration(["coding"], [1], cycle_s=0.011)
    alone.plan.running.max_depth[0] = 0
    seen = predictor(both, alone)
    assert seen.tpot_s("coding", 2) == pytest.approx(0.040 / 4)
    assert seen.tpot_s("coding", 1) == pytest.approx(0.039 / 4)


def test_speculation_counts_for_those_that_join():
    seen = predictor(iteration(["chat"] * 4, [2] * 4, cycle_s=0.030, kept=2))
    assert seen.tpot_s("chat", 5) == pytest.approx((0.030 + 3 * 0.001) / 2)


def test_sizes_that_were_served_on_a_busy_host_are_as_quick_as_others_when_it_is_quiet():
    class Host(LatencyModel):
        slowdown = 1.0

    host = Host(LATENCY.draft, LATENCY.verify)
    seen = TPOTPredictor(host)
    seen.observe(iteration(["chat"] * 4, [1] * 4, cycle_s=0.014))
    Host.slowdown = 5.0
    seen.observe(iteration(["chat"] * 2, [1] * 2, cycle_s=0.060))
    assert seen.tpot_s("chat", 2) == pytest.approx(0.060)
    assert seen.tpot_s("chat", 4) == pytest.approx(0.070), "the host is as busy for more of them"
    Host.slowdown = 1.0
    assert seen.tpot_s("chat", 2) == pytest.approx(0.012)
    assert seen.tpot_s("chat", 4) == pytest.approx(0.014)


def test_who_joins_has_as_long_a_context_as_the_others():
    reading = LatencyModel(LATENCY.draft, ForwardCost(0.010, per_token_s=0.001, per_context_s=1e-6))
    seen, batch = TPOTPredictor(reading), iteration(["chat"] * 4, [1] * 4, cycle_s=0.018)
    batch.plan.running.context_tokens[:] = 1000
    seen.observe(batch)
    assert seen.tpot_s("chat", 6) == pytest.approx(0.018 + 2 * (0.001 + 1000e-6))


def test_sizes_are_remembered_apart():
    seen = predictor(iteration(["chat"], [3], 0.012), iteration(["chat"] * 8, [2] * 8, 0.030))
    assert seen.tpot_s("chat", 1) == pytest.approx(0.012 / 3)
    assert seen.tpot_s("chat", 9) == pytest.approx(0.031 / 2)
    assert seen.tpot_s("chat", 41) == pytest.approx((0.030 + 33 * 0.001) / 2)


@pytest.mark.parametrize("policy", ["priced", pytest.param("none", marks=pytest.mark.slow)])
def test_predictions_of_requests_that_arrive(policy):
    """Beside the load, what the class got lately counts: this removes bias and noise."""
    latency = hardware_latency("llama-3.1-70b", "a100", 4)
    mix = {"coding": 0.4, "chat": 0.3, "summarization": 0.3}
    served = ReplicaConfig(latency, mixed=False, prefill=CONFIG, max_running=64)
    steady = []
    for seed in range(3):
        trace = synthetic_trace(450, 2.5, seed, mix)
        requests = make_requests(trace, SLOConfig(), latency.baseline_s(), TextModel(), seed)
        steady += predict_requests(requests, SimulationConfig(served, policy))[60:390]
    delivered = [r.delivered_s for r in steady]
    by_load, told = [r.by_load_s for r in steady], [r.predicted_s for r in steady]
    for said in (by_load, told):
        assert abs(np.median(np.array(said) / delivered) - 1) < 0.08
    assert close_share(told, delivered) > close_share(by_load, delivered)


def test_a_request_that_comes_after_idle_time_is_predicted_as_the_one_before_it():
    """What a batch looked like when its iteration began is learned after it has gone on."""
    requests = make_requests(synthetic_trace(4, 0.001, 0, {"chat": 1.0}), SLOConfig(), 0.011, TextModel(), 0)
    alone = SimulationConfig(ReplicaConfig(LATENCY, noise=0.0), "none")
    for told in predict_requests(requests, alone):
        assert told.by_load_s == pytest.approx(0.011) == told.delivered_s


def test_a_prediction_that_was_not_made_is_not_a_wrong_one():
    nan = float("nan")
    assert close_share([1.0, nan, 1.1, 2.0], [1.0, 1.0, 1.0, 1.0]) == pytest.approx(2 / 3)
    assert np.isnan(close_share([nan], [1.0])) and np.isnan(close_share([], []))


def test_time_before_the_first_iteration_is_nobodys():
    """The prefill of a request, or idle time before it came, is not part of its TPOT."""
    first = iteration(["chat"], [2], 9.0, total_s=0.014, decoded=0)
    assert predictor(first).cycle_s(1) == pytest.approx(0.014)


def test_recent_iterations_count():
    slow, fast = iteration(["chat"], [1], 0.100), iteration(["chat"], [1], 0.020)
    assert predictor(slow, *[fast] * 100).tpot_s("chat", 1) == pytest.approx(0.020, rel=0.05)


# -- waiting --------------------------------------------------------------------------------


SIZES = np.array([1, 100])


def wait(
    left=(100,),
    ttft=np.inf,
    finish=(),
    room=9.0,
    slots=64,
    config=CONFIG,
    arrival=0.0,
    seconds=SIZES * 1e-3,
    now_s=0.0,
    started=(),
    encode_s=0.0,
):
    """Rows of ``left`` prompt tokens at 1 ms each; the last one has just arrived."""
    n = len(left)
    ttft = np.broadcast_to(np.asarray(ttft, np.float64), (n,))
    queue = WaitingBatch(
        np.full(n, arrival), ttft, np.asarray(left), np.isin(np.arange(n), started), np.full(n, np.inf),
        np.broadcast_to(np.asarray(encode_s, np.float64), (n,)),
    )  # fmt: skip
    stakes = Stakes(np.array([1e6]), np.array([1e6]), np.array([1 / room]))
    interference = Interference(np.full(len(finish), np.inf), 0.01, SIZES, seconds, stakes)
    situation = Situation(config, queue, now_s, interference)
    return predicted_wait_s(situation, np.asarray(finish, np.float64), slots)


def test_an_idle_server_lets_nobody_wait():
    assert wait() == 0.0


def test_prompts_that_are_due_before_come_first():
    assert wait(left=[300, 100]) == pytest.approx(0.3)
    assert wait(left=[300, 100], ttft=[9.0, 1.0]) == 0.0, "it is due first"
    assert wait(left=[300, 100], ttft=[9.0, 1.0], started=[0]) == 0.0, "and fits beside the started one"
    assert wait(left=[300, 5000], ttft=[9.0, 1.0], started=[0]) == pytest.approx(0.3), "it does not fit"
    assert wait(left=[300, 100], encode_s=[0.2, 9.0]) == pytest.approx(0.5), "its encoder has to run first"
    # While others decode, prefills get a share of the time.
    assert wait(left=[300, 100], finish=[9.0]) == pytest.approx(0.3 / 0.7)
    fixed = replace(CONFIG, pacing="fixed")
    assert wait(left=[300, 100], finish=[9.0], config=fixed) == pytest.approx(0.3)


def test_the_gate_holds_a_prompt_until_its_aim_or_until_one_ends():
    # 3 s of patience, less 12 iterations of 10 ms, less 0.1 s of prefill / 0.6.
    assert wait(finish=[9.0, 9.0], room=1.0) == pytest.approx(3.0 - 0.12 - 0.1 / 0.6)
    late_s = wait(finish=[9.0, 9.0], room=1.0, arrival=5.0, now_s=5.5)
    assert late_s == pytest.approx(2.5 - 0.12 - 0.1 / 0.6), "it has waited for half a second"
    assert wait(finish=[0.5, 9.0], room=1.0) == pytest.approx(0.5)
    assert wait(finish=[9.0, 9.0], room=1.2) == 0.0
    # The prompt before it takes longer than that.
    assert wait(left=[1500, 10], finish=[9.0, 9.0], room=1.0) == pytest.approx(1.5 / 0.7)


def test_a_short_prompt_takes_a_forward_too():
    """As the gate reckons: 20 tokens take 40 ms, not a fifth of what 100 take."""
    seconds = np.array([0.03, 0.08])
    assert wait(left=[20, 20], seconds=seconds) == pytest.approx(0.0396, abs=1e-4)
    held_s = wait(left=[20], finish=[9.0], room=1.0, seconds=seconds)
    assert held_s == pytest.approx(3.0 - 0.12 - 0.0396 / 0.6, abs=1e-3)


def test_who_states_no_ttft_slo_waits_for_room_where_others_are_given_up():
    losing = replace(CONFIG, lost_every_s=4.0)
    assert wait(finish=[9.0, 9.5], room=1.0, config=losing) == 9.0
    assert wait(left=[10, 100], finish=[9.0, 9.5], room=1.0, config=losing) == 9.5, "the other one is first"
    assert wait(finish=[9.0, 9.5], ttft=3.0, room=1.0, config=losing) == pytest.approx(3.0 - 0.12 - 0.1 / 0.6)


def test_without_a_free_slot_it_waits_for_one():
    assert wait(finish=[2.0, 5.0], slots=2) == 2.0
    assert wait(left=[10, 10], finish=[2.0, 5.0], slots=2) == 5.0
    assert wait(finish=[2.0, 5.0], slots=3) == 0.0
    assert wait(left=[3000, 10], finish=[2.0, 5.0], slots=3) == pytest.approx(3 / 0.7), "read in any case"
    due_first = dict(left=[10, 10], ttft=[9.0, 1.0], finish=[2.0, 5.0], slots=2)
    assert wait(**due_first) == 2.0
    assert wait(**due_first, started=[0]) == 5.0, "a started one has its slot already"
