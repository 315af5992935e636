"""What the prefill hook does to SGLang's scheduler, and what the pacer learns; no server."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.managers.schedule_batch import NextBatchPlan
from sglang.srt.managers.schedule_policy import AddReqResult, CacheAgnosticPolicy
from sglang.srt.managers.scheduler_components.load_inquirer import SchedulerLoadInquirer

from adaserve.config import AdaServeConfig
from adaserve.engine.admission.prefill import PrefillPacer
from adaserve.engine.rank_sync import RankSync
from adaserve.engine.request_state import RequestState, running_batch
from adaserve.patches.scheduler import prefill_slack
from adaserve.patches.scheduler.worker_interface import Load
from adaserve.scheduler.costs.latency import ForwardCost, LatencyModel
from adaserve.scheduler.costs.learned import LearnedCosts
from adaserve.scheduler.interface import (
    CandidateTrees,
    Context,
    DraftPlan,
    IterationOutcome,
    IterationPlan,
    RunningBatch,
    Selection,
)
from adaserve.slo.classes import ANONYMOUS, SLO
from adaserve.slo.lengths import OutputLengths
from tests.engine.ranks import ALONE, Group

NOW = 1000.0
LATENCY = LatencyModel(ForwardCost(0.0005), ForwardCost(0.010, per_token_s=0.001), 0.001)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: NOW)


class Request:
    """The fields of SGLang's Req that are read."""

    def __init__(
        self, rid: str, prompt: int = 200, age_s: float = 0.0, slot: int = 0, tenant: str = ANONYMOUS
    ) -> None:
        self.tenant = tenant
        self.rid, self.origin_input_ids, self.output_ids = rid, [1] * prompt, list[int]()
        self.num_matched_prefix_tokens, self.multimodal_inputs = 0, None
        self.time_stats = SimpleNamespace(created_time=NOW - age_s)
        self.kv = SimpleNamespace(req_pool_idx=slot)
        self.sampling_params = SimpleNamespace(max_new_tokens=200, top_k=1, temperature=1.0)
        self.grammar = self.custom_logit_processor = self.to_finish = None
        self.priority = 0
        self.full_untruncated_fill_ids, self.prefix_len = [1] * prompt, 0

    @property
    def seqlen(self) -> int:
        return len(self.origin_input_ids) + len(self.output_ids)

    def finished(self) -> bool:
        return False


def pacer(
    slo_s: float,
    config: AdaServeConfig | None = None,
    ttft: dict[str, float] | None = None,
    share: float = 1.0,
    rank_sync: RankSync = ALONE,
    most_beside: int = 0,
) -> PrefillPacer:
    """One request in slot 0 that decoded 50 tokens in 1.2 seconds, and is due ``slo_s`` per token."""
    state = RequestState("r0", "coding", slo_s, NOW - 1.2, 50, generated=[1] * 51)
    known = ttft or {}

    def slo(req: Any) -> SLO:
        return SLO("c", ttft_s=known.get(req.rid, math.inf), tenant=req.tenant)

    ledger: Any = SimpleNamespace(
        slo=slo, arrival_s=lambda req: req.time_stats.created_time, held=[], lengths=OutputLengths()
    )
    ledger.gate = lambda held: ledger.held.append(list(held))
    costs = LearnedCosts(LATENCY)
    return PrefillPacer(config or AdaServeConfig(), costs, ledger, {0: state}, rank_sync, share, most_beside)


def scheduler(paced: PrefillPacer, waiting: list[Request], policy: str = "adaserve", **over: Any) -> Any:
    policies = SimpleNamespace(current=SimpleNamespace(name=policy))
    fields: dict[str, Any] = {
        "draft_worker": SimpleNamespace(prefill=paced, policies=policies),
        "chunked_req": None, "waiting_queue": waiting, "running_batch": NOBODY, "max_running_requests": 64,
        "chunked_prefill_size": 256, "max_prefill_tokens": 4096, "truncation_align_size": None,
        "enable_priority_scheduling": False, "schedule_low_priority_values_first": False,
        "policy": SimpleNamespace(policy=CacheAgnosticPolicy.FCFS), "_reqs_finishing_inflight": lambda _: [],
        "token_to_kv_pool_allocator": SimpleNamespace(available_size=lambda: 1000),
        "tree_cache": SimpleNamespace(evictable_size=lambda: 0),
        "grammar_manager": SimpleNamespace(has_waiting_grammars=lambda: False),
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **over})


RUNNING = SimpleNamespace(
    reqs=[Request("r0")],
    batch_is_full=False,
    is_prefill_only=False,
    new_tokens_required_next_decode=lambda: 20,
)

NOBODY = SimpleNamespace(**{**vars(RUNNING), "reqs": [], "new_tokens_required_next_decode": None})


MADE = NextBatchPlan(batch_to_run=None, running_batch=None)
"""Of SGLang's own function, which found nothing to run."""


def _paced(look: Callable[[Any, Any], object], sched: Any, running: Any) -> NextBatchPlan:
    """The hook around a function that only looks."""

    def original(scheduler: Any, running_batch: Any) -> NextBatchPlan:
        look(scheduler, running_batch)
        return MADE

    return prefill_slack._paced(original, sched, running)


def step(sched: Any, running: Any = RUNNING) -> int | None:
    """The chunk size that SGLang's own function sees; None when it is not called."""
    seen: list[int] = []
    plan = _paced(lambda s, _: seen.append(s.chunked_prefill_size), sched, running)
    assert sched.chunked_prefill_size == 256, "the changed chunk size outlived the step"
    assert bool(seen) == (plan is MADE)
    return seen[0] if seen else None


def test_tight_requests_defer_and_bound_the_chunk() -> None:
    assert step(scheduler(pacer(0.018), [Request("w")])) is None  # no slack: decode first
    some = step(scheduler(pacer(0.022), [Request("w")]))
    assert some is not None and 16 <= some < 200
    assert step(scheduler(pacer(1.0), [Request("w")])) == 256  # a second of slack and more


def test_of_two_ranks_with_other_clocks_both_do_what_the_first_decides() -> None:
    sent: list[Any] = []
    for tight_s, relaxed_s, chunk in ((0.018, 1.0, None), (1.0, 0.018, 256)):
        for rank, slo_s in enumerate((tight_s, relaxed_s)):
            queue = [Request("first"), Request("second")]
            sched = scheduler(pacer(slo_s, rank_sync=RankSync(Group(rank, 2, sent))), list(queue))
            assert step(sched) == chunk and sched.waiting_queue == queue
    assert not sent


@pytest.mark.parametrize(("osl", "likely"), [(60, 9), (51, 149), (9, 149), (1000, 149), (None, None)])
def test_an_expected_length_counts_until_it_proves_wrong(osl: int | None, likely: int | None) -> None:
    state = RequestState("r0", "coding", 0.02, NOW, 50, generated=[1] * 51, osl=osl)
    batch = running_batch([Request("r0")], [state], OutputLengths())
    assert batch.remaining_tokens.tolist() == [149] and batch.max_depth.tolist() == [0]
    assert (batch.likely_tokens is None) if likely is None else batch.tokens_ahead.tolist() == [likely]


@pytest.mark.parametrize(("osl", "likely"), [(None, 30), (60, 9), (51, 30)])
def test_what_answers_of_the_class_brought_counts_where_the_client_said_nothing(
    osl: int | None, likely: int
) -> None:
    lengths = OutputLengths()
    for _ in range(16):
        lengths.add("coding", 80, cut=False)
    state = RequestState("r0", "coding", 0.02, NOW, 50, generated=[1] * 51, osl=osl)
    other = replace(state, slo_class="chat", osl=None)
    batch = running_batch([Request("r0"), Request("r1")], [state, other], lengths)
    assert batch.tokens_ahead.tolist() == [likely, 149] and batch.remaining_tokens.tolist() == [149, 149]


def test_the_interval_bounds_the_wait() -> None:
    tight = pacer(0.018, AdaServeConfig(prefill_interval=2))
    sched = scheduler(tight, [Request("w")])
    assert step(sched) is None
    tight._recent.decodes = 2
    assert step(sched) is not None


@pytest.mark.parametrize(
    "over",
    [
        {"policy_name": "none"},
        {"mode": "exclusive"},
        {"waiting": []},
        {"started": 990},  # of 1000 free slots, which decoding would take 20 of
        {"batch_is_full": True},
    ],
)
def test_left_to_sglang(over: dict[str, Any]) -> None:
    """Plain decoding, the switch, an empty queue, too little memory, no row of the request pool."""
    paced = pacer(0.018, AdaServeConfig(prefill=over.get("mode")))
    sched = scheduler(paced, over.get("waiting", [Request("w")]), over.get("policy_name", "adaserve"))
    if "started" in over:
        sched.chunked_req = Request("c", over["started"])
    full = {"batch_is_full": over.get("batch_is_full", False)}
    assert step(sched, SimpleNamespace(**vars(RUNNING) | full)) == 256


def test_a_started_prompt_with_memory_to_spare_is_paced() -> None:
    assert step(scheduler(pacer(0.018), [], chunked_req=Request("c", 900))) is None


def test_none_is_paced_when_asked() -> None:
    assert step(scheduler(pacer(0.018, AdaServeConfig(prefill="slack")), [Request("w")], "none")) is None


def test_the_chunk_size_comes_back_after_an_error() -> None:
    sched = scheduler(pacer(0.022), [Request("w")])

    def fails(*_: Any) -> None:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        _paced(fails, sched, RUNNING)
    assert sched.chunked_prefill_size == 256


def test_stated_ttft_first_otherwise_in_order() -> None:
    queue = [Request("old", age_s=0.4), Request("new", age_s=0.1), Request("urgent")]
    sched = scheduler(pacer(1.0), list(queue))
    step(sched)
    assert sched.waiting_queue == queue
    sched = scheduler(pacer(1.0, ttft={"urgent": 0.3}), list(queue))
    step(sched)
    assert [r.rid for r in sched.waiting_queue] == ["urgent", "old", "new"]
    sched = scheduler(pacer(1.0, ttft={"urgent": 0.3}), list(queue), enable_priority_scheduling=True)
    step(sched)
    assert sched.waiting_queue == queue


def test_who_is_due_first_starts_first_where_nobody_decodes() -> None:
    queue = [Request("old", age_s=0.4), Request("urgent")]
    sched, seen = scheduler(pacer(1.0, ttft={"urgent": 0.3}), queue), list[str]()
    _paced(lambda s, _: seen.extend(r.rid for r in s.waiting_queue), sched, NOBODY)
    assert seen == ["urgent", "old"] and step(sched, NOBODY) == 256


def share_of_the_started(sched: Any, running: Any = RUNNING) -> tuple[int, int | None]:
    """The chunk, and what of it the started prompt may have at most (None = all)."""
    seen: list[tuple[int, int | None]] = []

    def prefill(s: Any, _: Any) -> None:
        rule = getattr(s.policy, "shortest_prefill_chunk_limit", lambda *_: None)
        budget = s.chunked_prefill_size
        seen.append((budget, rule(s.chunked_req, s.waiting_queue, budget, 1)))

    _paced(prefill, sched, running)
    assert not hasattr(sched.policy, "shortest_prefill_chunk_limit"), "SGLang's own rule is back"
    return seen[0]


@pytest.mark.parametrize("running", [RUNNING, NOBODY])
def test_a_short_prompt_that_is_due_earlier_gets_its_place_beside_a_started_one(running: Any) -> None:
    def sched(ttft: float, free: int = 10_000) -> Any:
        paced = pacer(1.0, ttft={"long": 60.0, "short": ttft})
        return scheduler(
            paced, [Request("short", prompt=40)], chunked_req=Request("long", prompt=5000),
            token_to_kv_pool_allocator=SimpleNamespace(available_size=lambda: free),
        )  # fmt: skip

    assert share_of_the_started(sched(0.5), running) == (256, 216)
    assert share_of_the_started(sched(61.0), running) == (256, None)
    assert share_of_the_started(sched(0.5, free=5050), running)[1] == (216 if running is NOBODY else None), (
        "with 20 slots for decoding and 5,000 for the long one, 30 are left"
    )


@pytest.mark.parametrize(
    ("prompt", "hybrid", "starts"), [(50, False, True), (51, False, False), (50, True, False)]
)
def test_beside_a_started_prompt_others_start_whole(prompt: int, hybrid: bool, starts: bool) -> None:
    """Of 40 tokens that are left of the chunk; 10 of the prompt are cached."""
    req, adder = Request("b", prompt), SimpleNamespace(rem_chunk_tokens=40, is_hybrid_swa=hybrid)
    req.prefix_len, adder.ceil_paged_tokens = 10, lambda tokens: tokens

    def asked(beside: bool) -> Any:
        hooked = prefill_slack._whole_beside_a_started_one
        return hooked(lambda *_: AddReqResult.CONTINUE, adder, req, beside, None)

    assert asked(beside=True) is (AddReqResult.CONTINUE if starts else AddReqResult.OTHER)
    assert asked(beside=False) is AddReqResult.CONTINUE
    adder.rem_chunk_tokens = None
    assert asked(beside=True) is AddReqResult.CONTINUE, "there are no chunks"


def test_a_prefill_holds_up_those_that_go_on() -> None:
    ended, ending, goes_on = reqs = [Request(rid) for rid in "abc"]
    ended.finished = lambda: True  # type: ignore[method-assign]
    sched = scheduler(pacer(1.0), [], _reqs_finishing_inflight=lambda _: [ending])
    assert prefill_slack._decoding(sched, SimpleNamespace(reqs=reqs, is_prefill_only=False)) == [goes_on]
    assert prefill_slack._decoding(sched, SimpleNamespace(reqs=reqs, is_prefill_only=True)) == []


def test_what_is_cached_of_a_prompt_is_not_read() -> None:
    started, some, whole, retracted = queue = [Request(rid) for rid in "abcd"]
    started.prefix_len = some.num_matched_prefix_tokens = retracted.num_matched_prefix_tokens = 150
    whole.num_matched_prefix_tokens, retracted.output_ids = 200, [1] * 30
    view = pacer(1.0).view(Load(RUNNING.reqs, started, queue[1:], 64, 256, paced=True), NOW)
    assert view.situation.waiting.prompt_left.tolist() == [50, 50, 1, 80]
    assert view.situation.waiting.started.tolist() == [True, False, False, True]


def test_what_is_cached_of_a_prompt_that_would_pass_takes_memory_too() -> None:
    """It is locked once the prompt starts. Of 5,300 slots 280 are left beside the long one and decoding."""
    for cached, most in ((0, 216), (300, None)):
        short = Request("short", prompt=40 + cached)
        short.num_matched_prefix_tokens = cached
        sched = scheduler(
            pacer(1.0, ttft={"long": 60.0, "short": 0.5}), [short], chunked_req=Request("long", prompt=5000),
            token_to_kv_pool_allocator=SimpleNamespace(available_size=lambda: 5300),
        )  # fmt: skip
        assert share_of_the_started(sched)[1] == most


def test_who_waits_behind_a_started_prompt_keeps_nobody_from_passing_it() -> None:
    queue = [Request("late", prompt=9000), Request("short", prompt=40)]
    sched = scheduler(
        pacer(1.0, ttft={"long": 60.0, "short": 0.5}), queue, chunked_req=Request("long", prompt=5000),
        token_to_kv_pool_allocator=SimpleNamespace(available_size=lambda: 5300),
    )  # fmt: skip
    seen: list[list[str]] = []
    _paced(lambda s, _: seen.append([r.rid for r in s.waiting_queue]), sched, RUNNING)
    assert seen == [["short"]]
    assert {r.rid for r in sched.waiting_queue} == {"late", "short"}
    assert share_of_the_started(sched)[1] == 216


TWO = SimpleNamespace(**{**vars(RUNNING), "reqs": [Request("r0"), Request("r1", slot=1)]})


def full(
    slo_s: float, share: float = 1.0, ttft: dict[str, float] | None = None, **config: Any
) -> PrefillPacer:
    """Two requests that are 100 ms ahead of their SLO, in iterations of 40 ms that yield one token each."""
    paced = pacer(slo_s, AdaServeConfig(**config), ttft=ttft, share=share)
    start_s = NOW - 50 * slo_s + 0.1
    paced._states[1] = RequestState("r1", "coding", slo_s, start_s, 50, generated=[1] * 51)  # type: ignore[index]
    paced._states[0].decode_start_s = start_s
    paced._recent.decoded(["r0", "r1"], np.ones(2, np.int64), 2.0, 0, 0.040)
    return paced


def test_prompts_wait_while_one_more_would_be_too_many() -> None:
    queue = [Request("old", age_s=3.1), Request("new", prompt=50), Request("newer", prompt=50)]
    sched = scheduler(full(0.042), list(queue))
    offered: list[list[str]] = []
    _paced(lambda s, _: offered.append([r.rid for r in s.waiting_queue]), sched, TWO)
    assert offered == [["old"]], "its patience has ended"
    assert sched.waiting_queue == queue, "nobody was lost"
    _paced(lambda s, _: offered.append([r.rid for r in s.waiting_queue]), sched, TWO)
    assert offered == [["old"]], "for that reason one starts every four seconds"
    held = scheduler(full(0.042), [Request("new")])
    assert step(held, TWO) is None and len(held.waiting_queue) == 1
    assert step(scheduler(full(0.100), [Request("new")]), TWO) is not None, "there is room"
    assert step(scheduler(full(0.042, prefill_headroom=0.0), [Request("new")]), TWO) is not None


@pytest.mark.parametrize("n", [3, 64, 300])
def test_all_that_the_gate_holds_back_are_counted(n: int) -> None:
    """A decision looks at some of a long queue; the others wait behind these."""
    queue = [Request(f"w{i}", prompt=50, age_s=0.001 * i) for i in range(n)]
    for slo_s, held in ((0.042, n), (0.100, 0)):
        paced = full(slo_s)
        plan = paced.plan(Load(TWO.reqs, None, queue[: n if held else 3], 64, 256, paced=True), NOW)
        assert len(plan.order) == (0 if held else 3)
        waits = paced._ledger.held[-1]  # type: ignore[attr-defined]
        assert len(waits) == held and max((s for _, s in waits), default=0.0) == pytest.approx(
            0.001 * (held - 1) if held else 0.0
        )


@pytest.mark.parametrize(("since_last_s", "waits"), [(0.040, False), (0.070, True)])
def test_all_the_time_between_iterations_counts(since_last_s: float, waits: bool) -> None:
    """Iterations take 40 ms, but one ends only every 70 ms: SGLang and streaming take the rest."""
    paced = full(0.060)
    for i in range(10):
        paced.observe(replace(decoded(NOW + since_last_s * i), since_last_s=since_last_s))
    assert (step(scheduler(paced, [Request("new")]), TWO) is None) == waits


def test_a_long_queue_of_lost_prompts_hides_nobody() -> None:
    """They stand in front, having come first; more of them than a decision looks at."""
    known = {f"lost{i}": 0.5 for i in range(200)} | {"fresh": 1.0}
    lost = [Request(f"lost{i}", prompt=20, age_s=30 - 0.1 * i) for i in range(200)]
    queue = [*lost, Request("fresh", prompt=20, age_s=0.8)]

    def offered(slo_s: float) -> list[str]:
        paced = full(slo_s)
        paced._ledger.slo = lambda req: SLO("c", ttft_s=known[req.rid])  # type: ignore[method-assign]
        sched, seen = scheduler(paced, list(queue)), list[str]()
        _paced(lambda s, _: seen.extend(r.rid for r in s.waiting_queue), sched, TWO)
        assert {r.rid for r in sched.waiting_queue} == known.keys(), "nobody was lost"
        return seen

    assert offered(0.500)[:3] == ["lost0", "fresh", "lost1"], "the first has waited far too long"
    assert offered(0.040) == ["lost0"], "and costs too much for more than one"


@pytest.mark.parametrize("low_first", [False, True])
def test_the_highest_priority_starts_first_where_sglang_serves_by_it(low_first: bool) -> None:
    """However many came before it, more than a decision looks at; and the gate opens for it first."""
    queue = [Request(f"old{i}", prompt=20, age_s=9 - 0.01 * i) for i in range(200)]
    high, back = Request("high", prompt=20), Request("back", prompt=20)
    high.priority, back.output_ids = -5 if low_first else 5, [1]
    queue = [*queue, high, back]
    settings = {"enable_priority_scheduling": True, "schedule_low_priority_values_first": low_first}

    def offered(slo_s: float, queue: list[Request], **more: bool) -> list[str]:
        sched, seen = scheduler(full(slo_s), list(queue), **more), list[str]()
        _paced(lambda s, _: seen.extend(r.rid for r in s.waiting_queue), sched, TWO)
        assert sorted(r.rid for r in sched.waiting_queue) == sorted(r.rid for r in queue), "nobody was lost"
        return seen

    for slo_s in (0.500, 0.100):
        assert offered(slo_s, queue, **settings) == ["high", "back"], "who was retracted waits for nobody"
    assert "old0" in offered(0.500, queue), "without priorities it has to share"
    alone = [r for r in queue if r is not high]
    assert offered(0.500, alone, **settings)[:2] == ["old0", "old1"]


@pytest.mark.parametrize("config", [{}, {"prefill_lost_interval_ms": 0.0}])
def test_who_is_due_first_is_seen_behind_a_long_queue(config: dict[str, Any]) -> None:
    """Of prompts without a TTFT SLO, which can always be in time."""
    patient = [Request(f"patient{i}", prompt=20, age_s=0.5) for i in range(300)]
    paced = pacer(1.0, AdaServeConfig(**config), ttft={"urgent": 1.0})
    sched, seen = scheduler(paced, [*patient, Request("urgent", prompt=20)]), list[str]()
    _paced(lambda s, _: seen.extend(r.rid for r in s.waiting_queue), sched, RUNNING)
    assert seen[:2] == ["urgent", "patient0"]


@pytest.mark.parametrize(
    ("slo_s", "first"), [(0.100, ["late0", "late1", "late2"]), (0.042, ["late0", "urgent"])]
)
def test_late_prompts_without_a_ttft_slo_hide_nobody(slo_s: float, first: list[str]) -> None:
    """More of them than a decision looks at: with room they come first, without it only the first one."""
    late = [Request(f"late{i}", prompt=20, age_s=30 - 0.1 * i) for i in range(200)]
    paced = full(slo_s, ttft={"urgent": 1.0})
    sched, seen = scheduler(paced, [*late, Request("urgent", prompt=20, age_s=0.7)]), list[str]()
    _paced(lambda s, _: seen.extend(r.rid for r in s.waiting_queue), sched, TWO)
    assert seen[:3] == first


def test_answers_of_one_request_wait_like_one_request() -> None:
    """Its first answer has come with it, and each further one when the one before has left."""
    paced, many = pacer(1.0), [Request(f"m{i}", prompt=9, age_s=9.0) for i in range(200)]
    one, two, three = Request("one", age_s=5.0), Request("two", age_s=1.0), Request("three", age_s=-1.0)

    def first(n: int, waiting: list[Request], now_s: float) -> list[str]:
        plan = paced.plan(Load([], None, waiting, slots=64, most_tokens=256, paced=True), now_s)
        return [waiting[i].rid for i in plan.order[:n]]

    assert first(5, [*many, one, two], NOW) == ["m0", "one", "two", "m1", "m2"]
    assert first(4, [*many[1:], one, two], NOW) == ["one", "two", "m1", "m2"]
    assert first(3, [*many[1:], two, three], NOW + 2.0) == ["two", "m1", "three"]
    assert first(2, [*many[1:], three], NOW + 600.0) == ["m1", "three"], "nobody waits for ever"


def test_a_retracted_request_is_not_given_up() -> None:
    """Its first token was in time, and its TPOT runs."""
    back = Request("back", prompt=20, age_s=30)
    back.output_ids = [1] * 5
    paced = full(0.042)
    paced._ledger.slo = lambda req: SLO("c", ttft_s=0.5)  # type: ignore[method-assign]
    assert step(scheduler(paced, [back]), TWO) is not None
    assert step(scheduler(paced, [Request("lost", prompt=20, age_s=1.0)]), TWO) is None


def test_the_books_know_who_waits_at_the_gate_and_for_how_long() -> None:
    paced = full(0.042)
    queue = [Request("old", age_s=3.1), Request("new", prompt=50), Request("newer", prompt=50, age_s=0.5)]
    step(scheduler(paced, queue), TWO)
    (held,) = paced._ledger.held  # type: ignore[attr-defined]
    assert [(name, pytest.approx(waited_s)) for name, waited_s in held] == [("c", 0.0), ("c", 0.5)]
    roomy = full(0.100)
    step(scheduler(roomy, [Request("new")]), TWO)
    assert roomy._ledger.held == [[]]  # type: ignore[attr-defined]


@pytest.mark.parametrize("starts", [True, False])
def test_who_is_held_back_counts_among_what_waits(starts: bool) -> None:
    """SGLang counts while it makes a batch, when the queue has only those that may start."""
    queue = [Request("old", age_s=3.1), Request("new", prompt=50), Request("newer", prompt=70)]
    sched = scheduler(full(0.042), list(queue))

    def makes(s: Any, running: Any) -> NextBatchPlan:
        (first,) = s.waiting_queue
        if starts:
            s.waiting_queue = []
        counter = SimpleNamespace(get_waiting_queue=lambda: s.waiting_queue, get_chunked_req=lambda: None)
        counted = SchedulerLoadInquirer._get_num_pending_tokens(counter)
        stats = SimpleNamespace(num_pending_tokens=counted)
        return NextBatchPlan(SimpleNamespace(reqs=[first], prefill_stats=stats), running)

    made = prefill_slack._paced(makes, sched, TWO)
    assert made.batch_to_run.prefill_stats.num_pending_tokens == sum(r.seqlen for r in sched.waiting_queue)
    assert len(sched.waiting_queue) == 3 - starts


def test_a_held_queue_survives_an_error() -> None:
    queue = [Request("old", age_s=3.1), Request("new")]
    sched = scheduler(full(0.042), list(queue))

    def fails(*_: Any) -> None:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        _paced(fails, sched, TWO)
    assert sched.waiting_queue == queue


def test_a_compiled_grammar_is_seen_while_prompts_wait() -> None:
    """SGLang takes such requests into its queue at the start of the very call that is left out."""
    ready = [Request("json")]
    sched = scheduler(pacer(0.018), [Request("w")])
    sched.grammar_manager = SimpleNamespace(
        has_waiting_grammars=lambda: bool(ready), get_ready_grammar_requests=lambda: [ready.pop()]
    )
    sched._add_request_to_queue = sched.waiting_queue.append
    assert step(sched) is None
    assert [r.rid for r in sched.waiting_queue] == ["w", "json"]


def test_a_compiled_grammar_opens_no_way_past_the_gate() -> None:
    """SGLang would start such a request in the step in which it joins the queue, whatever was decided."""
    ready = [Request("json")]
    sched = scheduler(pacer(0.018), [])
    sched.grammar_manager = SimpleNamespace(
        has_waiting_grammars=lambda: bool(ready), get_ready_grammar_requests=lambda: [ready.pop()]
    )
    sched._add_request_to_queue = sched.waiting_queue.append
    assert step(sched) is None
    assert [r.rid for r in sched.waiting_queue] == ["json"]


def test_to_look_at_a_part_of_the_queue_takes_nobodys_turn() -> None:
    """As it is done for requests that may be shed."""
    paced, answers = pacer(0.018), [Request(f"a_{k}", age_s=5.0) for k in range(3)]
    load = Load(RUNNING.reqs, None, answers, slots=64, most_tokens=256, paced=True)
    paced.plan(load, NOW)
    turns = dict(paced._turns)
    paced.view(replace(load, waiting=[]), NOW)
    assert turns and paced._turns == turns


# -- shares of tenants ----------------------------------------------------------------------


def iterations_held(share: float, holder: str, waiter: str, n: int = 200) -> list[bool]:
    """Whether a fresh prompt of ``waiter`` waits in each of ``n`` iterations of 40 ms."""
    paced, now_s, held = full(0.042, share=share), NOW, []
    running = [Request(f"r{k}", slot=k, tenant=holder) for k in (0, 1)]
    for _ in range(n):
        prompt = Request("new", prompt=50, age_s=NOW - now_s, tenant=waiter)
        plan = paced.plan(Load(running, None, [prompt], slots=64, most_tokens=256, paced=True), now_s)
        held.append(plan.tokens == 0)
        now_s += 0.040
        paced.observe(decoded(now_s))
        for state in paced._states.values():
            state.decode_start_s += 0.040  # they have kept their pace
    return held


def decoded(end_s: float, verify_s: float = 0.04, beside: int = 0) -> IterationOutcome:
    """40 ms of plain decoding by r0 and r1. ``beside``: prompt tokens in its forward."""
    zeros, one = np.zeros(2), np.ones(2, np.int64)
    running = RunningBatch(("r0", "r1"), ("c", "c"), zeros, zeros, one, one, one, one, zeros)
    selection = Selection(np.zeros(0, np.bool_), 0 * one, 0 * one, np.ones(2))
    return IterationOutcome(
        IterationPlan(0, 0.0, running, DraftPlan(0), 2), CandidateTrees.empty(2), selection,
        np.zeros(0, np.bool_), one, end_s, draft_s=0.0, select_s=0.0, verify_s=verify_s, total_s=0.04,
        prefill_tokens=beside,
    )  # fmt: skip


def test_tight_requests_hold_others_up_for_their_share_of_the_time() -> None:
    assert all(iterations_held(1.0, "a", "b")), "no limit is set"
    held = iterations_held(0.5, "a", "b")
    assert held[80:].count(True) == pytest.approx(60, abs=6)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.9])
def test_tight_requests_hold_others_up_for_a_share_of_a_prompts_patience_in_one_go(share: float) -> None:
    held_s = 0.040 * iterations_held(share, "a", "b").index(False)
    assert 0.8 * share * 3.0 < held_s <= share * 3.0 + 0.040


def test_a_tenant_may_hold_up_its_own_prompts() -> None:
    assert all(iterations_held(0.5, "a", "a"))
    assert not all(iterations_held(0.5, ANONYMOUS, ANONYMOUS)), "nobody knows that these are one"


def test_what_prefills_really_cost_is_learned() -> None:
    """Ten times slower than the profile says: chunks become smaller."""
    slow = pacer(0.030)
    before = step(scheduler(slow, [Request("w")]))
    for tokens in (16, 64, 128) * 8:
        slow.observe_prefill(tokens, 10 * (0.0105 + 0.001 * tokens))
    slow._recent.spent_s, slow._recent.decodes = 0.0, slow._rule.most_decodes
    after = step(scheduler(slow, [Request("w")]))
    assert before is not None and after is not None and after < before


# -- in forwards with verification ------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "slo_aware", "others"), [(None, 64, 0), ("mixed", 64, 64), ("slack", 0, 0), ("exclusive", 0, 0)]
)
def test_prompts_share_forwards_where_the_mode_says_so(mode: Any, slo_aware: int, others: int) -> None:
    paced = pacer(0.030, AdaServeConfig(prefill=mode), most_beside=64)
    assert [paced.most_beside(policy) for policy in ("priced", "none")] == [slo_aware, others]
    paced.set_mode("exclusive")
    assert paced.most_beside("priced") == 0


def test_a_chunk_beside_a_verification_has_no_forward_to_pay_for() -> None:
    """So one runs that would not be worth it, but none that such a forward has no room for."""
    assert step(scheduler(pacer(0.021), [Request("w")])) is None
    beside = step(scheduler(pacer(0.021, most_beside=512), [Request("w")]))
    assert beside is not None and 16 <= beside < 100
    assert step(scheduler(pacer(1.0, most_beside=100), [Request("w")])) == 100
    nobody = scheduler(pacer(1.0, most_beside=100), [Request("w", prompt=900)])
    assert step(nobody, NOBODY) == 256, "nobody decodes whose forward could be shared"


def test_what_prompts_add_to_verifications_is_learned() -> None:
    """What the verification took beyond what it takes without them, and what SGLang did for them then."""
    paced = pacer(0.022, most_beside=256)
    for tokens in (16, 64, 128) * 8:
        alone_s = paced._costs.verify_s(2.0, Context(2.0, 2))
        paced.observe(decoded(NOW, alone_s + 0.003 * tokens, beside=tokens))
        paced.observe_beside(tokens, 0.002 * tokens)
    assert paced._beside.cost.per_token_s == pytest.approx(0.005, rel=0.02)
    load = Load(RUNNING.reqs, None, [Request("w")], slots=64, most_tokens=256, paced=True, most_beside=100)
    for others, token_s in ((load, 0.005), (replace(load, running=[]), 0.001)):
        cost = paced.view(others, NOW).situation.interference
        assert np.diff(cost.seconds) / np.diff(cost.sizes) == pytest.approx(token_s, rel=0.02)
