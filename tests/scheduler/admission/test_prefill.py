"""The pacing rule of prefills: who is spared, how large a chunk is, and that nobody starves."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from adaserve.config import AdaServeConfig
from adaserve.scheduler.admission.chunks import claimed_share, least_chunk, slack_tokens
from adaserve.scheduler.admission.gate import ends_of_groups
from adaserve.scheduler.admission.interference import Interference, RecentWork, Stakes, stakes_of, stall_slack
from adaserve.scheduler.admission.order import in_order, looked_at
from adaserve.scheduler.admission.prefill import plan_prefill
from adaserve.scheduler.admission.situation import (
    PrefillConfig,
    Situation,
    WaitingBatch,
    prefill_s,
    tpot_to_meet_s,
)
from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.costs.latency import ForwardCost, LatencyModel
from adaserve.scheduler.costs.prefills import LearnedPrefills
from adaserve.scheduler.simulator.hardware import hardware_latency
from adaserve.scheduler.simulator.replica import ReplicaConfig
from adaserve.scheduler.simulator.run import SimulationConfig, simulate
from adaserve.scheduler.simulator.waiting import WaitingPrompts
from adaserve.scheduler.simulator.workload import SimRequest, TextModel, make_requests, synthetic_trace
from adaserve.slo.classes import SLOConfig
from tests.scheduler.sched_factories import running

CONFIG = PrefillConfig(256, "deadline", pacing="slack", spend=0.5, patience_s=2.0, late_share=0.5)
PERIOD_S = 0.02
SIZES = np.arange(1, 257)
SECONDS = 0.015 + 0.001 * SIZES  # 31 ms for 16 tokens, 271 ms for 256
LEAST = 70  # the least chunk: 15 / 70 + 1 <= 1.15 x (15 / 256 + 1)


def waiting(left=(200,), arrival=0.0, ttft=math.inf, started=(), tpot_slo_s=math.inf, encode_s=0.0):
    n = len(left)
    return WaitingBatch(
        np.broadcast_to(np.asarray(arrival, np.float64), (n,)),
        np.broadcast_to(np.asarray(ttft, np.float64), (n,)),
        np.asarray(left, np.int64),
        np.isin(np.arange(n), started),
        np.broadcast_to(np.asarray(tpot_slo_s, np.float64), (n,)),
        np.broadcast_to(np.asarray(encode_s, np.float64), (n,)),
    )


def interference(slack, decodes=0, spent_s=0.0):
    slack_s = np.atleast_1d(np.asarray(slack, np.float64))
    return Interference(slack_s, PERIOD_S, SIZES, SECONDS, stakes([9.0]), decodes, spent_s)


def tokens(slack, config=CONFIG, queue=None, now_s=0.0, **rest):
    queue = waiting() if queue is None else queue
    situation = Situation(config, queue, now_s, interference(slack, **rest))
    return slack_tokens(situation, np.arange(len(queue.prompt_left)))


# -- slack of a running request -------------------------------------------------------------


def slack_of(now_s=1.0, pace=2.0, **fields):
    batch = running(1, **fields)
    return float(stall_slack(batch, now_s, np.array([pace]), PERIOD_S)[0])


def test_slack_by_hand():
    # 50 tokens due at 20 ms each: level now; 32 more at 10 ms each are 320 ms ahead of their SLO.
    assert slack_of(tpot_slo_s=0.02, decoded_tokens=50) == pytest.approx(0.32)
    # The same of a request that has begun half a second later.
    assert slack_of(tpot_slo_s=0.02, decoded_tokens=25, decode_start_s=0.5) == pytest.approx(0.32)
    # 10 tokens to come: 100 ms.
    assert slack_of(tpot_slo_s=0.02, decoded_tokens=50, remaining_tokens=10) == pytest.approx(0.1)
    # Likely 10 tokens to come, whatever the limit: the same 100 ms.
    assert slack_of(tpot_slo_s=0.02, decoded_tokens=50, likely_tokens=np.array([10])) == pytest.approx(0.1)
    # A pace of 1 token is just the SLO: what it is ahead stays.
    assert slack_of(pace=1.0, tpot_slo_s=0.02, decoded_tokens=60) == pytest.approx(0.2)


def test_late_but_not_lost_has_none():
    late = dict(tpot_slo_s=0.02, decoded_tokens=20)  # 600 ms behind, catches up 10 ms per token
    assert slack_of(remaining_tokens=100, **late) == 0.0
    assert slack_of(remaining_tokens=50, **late) == math.inf, "it is lost, and still held up prefills"


def test_without_slo_there_is_nothing_to_spare():
    assert slack_of(tpot_slo_s=math.inf) == math.inf


# -- size of a chunk ------------------------------------------------------------------------


def test_chunk_by_hand():
    # 200 ms of slack, half of it: 100 ms = 15 ms + 85 tokens. 200 tokens in 3 chunks of at most 85: 67 each.
    assert tokens(0.2) == 67
    # The whole prompt fits: SGLang may fill up with the next one.
    assert tokens(1.0) == 256
    # 85 ms are needed for the least chunk, and 0.5 x 160 ms are less.
    assert tokens(0.16) == 0
    # After so many iterations it comes anyway: 200 tokens in 3 chunks of at most LEAST.
    assert tokens(0.0, decodes=CONFIG.most_decodes) == 67


def test_least_chunk_is_where_the_fixed_cost_no_longer_dominates():
    assert least_chunk(SIZES, SECONDS) == LEAST
    assert least_chunk(SIZES, 0.001 * SIZES) == 1


def test_what_was_spent_since_the_last_decode_counts():
    assert tokens(0.2, spent_s=0.0) > tokens(0.1, spent_s=0.1) == 0
    # 500 ms before the stall of 100: half of it less 100 leaves 150 ms = 135 tokens, so two chunks.
    assert tokens(0.4, spent_s=0.1) == 100


def test_what_was_spent_is_counted_and_iterations_with_a_chunk_are_not_taken_for_decoding():
    recent, latency = RecentWork(), LatencyModel(ForwardCost(0.001), ForwardCost(0.01))

    def state():
        return recent.interference(latency, running(1), 1, (SIZES, SECONDS), 1.0)

    for chunk, cycle_s in ((0, 0.02), (0, 0.02), (64, 0.2)):
        recent.decoded(["r0"], np.array([1]), 2.0, chunk, cycle_s)
    assert state().decodes == 0 and state().period_s == pytest.approx(0.02)
    recent.prefilled(0.1)
    recent.prefilled(0.2)
    assert state().spent_s == pytest.approx(0.3)
    recent.decoded(["r0"], np.array([1]), 2.0, 0, 0.35)
    assert state().spent_s == 0.0 and state().decodes == 1
    assert state().period_s == pytest.approx(0.02), "prefills are no part of a decode iteration"
    recent.decoded(["r0"], np.array([1]), 2.0, 0, 0.03)
    assert state().period_s == pytest.approx(0.021), "what the server does around it is"


def test_a_batch_that_shrank_or_grew_takes_as_long_as_its_requests():
    """From one iteration to the next; averages would say so a dozen iterations later."""
    latency = LatencyModel(ForwardCost(0.001), ForwardCost(0.01, per_token_s=0.001))
    for before, after in ((16, 2), (2, 16)):
        recent = RecentWork()
        for _ in range(50):  # of two tokens each, with 5 ms around the forward
            recent.decoded([""] * before, np.ones(before), 2.0 * before, 0, 0.015 + 0.002 * before)
        now = recent.interference(latency, running(after), 3, (SIZES, SECONDS), 1.0)
        assert now.period_s == pytest.approx(0.015 + 0.002 * after)
        assert now.stakes.cycle_s == pytest.approx(0.015 + 0.002 * (after + np.arange(4)))


def test_no_iteration_is_foreseen_to_be_shorter_than_its_forward():
    """The host became busy, and forwards of the sizes of late take five times what they took."""
    recent, latency = RecentWork(), LatencyModel(ForwardCost(0.0), ForwardCost(0.01, per_token_s=0.005))
    for _ in range(50):
        recent.decoded([""] * 16, np.ones(16), 16.0, 0, 0.03)
    now = recent.interference(latency, running(1), 1, (SIZES, SECONDS), 1.0)
    assert now.period_s == pytest.approx(0.015) and now.stakes.cycle_s == pytest.approx([0.015, 0.02])


def test_each_request_is_spared_by_its_own_pace():
    recent, latency = RecentWork(), LatencyModel(ForwardCost(0.0), ForwardCost(0.01))
    for _ in range(60):
        recent.decoded(["r0", "r1"], np.array([1, 3]), 4.0, 0, 0.02)
    batch = running(3, tpot_slo_s=0.02, decoded_tokens=50)
    slack_s = recent.interference(latency, batch, 1, (SIZES, SECONDS), 1.0).slack_s
    expected = stall_slack(batch, 1.0, np.array([1.0, 3.0, 2.0]), 0.02)
    assert slack_s == pytest.approx(expected, abs=0.01), "of the third one nothing is known"
    assert slack_s[0] < 0.05 and slack_s[1] > 0.4


slacks = st.one_of(st.just(0.0), st.floats(0, 2))


@given(st.lists(slacks, min_size=1, max_size=6), st.data())
def test_monotone_in_every_slack(values, data):
    i = data.draw(st.integers(0, len(values) - 1))
    more = list(values)
    more[i] += data.draw(slacks)
    decodes = data.draw(st.integers(0, 6))
    left = data.draw(st.lists(st.integers(1, 600), min_size=1, max_size=5))
    queue = waiting(left)
    assert tokens(values, queue=queue, decodes=decodes) <= tokens(more, queue=queue, decodes=decodes)


@given(
    st.lists(slacks, min_size=1, max_size=4),
    st.lists(st.integers(1, 3000), min_size=1, max_size=5),
    st.sampled_from([0, 3, 4, 9]),
    st.one_of(st.just(0.0), st.floats(0, 50)),
    st.one_of(st.just(math.inf), st.floats(0.05, 5)),
)
def test_never_more_than_the_chunk_size_and_never_starving(values, left, decodes, age, ttft):
    got = tokens(values, queue=waiting(left, ttft=ttft), decodes=decodes, now_s=age)
    assert 0 <= got <= CONFIG.chunk_tokens
    if decodes >= CONFIG.most_decodes:
        # A prompt may need less for its last tokens; the others come after it.
        assert got >= min(8, *left), "a waiting prompt got nothing after most_decodes iterations"


def test_a_prompt_is_through_after_a_bounded_number_of_iterations():
    """All running requests hang in the balance for ever, the prompt is patient: the worst case."""
    config = replace(CONFIG, late_share=1e-6)
    left, decodes, iterations = 600, 0, 0
    while left > 0:
        got = tokens(0.0, config, waiting((left,), started=(0,)), decodes=decodes)
        left -= got
        decodes = 0 if got else decodes + 1
        iterations += not got
        assert iterations <= config.most_decodes * (600 // LEAST + 1)
    assert iterations > 50, "nobody was spared: this proves nothing"


# -- who waits ------------------------------------------------------------------------------


def test_older_prompts_claim_more():
    sizes = [
        tokens(0.0, queue=waiting((400,), arrival=0.0), now_s=age, decodes=5) for age in (0, 1.5, 1.9, 9)
    ]
    assert sizes[0] == 0 and sizes == sorted(sizes) and sizes[-1] > 0


def test_a_stated_ttft_that_can_be_met_goes_first():
    firm = waiting((100,), ttft=0.12)
    assert tokens(0.0, queue=firm, now_s=0.0) >= 100, (
        "115 ms of prefill and 120 ms of time: it must start now"
    )
    assert tokens(0.0, queue=firm, now_s=1.0, decodes=0) == 0, "lost already, it can wait like any other"


def test_a_ttft_that_is_lost_already_claims_no_more_than_any_other():
    """100 tokens need 115 ms: an aim 50 ms ahead is lost, and those who decode would pay for nothing."""
    queue, order = waiting((100,), ttft=0.05), np.arange(1)
    assert claimed_share(Situation(CONFIG, queue, 0.0, interference(0.0)), order) == CONFIG.late_share
    assert claimed_share(Situation(CONFIG, waiting((100,), ttft=0.12), 0.0, interference(0.0)), order) == 1.0
    seen = waiting((100,), ttft=0.32, encode_s=0.2)
    assert claimed_share(Situation(CONFIG, seen, 0.0, interference(0.0)), order) == 1.0


def test_share_of_a_queue_is_that_of_its_tightest_prefix():
    queue = waiting((100, 100), ttft=(1.0, 1.5))
    order = np.arange(2)
    first, both = 0.115 / (1.0 - PERIOD_S), 0.215 / (1.5 - PERIOD_S)
    share = claimed_share(Situation(CONFIG, queue, 0.0, interference(0.0)), order)
    assert share == pytest.approx(max(first, both))


def test_a_short_prompt_takes_a_forward_too():
    taken = prefill_s(np.array([0, 1, 100, 256, 257, 600]), interference(0.0))
    assert taken == pytest.approx([0, 0.016, 0.115, 0.271, 0.287, 2 * 0.271 + 0.103])


def test_order_is_by_deadline_and_nobody_is_overtaken_for_ever():
    queue = waiting((50, 50, 50, 50), arrival=(0.0, 1.0, 1.2, 1.9), ttft=(math.inf, 0.5, math.inf, math.inf))
    plan = plan_prefill(Situation(CONFIG, queue, 2.0, interference(1.0)), 1)
    assert plan.order.tolist() == [1, 0, 2, 3]
    long = replace(queue, prompt_left=np.array([256] * 4), started=np.array([0, 0, 0, 1], bool))
    assert plan_prefill(Situation(CONFIG, long, 2.0, interference(1.0)), 1).order.tolist() == [3, 1, 0, 2]


def test_idle_server_and_fixed_pacing_take_the_full_chunk():
    assert plan_prefill(Situation(CONFIG, waiting(), 0.0, interference(())), 0).tokens == 256
    fixed = replace(CONFIG, pacing="fixed")
    assert plan_prefill(Situation(fixed, waiting(), 0.0, interference(0.0)), 3).tokens == 256


# -- who overtakes --------------------------------------------------------------------------

LONG = 5000


def behind_a_long_one(left, ttft, slack=9.0, n_running=1, **rest):
    """The plan for prompts that came behind one that is being read and is due after 60 s."""
    queue = waiting((LONG, *left), ttft=(60.0, *ttft), started=(0,))
    return plan_prefill(Situation(CONFIG, queue, 0.0, interference(slack, **rest)), n_running)


def test_a_short_prompt_that_is_due_earlier_passes_a_started_one() -> None:
    plan = behind_a_long_one((40,), (0.5,))
    assert plan.order.tolist() == [1, 0] and plan.reserved == 40 and plan.tokens == 256
    idle = behind_a_long_one((40,), (0.5,), n_running=0)
    assert idle.order.tolist() == [1, 0] and idle.reserved == 40 and idle.tokens == 256


def test_who_is_due_later_or_needs_more_than_a_chunk_waits() -> None:
    for left, ttft in ((40, 61.0), (256, 0.5), (40, math.inf)):
        config = replace(CONFIG, patience_s=90.0)
        queue = waiting((LONG, left), ttft=(60.0, ttft), started=(0,))
        plan = plan_prefill(Situation(config, queue, 0.0, interference(9.0)), 1)
        assert plan.order.tolist() == [0, 1] and plan.reserved == 0, (left, ttft)


def test_as_many_pass_as_fit_beside_a_token_of_the_started_one() -> None:
    assert behind_a_long_one((100, 100, 100), (0.5, 0.6, 0.4)).reserved == 200
    assert behind_a_long_one((100, 155), (0.5, 0.6)).reserved == 255
    assert behind_a_long_one((100, 156), (0.5, 0.6)).reserved == 100


def test_a_chunk_waits_until_who_passes_fits_into_it() -> None:
    """SGLang reads a prompt beside a started one whole or not at all."""
    assert behind_a_long_one((100,), (1.5,), slack=0.05).tokens == 0
    waited = behind_a_long_one((100,), (1.5,), slack=0.05, decodes=CONFIG.most_decodes)
    assert waited.tokens >= 101 and waited.reserved == 100
    assert 16 <= behind_a_long_one((), (), slack=0.0, decodes=CONFIG.most_decodes).tokens < 100


@given(
    st.lists(st.tuples(st.integers(1, 600), st.floats(0.1, 90)), max_size=5),
    slacks,
    st.integers(0, CONFIG.most_decodes),
    st.integers(0, 2),
)
def test_a_started_prompt_always_gets_a_part_of_the_chunk(others, slack, decodes, n_running):
    left, ttft = zip(*others, strict=True) if others else ((), ())
    plan = behind_a_long_one(left, ttft, slack, n_running, decodes=decodes)
    assert sorted(plan.order.tolist()) == list(range(len(left) + 1))
    assert plan.reserved == 0 or plan.reserved < plan.tokens <= CONFIG.chunk_tokens
    place = plan.order.tolist().index(0)
    passed = [i - 1 for i in plan.order[:place]]
    assert all(ttft[i] < 60 and left[i] < CONFIG.chunk_tokens for i in passed)
    if passed and plan.tokens:
        assert plan.reserved >= left[passed[0]], "the first one that passes has its place"


def test_a_decision_looks_at_the_first_prompts_of_each_kind():
    """A long queue: 30 prompts with a TTFT SLO and 30 without are late, and of either 50 can be in time."""
    stated = [(float(due_s), 2 * i) for i, due_s in enumerate(range(-30, 50))]
    patient = [(float(due_s), 2 * i + 1) for i, due_s in enumerate(range(-30, 50))]
    config = replace(CONFIG, lost_every_s=2.0)
    expected = sorted(stated[30:62] + patient[30:62]) + patient[:30] + stated[:16]
    assert looked_at(config, stated, patient, 0.0) == expected
    assert looked_at(CONFIG, stated, patient, 0.0) == sorted(stated[:32] + patient[:32]), "none is given up"


def test_the_simulator_tells_the_kinds_apart():
    prompts = WaitingPrompts(replace(CONFIG, lost_every_s=2.0))
    slos = [1.0, math.inf] * 20
    queue = [SimRequest(f"r{i}", "chat", 0.05, slo, 0.0, 9, 9, 9, 0.5, 0.0) for i, slo in enumerate(slos)]
    for request in queue:
        prompts.add(request)
    assert prompts.looked_at(10.0) == queue[1::2] + queue[0:32:2]


# -- the gate -------------------------------------------------------------------------------

GATED = replace(CONFIG, gate=1.2, most_decodes=4)


def stakes(room):
    """One request with this headroom if 1, 2, ... more run, whose prompts take it no time to speak of."""
    return Stakes(np.array([1e6]), np.array([1e6]), 1.0 / np.array([room[0], *room]))


def gated(room, queue, now_s=0.0, n_running=3, config=GATED):
    """The order of the plan; slack is ample."""
    state = replace(interference(9.0), stakes=stakes(room))
    return plan_prefill(Situation(config, queue, now_s, state), n_running).order.tolist()


def test_headroom_by_hand():
    """Two requests at 2 tokens per iteration of 20 ms; one more of them makes it 30 ms."""
    latency = LatencyModel(ForwardCost(0.001), ForwardCost(0.0, per_token_s=0.010))
    batch = running(
        2, tpot_slo_s=np.array([0.02, 0.2]), decoded_tokens=50, decode_start_s=0.0, remaining_tokens=50
    )

    cycle_s = np.array([0.02, 0.03, 0.04, 0.05])

    def headroom(now_s, joining, prefills_s, slo_s=0.02):
        at_stake = stakes_of(
            latency, replace(batch, tpot_slo_s=np.array([slo_s, math.inf])), now_s, 2.0, cycle_s
        )
        return at_stake.headroom(joining, prefills_s)

    # 100 tokens are due after 2 s. At 1 s one is left, for 25 iterations: 0.5 s.
    assert headroom(1.0, 0, 0.0) == pytest.approx(1.0 / 0.5)
    assert headroom(1.0, 1, 0.0) == pytest.approx(1.0 / 0.75)
    assert headroom(1.0, 1, 0.5) == pytest.approx(1.0 / 1.25)
    assert headroom(1.0, 9, 0.0) == headroom(1.0, 3, 0.0) == pytest.approx(1.0 / 1.25)
    assert headroom(0.8, 0, 0.0) == pytest.approx(1.2 / 0.5), "it is ahead by 0.2 s"
    assert headroom(1.4, 0, 0.0) == pytest.approx(1.0 / 0.5), "what it has lost holds nobody back"
    # Alone it needs 25 x 10 ms.
    assert headroom(1.0, 0, 0.0, slo_s=0.0051) == pytest.approx(0.255 / 0.5)
    assert headroom(1.0, 0, 0.0, slo_s=0.0049) == math.inf, "it could not meet this even alone"
    assert headroom(1.0, 0, 0.0, slo_s=math.inf) == math.inf, "it has none"


def test_a_request_without_slo_that_has_just_begun_is_no_error():
    """Infinity times no tokens."""
    batch = running(2, tpot_slo_s=np.array([math.inf, 0.05]), decoded_tokens=0, remaining_tokens=100)
    with np.errstate(all="raise"):
        stakes = stakes_of(LatencyModel(ForwardCost(0.0), ForwardCost(0.01)), batch, 1.0, 2.0, np.ones(1))
    assert stakes.left_s.tolist() == [5.0] and stakes.iterations.tolist() == [50.0]


def test_a_prompt_does_not_start_if_reading_it_takes_what_a_running_request_has_left():
    """A second until the last token is due, of which half is needed: 200 tokens are read in 215 ms, 400 in
    430. The encoder of an image takes 150 on top."""
    state = replace(interference(9.0), stakes=Stakes(np.array([1.0]), np.array([25.0]), np.full(9, 0.020)))
    for left, encode_s, order in (
        ((200,), 0.0, [0]), ((200, 200), 0.0, [0]), ((400,), 0.0, []), ((400, 150), 0.0, [1]),
        ((200,), 0.15, []), ((200, 150), (0.15, 0.0), [1]), ((20, 20, 20), 0.15, [0]),
    ):  # fmt: skip
        queue = waiting(left, encode_s=encode_s)
        assert plan_prefill(Situation(GATED, queue, 0.0, state), 1).order.tolist() == order, left


def by_launches(left, fixed_s=0.045, token_s=5e-6, started=(), at_stake=None, room=1.2):
    """A plan on a GPU, where a prefill of one token takes nearly as long as one of 256. 0.2 s are left, of
    which half is needed; two prefills would take nearly all of the rest."""
    default = Stakes(np.array([0.2 * room / 1.2]), np.array([5.0]), np.full(9, 0.020))
    state = replace(interference(9.0), seconds=fixed_s + token_s * SIZES, stakes=at_stake or default)
    return plan_prefill(Situation(GATED, waiting(left, started=started), 0.0, state), 1)


def test_prompts_that_start_together_are_read_together():
    """Ten prompts stall the running request no more than one."""
    assert by_launches((25,) * 10).order.tolist() == list(range(10))
    assert by_launches((25,) * 10, started=(0,)).order.tolist() == list(range(10)), "one has begun"
    assert by_launches((150, 200, 40)).order.tolist() == [0, 2], "350 tokens are two prefills"
    assert by_launches((150, 40), room=0.9).order.tolist() == [], "one would cost as much as both"


def test_who_shares_a_forward_is_judged_by_it_and_small_groups_wait_for_those_before_them():
    """0.1 s can be spared: one prompt takes 46 ms, ten take 51, and 270 tokens take two forwards."""
    plan = by_launches((200, 40, 10))
    assert plan.order.tolist() == [0, 1, 2] and plan.tokens == 250, "all that fit, and none of them in part"
    assert by_launches((100, 100, 100)).tokens == 200, "the third would be read in part"
    held = by_launches((230, 20, 40), fixed_s=0.08, token_s=1e-4)
    assert held.order.tolist() == [], "103 ms for the first group; the third prompt alone would take 84"


def test_on_a_cpu_a_group_is_one_prompt():
    """Reading 15 tokens takes as long as what a forward takes in any case."""
    queue = waiting((200, 40, 100))
    at = Situation(GATED, queue, 0.0, interference(9.0))
    assert at.interference.worth_tokens == pytest.approx(15.0)
    assert ends_of_groups(at, np.arange(3)).tolist() == [1, 2, 3]
    small = Situation(GATED, waiting((10, 10, 4, 4, 4, 4)), 0.0, interference(9.0))
    assert ends_of_groups(small, np.arange(6)).tolist() == [1, 2, 6], "two are too few"


def test_a_queue_does_not_wait_for_the_last_slow_request_of_a_batch():
    """One of two running requests will miss its SLO anyway soon: four prompts may start, three may not."""
    at_stake = Stakes(np.array([0.11, 9.0]), np.array([5.0, 5.0]), np.full(9, 0.020))
    assert by_launches((25,) * 4, at_stake=at_stake).order.tolist() == [0, 1, 2, 3]
    assert by_launches((25,) * 3, at_stake=at_stake).order.tolist() == []
    both = Stakes(np.array([0.11, 0.11]), np.array([5.0, 5.0]), np.full(9, 0.020))
    assert by_launches((25,) * 4, at_stake=both).order.tolist() == []
    assert by_launches((25,) * 8, at_stake=both).order.tolist() == list(range(8))


def test_who_states_no_ttft_slo_starts_loosest_first_within_a_period():
    """But nobody is passed by who came ``patience_s`` later, and TTFT SLOs keep their order."""
    tpot = (0.01, 0.05, 0.02, math.inf)
    queue = waiting((10,) * 4, tpot_slo_s=tpot, arrival=(0.0, 0.1, 0.2, 0.3))  # periods of 2 s
    assert in_order(Situation(GATED, queue, 0.0, interference(9.0))).tolist() == [3, 1, 2, 0]
    later = replace(queue, arrival_s=np.array([0.0, 8.0, 0.1, 8.1]))
    assert in_order(Situation(GATED, later, 0.0, interference(9.0))).tolist() == [2, 0, 3, 1]
    stated = replace(queue, ttft_slo_s=np.array([1.0, 2.0, 3.0, 4.0]))
    assert in_order(Situation(GATED, stated, 0.0, interference(9.0))).tolist() == [0, 1, 2, 3]


def test_learned_prefills_know_the_fixed_part_without_forwards_of_one_token():
    """As on an H200: a guess of 6 ms where forwards take 54 and more, and nobody reads one token."""
    learned, rng = LearnedPrefills(0.006, 0.021), np.random.default_rng(0)
    assert learned.cost.alone(np.array([1.0, 1024.0])) == pytest.approx([0.006, 0.021], rel=0.01)
    for tokens in rng.integers(20, 2049, 60).tolist():
        learned.observe(tokens, (0.054 + 16e-6 * tokens) * rng.lognormal(0.0, 0.05))
    for nonsense in (math.nan, math.inf, -1e9):
        learned.observe(100, nonsense)
    learned.observe(100, 5.0)  # somebody stopped the host
    sizes, seconds = learned.chunks(2048, slowdown=2.0)
    assert sizes[0] == 1 and sizes[-1] == 2048
    assert seconds[[0, -1]] == pytest.approx(2 * np.array([0.054, 0.087]), rel=0.1)


def test_what_prompts_add_is_learned_where_they_have_a_forward_of_the_draft():
    """It has a fixed part, which the guess for the target alone says nothing of."""
    learned, rng = LearnedPrefills.beside(0.0105, 0.016), np.random.default_rng(0)
    for tokens in rng.integers(16, 513, 40).tolist():
        learned.observe(tokens, (0.003 + 12e-6 * tokens) * rng.lognormal(0.0, 0.05))
    assert [learned.seconds(n) for n in (32, 256)] == pytest.approx([0.0034, 0.0061], rel=0.1)


def test_gate_admits_as_many_as_there_is_room_for():
    queue = waiting((40, 40, 40))
    assert gated([1.5, 1.3, 1.1], queue) == [0, 1]
    assert gated([1.1, 1.0, 0.9], queue) == []
    assert gated([1.1, 1.0, 0.9], queue, config=replace(GATED, gate=None)) == [0, 1, 2]


def test_with_nobody_running_one_prompt_starts_and_the_others_are_judged_by_it():
    """A queue behind a batch that has just ended: if all started together, all would be slow."""
    queue = waiting((40, 40, 40, 40), tpot_slo_s=(math.inf, 0.05, 0.05, 0.05))
    assert gated([9.0], queue, n_running=0) == [0, 1], "no TPOT is at stake for the first"
    assert gated([9.0], waiting((40, 40, 40), tpot_slo_s=0.05, started=(2,)), n_running=0) == [2]
    assert gated([9.0], queue, n_running=0, config=replace(GATED, gate=None)) == [0, 1, 2, 3]


def test_an_answer_of_one_token_has_no_tpot():
    assert tpot_to_meet_s(0.02, 2) == 0.02
    assert tpot_to_meet_s(0.02, 1) == tpot_to_meet_s(math.inf, 2) == math.inf
    assert tpot_to_meet_s(0.02, 0) == math.inf, "a score, or what SGLang reads before several answers"


def test_nothing_is_prefilled_while_all_are_held():
    state = replace(interference(9.0), stakes=stakes([0.5]))
    assert plan_prefill(Situation(GATED, waiting((40,)), 0.0, state), 3).tokens == 0


def test_started_prompts_go_on_and_count():
    assert gated([1.3, 1.1, 1.0], waiting((40, 40, 40), started=(2,))) == [2]
    assert gated([1.5, 1.3, 1.1], waiting((40, 40, 40), started=(2,))) == [2, 0]


def test_nobody_is_held_longer_than_the_aim_allows():
    queue = waiting((40,))  # 55 ms of prefill: 0.6 of 92 ms, twelve iterations of 20 ms before the aim
    assert gated([0.5], queue, now_s=1.66) == []
    assert gated([0.5], queue, now_s=1.68) == [0]
    assert gated([0.5], waiting((40,), ttft=0.5), now_s=0.16) == []
    assert gated([0.5], waiting((40,), ttft=0.5), now_s=0.18) == [0]


@given(
    st.lists(st.integers(1, 600), min_size=1, max_size=6),
    st.lists(st.floats(0.1, 3), min_size=6, max_size=6),
    st.floats(0, 4),
    st.one_of(st.just(math.inf), st.floats(0.05, 5)),
    st.integers(2, 40),
)
@example(left=[1], room=[0.5] * 6, age=1.74, ttft=math.inf, n_running=3)
def test_gate_holds_only_whom_it_may(left, room, age, ttft, n_running):
    queue, room = waiting(left, ttft=ttft), sorted(room, reverse=True)
    got = gated(room, queue, now_s=age, n_running=n_running)
    due = ttft if math.isfinite(ttft) else CONFIG.patience_s
    if age >= due:
        assert sorted(got) == list(range(len(left))), "an aim that has passed holds nobody back"
    if room[0] < 1.2 and got:
        work_s = float(prefill_s(np.array([sum(left)]), interference(9.0))[0])
        assert work_s >= 0.6 * (due - age - 12 * PERIOD_S), "no room and no hurry"
    if room[len(left) - 1] > 1.201:
        assert len(got) == len(left)


# -- prompts that are given up --------------------------------------------------------------

LOSING = replace(GATED, lost_every_s=2.0)


def test_a_ttft_slo_is_no_licence_to_spoil_others():
    """Near its TTFT SLO a prompt starts with less headroom than the gate asks for, but not with any."""
    near = waiting((40,), ttft=0.5)
    assert gated([0.81], near, now_s=0.34, config=LOSING) == [0]
    assert gated([0.79], near, now_s=0.34, config=LOSING) == []
    assert gated([1.19], near, now_s=0.15, config=LOSING) == [], "it can still wait"
    assert gated([0.1], waiting((40,), ttft=0.5, started=(0,)), now_s=9.0, config=LOSING) == [0]


def test_who_would_come_too_late_is_lost_before_the_slo_has_passed():
    """75 ms before it: 55 ms of prefill, and 20 for the first token's way."""
    near = waiting((40,), ttft=0.5)
    assert gated([0.81], near, now_s=0.424, config=LOSING) == [0]
    assert gated([0.81], near, now_s=0.426, config=LOSING) == []
    assert gated([0.81], replace(near, encode_s=np.array([0.1])), now_s=0.326, config=LOSING) == []
    assert gated([1.51], near, now_s=0.426, config=LOSING) == [0]
    assert gated([1.49], near, now_s=0.426, config=LOSING) == [], "it has nothing to win"
    assert gated([1.61], near, now_s=0.426, config=replace(LOSING, gate=1.7)) == [], "no less than the gate"
    late = replace(waiting((40, 40), ttft=0.5), arrival_s=np.array([0.0, 0.1]))
    assert gated([2.0, 1.6], late, now_s=0.43, config=LOSING) == [1, 0]


def test_the_more_are_lost_the_less_is_risked_for_one_more():
    """Those came 2.1 s before the one whose TTFT SLO is near."""
    for lost, room, starts in (
        (0, 0.81, True),
        (2, 0.89, False),
        (2, 0.91, True),
        (20, 0.99, False),
        (20, 1.01, True),
    ):
        queue = waiting((40,) * (lost + 1), ttft=0.5)
        queue = replace(queue, arrival_s=np.array([-2.1] * lost + [0.0]))
        order = gated([room] * 30, queue, now_s=0.34, config=replace(LOSING, lost_every_s=100.0))
        assert order == [lost] * starts, (lost, room)


def test_lost_prompts_wait_behind_the_others_for_room():
    queue = replace(waiting((40, 40, 40), ttft=0.5), arrival_s=np.array([-1.0, 0.2, 0.1]))
    assert gated([2.0, 1.8, 1.6], queue, now_s=0.3, config=LOSING) == [2, 1, 0]
    assert gated([2.0, 1.8, 1.4], queue, now_s=0.3, config=LOSING) == [2, 1]


def test_while_nobody_decodes_who_can_still_be_in_time_comes_first():
    queue = replace(waiting((40, 40, 40), ttft=0.5), arrival_s=np.array([-3.0, 0.2, 0.1]))
    plan = plan_prefill(Situation(LOSING, queue, 0.3, interference(())), 0)
    assert plan.order.tolist() == [2, 1, 0] and not plan.lost


def test_lost_prompts_start_one_by_one_whatever_it_costs():
    """The one lost longest, when it has been lost for ``lost_every_s`` and no other was started meanwhile."""
    queue = replace(waiting((40, 40, 40), ttft=0.5), arrival_s=np.array([-2.0, -3.0, 1.4]))
    state = replace(interference(9.0), stakes=stakes([0.3] * 4))

    def plan(now_s, lost_wait_s):
        return plan_prefill(Situation(LOSING, queue, now_s, replace(state, lost_wait_s=lost_wait_s)), 3)

    assert plan(-0.6, math.inf).order.tolist() == [], "1.9 s ago the first one was lost"
    first = plan(-0.4, math.inf)
    assert first.order.tolist() == [1] and first.lost and first.tokens > 0
    again = plan(0.6, 1.0)
    assert again.order.tolist() == [] and not again.lost
    assert not plan_prefill(Situation(LOSING, waiting((40,)), 0.0, interference(9.0)), 3).lost
    assert plan(1.6, 2.0).order.tolist() == [1], "before the one that might still be in time"
    queue = waiting((40, 40), -3.0, 0.5, started=(0,))
    assert plan(0.0, math.inf).order.tolist() == [0, 1], "what has begun is not waiting"
    assert plan(0.0, math.inf).lost
    queue = waiting((5000, 40), -3.0, 0.5, started=(0,))
    long = plan(0.0, math.inf)
    assert long.order.tolist() == [0, 1] and long.tokens > 0
    assert not long.lost, "the chunk is that of the one that has begun, so its turn has not come"


def test_without_a_ttft_slo_a_prompt_waits_for_room_until_its_patience_ends():
    """Two seconds; from then on the one that is due first starts if no other did for ``lost_every_s``."""
    queue = replace(waiting((40, 40)), arrival_s=np.array([0.1, 0.0]))

    def plan(now_s, room, lost_wait_s=math.inf):
        state = replace(interference(9.0), stakes=stakes([room] * 4), lost_wait_s=lost_wait_s)
        return plan_prefill(Situation(LOSING, queue, now_s, state), 3).order.tolist()

    assert plan(1.9, 1.0) == [] and plan(9.0, 1.0, lost_wait_s=1.9) == []
    assert plan(2.1, 0.1) == [1] and plan(9.0, 0.1, lost_wait_s=2.0) == [1]
    assert plan(0.2, 1.3) == plan(9.0, 1.3, lost_wait_s=0.0) == [1, 0], "with room they start in turn"


def test_late_prompts_without_a_ttft_slo_are_overload_as_well():
    """Those that state one risk less for their own sake, and do not wait behind prompts for which there is no
    room."""
    for late, room, starts in ((0, 0.81, True), (2, 0.89, False), (2, 0.91, True)):
        queue = waiting((40,) * (late + 1), ttft=np.array([math.inf] * late + [0.5]))
        queue = replace(queue, arrival_s=np.array([-2.1] * late + [0.0]))
        state = replace(interference(9.0), stakes=stakes([room] * 30), lost_wait_s=0.0)
        plan = plan_prefill(Situation(LOSING, queue, 0.3, state), 3)
        assert plan.order.tolist() == [late] * starts, (late, room)


@pytest.mark.parametrize("ttft_s", [1.0, math.inf])
def test_giving_up_serves_more_under_overload_and_ends_nobody(ttft_s):
    """Far more than can be served in time: without it nearly all miss their SLOs."""
    latency = hardware_latency("llama-3.1-70b", "a100", 4)
    mix = {"coding": 0.6, "chat": 0.2, "summarization": 0.2}

    def run(lost_every_s, seed):
        requests = make_requests(synthetic_trace(120, 12.0, seed, mix), SLOConfig(), 0.03, TextModel(), seed)
        for request in requests:
            request.ttft_slo_s = ttft_s
        config = PrefillConfig(512, "deadline", gate=1.1, pacing="slack", lost_every_s=lost_every_s)
        replica = ReplicaConfig(latency, mixed=False, prefill=config)
        result = simulate(requests, SimulationConfig(replica, "priced", PolicyConfig(latency=latency)))
        assert all(r.finished for r in result.requests)
        return np.mean([r.attained for r in result.records()])

    gains = [run(4.0, seed) - run(None, seed) for seed in range(3)]
    assert min(gains) > 0.05, gains


@pytest.mark.parametrize(
    "wrong",
    [{"pacing": "fast"}, {"spend": 0.0}, {"least_tokens": 0}, {"most_decodes": 0}, {"late_share": 0.0},
     {"late_share": 1.0}, {"patience_s": 0.0}, {"order": "last"}, {"lost_every_s": 0.0},
     {"lost_every_s": 4.0, "order": "fcfs"}],
)  # fmt: skip
def test_bad_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PrefillConfig(**wrong)


# -- whatever waits -------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(
            st.floats(-10, 10),
            st.one_of(st.just(math.inf), st.floats(0, 20)),
            st.integers(1, 2000),
            st.booleans(),
            st.booleans(),
            st.sampled_from([0.0, 0.2]),
        ),
        max_size=8,
    ),
    st.integers(0, 4),
    st.floats(-20, 40),
    st.sampled_from(["fcfs", "slack", "short", "deadline"]),
    st.sampled_from([None, 1.1]),
    st.sampled_from([0.0, math.inf]),
)
def test_a_plan_names_each_prompt_once_and_fits_the_chunk(rows, n_running, now_s, order, gate, lost_wait_s):
    """Nobody waits, SLOs that have passed, a clock that was set back: a plan follows all the same."""
    arrival, ttft, left, started, tpot_slo, encode_s = (np.array([r[i] for r in rows]) for i in range(6))
    queue = WaitingBatch(
        arrival, ttft, left.astype(np.int64), started.astype(np.bool_), np.where(tpot_slo, 0.05, np.inf),
        encode_s,
    )  # fmt: skip
    lost_every_s = 2.0 if order == "deadline" else None
    config = PrefillConfig(256, order, gate, lost_every_s, "slack")
    state = Interference(
        np.full(n_running, 0.2), PERIOD_S, SIZES, SECONDS, stakes(np.ones(9)), lost_wait_s=lost_wait_s
    )
    plan = plan_prefill(Situation(config, queue, now_s, state), n_running)
    assert len(set(plan.order.tolist())) == len(plan.order) and set(plan.order.tolist()) <= set(
        range(len(rows))
    )
    assert 0 <= plan.reserved <= plan.tokens <= config.chunk_tokens
    assert plan.tokens == 0 or len(plan.order)
    if not n_running:
        free = queue.started | ~queue.has_tpot_slo
        if gate is None:
            assert len(plan.order) == len(rows), "nobody holds them back"
        assert set(np.flatnonzero(free)) <= set(plan.order.tolist())
        assert len(plan.order) or not rows, "somebody starts"


# -- in the simulator -----------------------------------------------------------------------


@pytest.mark.parametrize("mixed", [True, False])
def test_every_request_gets_its_tokens_when_paced(mixed):
    latency = hardware_latency("llama-3.1-70b", "a100", 4)
    mix = {"coding": 0.6, "chat": 0.2, "summarization": 0.2}
    requests = make_requests(synthetic_trace(40, 4.0, 0, mix), SLOConfig(), 0.03, TextModel(), 0)
    config = replace(CONFIG, chunk_tokens=512)
    replica = ReplicaConfig(latency, mixed=mixed, prefill=config)
    result = simulate(requests, SimulationConfig(replica, "adaserve", PolicyConfig(latency=latency)))
    assert all(r.finished and r.prefilled == r.prompt_tokens for r in result.requests)
    assert not result.replicas[0].busy


def test_gate_spares_running_requests_in_the_simulator():
    """A burst that can't be served in time: whoever has begun keeps its speed, the others wait a little."""
    latency = hardware_latency("llama-3.1-70b", "a100", 4)
    mix = {"coding": 0.6, "chat": 0.2, "summarization": 0.2}

    def run(gate, seed):
        requests = make_requests(synthetic_trace(60, 12.0, seed, mix), SLOConfig(), 0.03, TextModel(), seed)
        config = PrefillConfig(512, "deadline", gate=gate, pacing="slack", least_tokens=64, patience_s=3.0)
        replica = ReplicaConfig(latency, mixed=False, prefill=config)
        done = simulate(requests, SimulationConfig(replica, "priced", PolicyConfig(latency=latency))).requests
        assert all(r.finished for r in done)
        tpot = [(r.last_token_s - r.first_token_s) / max(1, r.output_tokens - 1) for r in done]
        waited = [r.first_token_s - r.arrival_s for r in done]
        return np.mean([t <= r.tpot_slo_s for t, r in zip(tpot, done, strict=True)]), max(waited)

    pairs = [(run(1.1, seed), run(None, seed)) for seed in range(1, 9)]
    assert np.mean([held[0] - free[0] for held, free in pairs]) > 0.01, pairs
    assert max(held[1] for held, _ in pairs) < 9.0, pairs


def test_prompts_share_forwards_where_a_forward_costs_much_in_any_case():
    """An H200 far above its capacity, where a prefill takes 54 ms, however short it is: ten prompts to a
    forward, as many as fit, and most answers in time. Judged one by one it took 45 forwards and 7.6 s."""
    latency = LatencyModel(
        ForwardCost(0.0012), ForwardCost(0.0, 0.0049, 1.8e-5, sharpness=2.0), overhead_s=0.0035
    )
    trace, text = synthetic_trace(300, 100.0, 0, {"coding": 0.6, "chat": 0.4}), TextModel(mean={}, other=0.9)
    requests = [
        replace(r, prompt_tokens=20 + 37 * i % 300, output_tokens=64, cap_tokens=64, ttft_slo_s=math.inf)
        for i, r in enumerate(make_requests(trace, SLOConfig(), 0.0049, text, 0))
    ]
    served = AdaServeConfig().for_prefills(chunk_tokens=2048)
    replica = ReplicaConfig(
        latency, max_running=64, mixed=False, prefill=served,
        prefill_cost=ForwardCost(0.054, per_token_s=1.6e-5),
    )  # fmt: skip
    result = simulate(requests, SimulationConfig(replica, "priced", PolicyConfig(latency=latency, d_max=5)))
    assert np.mean([r.attained for r in result.records()]) > 0.75
    assert len({r.first_token_s for r in requests}) < 37, "forwards that read prompts"
    assert max(r.last_token_s for r in requests) < 6.5


def test_pacing_spares_running_requests_in_the_simulator():
    """The same arrivals, prefills apart from decoding: fewer violations than with prefills first."""
    latency = hardware_latency("llama-3.1-70b", "a100", 4)
    mix = {"coding": 0.6, "chat": 0.2, "summarization": 0.2}
    sizes = np.arange(1, 513)
    seconds = latency.verify_s(sizes.astype(np.float64))

    def attained(pacing, seed):
        requests = make_requests(synthetic_trace(120, 3.5, seed, mix), SLOConfig(), 0.03, TextModel(), seed)
        config = PrefillConfig(512, "deadline", pacing=pacing, least_tokens=least_chunk(sizes, seconds))
        replica = ReplicaConfig(latency, mixed=False, prefill=config)
        done = simulate(requests, SimulationConfig(replica, "priced", PolicyConfig(latency=latency))).requests
        tpot = [(r.last_token_s - r.first_token_s) / max(1, r.output_tokens - 1) for r in done]
        return np.mean([t <= r.tpot_slo_s for t, r in zip(tpot, done, strict=True)])

    gain = [attained("slack", seed) - attained("fixed", seed) for seed in (1, 2, 3)]
    assert np.mean(gain) > 0.01, gain
