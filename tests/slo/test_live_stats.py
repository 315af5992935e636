"""What the scheduler process counts, and the snapshot made of it."""

from __future__ import annotations

import json
import math
import time
from itertools import product
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from adaserve.slo.classes import SLO, SLOConfig
from adaserve.slo.events import DraftLearning, DraftScores, FinishedRequest, IterationSample, Judged
from adaserve.slo.forecast_types import ClassForecast, Forecast
from adaserve.slo.prometheus import ServerMetrics
from adaserve.slo.snapshot import FRESH_S, MIN_LOST, build_snapshot
from adaserve.slo.stats import (
    BUCKET_S,
    HISTORY_S,
    PUBLISHED_AT_ONCE,
    SLOStats,
    bin_center,
    log_bin,
    slow_reason,
)

MODEL = {"model_name": "m"}


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def request(**values: Any) -> FinishedRequest:
    """40 tokens at 20 ms against an SLO of 30 ms, unless told otherwise."""
    tpot_slo_s, ttft_slo_s = values.pop("tpot_slo_s", 0.030), values.pop("ttft_slo_s", math.inf)
    slo = SLO(values.pop("slo_class", "coding"), tpot_slo_s, ttft_slo_s)
    defaults: dict[str, Any] = {"slo": slo, "ttft_s": 0.1, "tpot_s": 0.020, "output_tokens": 40}
    return FinishedRequest(**(defaults | values))


def iteration(**values: Any) -> IterationSample:
    defaults: dict[str, Any] = {
        "running": 4,
        "queue": 1,
        "depth": 3,
        "width": 2,
        "budget": 24,
        "verify_tokens": 20,
        "drafted_tokens": 24,
        "new_tokens": 10,
        "expected_tokens": 11.0,
        "draft_s": 0.004,
        "select_s": 0.001,
        "verify_s": 0.020,
        "total_s": 0.030,
    }
    return IterationSample(**(defaults | values))


def stats(registry: CollectorRegistry | None = None) -> tuple[SLOStats, Clock]:
    clock = Clock()
    metrics = ServerMetrics("m", registry) if registry is not None else None
    return SLOStats(SLOConfig(), metrics, clock), clock


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_a_clock_that_is_set_changes_nothing(monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    """What was counted before stays among the last minute's, and what comes after does, too."""
    s, real = SLOStats(SLOConfig()), time.time
    started = s.state()["now"]
    assert started == pytest.approx(real(), abs=60.0)
    s.finish(request())
    monkeypatch.setattr(time, "time", lambda: real() + step_s)
    s.finish(request())
    state = s.state()
    assert 0 <= state["now"] - started < 60.0
    assert sum(counts["requests"] for b in state["buckets"] for counts in b["classes"].values()) == 2
    assert state["buckets"][-1]["key"] - state["buckets"][0]["key"] <= 1


@pytest.mark.parametrize("since_s", [0.25, 1.25])
def test_a_steady_rate_is_shown_as_it_is(since_s: float) -> None:
    """Two requests a second of 40 tokens, whenever the page looks within a bucket."""
    s, clock = stats()
    clock.now += since_s
    for _ in range(400):
        s.finish(request())
        clock.now += 0.5
    snap = build_snapshot([json.loads(json.dumps(s.state()))])
    assert snap.throughput_tps == pytest.approx(80, rel=0.01)


def test_a_steady_rate_is_steady_in_all_of_the_history() -> None:
    s, clock = stats()
    for _ in range(800):
        s.finish(request())
        clock.now += 0.5
    rates = build_snapshot([s.state()]).history.throughput_tps
    shown = [rate for rate in rates if rate is not None]
    assert shown == pytest.approx([80.0] * len(shown)) and len(shown) > 140
    assert rates[-len(shown) :] == shown, "only the oldest points are not known"


def test_what_a_draft_learns_is_counted_up() -> None:
    """Counters, so that a rate survives a restart; the learner tells sums."""
    registry = CollectorRegistry()
    s, _ = stats(registry)
    learning = DraftLearning(trainer="running", swaps=1, tokens=100, cpu_s=0.5)
    s.learned(learning)
    learning.swaps, learning.tokens, learning.cpu_s = 3, 250, 0.75
    learning.judged = [Judged(0.0, 1.5, 1.4, 1.3, "better", {"chat": DraftScores(9, 1.4, 1.2)})]
    s.learned(learning)
    names = (
        "swaps_total",
        "rejected_total",
        "learned_tokens_total",
        "trainer_cpu_seconds_total",
        "trainer_running",
    )
    got = [registry.get_sample_value(f"adaserve:draft_{name}", MODEL) for name in names]
    assert got == [3, 0, 250, 0.75, 1]
    for draft, accepted in (("present", 1.4), ("first", 1.2)):
        labels = MODEL | {"draft": draft, "slo_class": "chat"}
        assert registry.get_sample_value("adaserve:draft_accepted", labels) == accepted


def test_snapshot_figures() -> None:
    s, clock = stats()
    s.finish(request())
    s.finish(request(tpot_s=0.060))
    s.finish(request(slo_class="chat", failed=True, tpot_s=None, output_tokens=0))
    read = {"all": 3, "256": 1}
    drafts = {"model": [24, 12, 5], "suffix": [8, 4, 4]}
    s.iteration(iteration(depth=9, width=4, sources=drafts, windows=read))
    s.iteration(iteration(new_tokens=6, depth=1, sources={"suffix": [8, 0, 0]}, windows={"256": 4}))
    clock.now += 4
    snap = build_snapshot([json.loads(json.dumps(s.state()))], "m", "adaserve", 25.0)
    coding, chat, _ = snap.classes
    assert (coding.name, coding.requests, coding.attained, coding.attainment) == ("coding", 2, 1, 0.5)
    assert coding.ratio_p50 == pytest.approx(2 / 3, rel=0.03)
    assert coding.ratio_p99 == pytest.approx(2.0, rel=0.03)
    assert (chat.failed, chat.attainment) == (1, 0.0)
    assert snap.goodput_tps == pytest.approx(40 / 4) and snap.throughput_tps == pytest.approx(80 / 4)
    assert snap.accept_length == pytest.approx(16 / 8)
    assert snap.calibration_error == pytest.approx(22 / 16 - 1)
    assert snap.drafts == {
        "model": {"proposed": 24 / 4, "verified": 12 / 4, "accepted": 5 / 4},
        "suffix": {"proposed": 16 / 4, "verified": 4 / 4, "accepted": 4 / 4},
    }
    assert snap.draft_windows == {"all": 3 / 8, "256": 5 / 8}
    assert snap.iteration_ms == pytest.approx({"draft": 4, "select": 1, "verify": 20, "other": 5})
    assert (snap.depth, snap.width, snap.budget, snap.running, snap.queue) == (1, 2, 24, 4, 1)
    assert [e.slo_class for e in snap.slow] == ["coding", "chat"]
    history = snap.history
    means = {"running": 4, "accept_length": 2, "depth": 5, "width": 3, "budget": 24}
    assert {name: getattr(history, name)[0] for name in means} == means
    ratios = history.ratio_p50["coding"][-1], history.ratio_p99["coding"][-1]
    assert ratios == (coding.ratio_p50, coding.ratio_p99)
    assert history.ttft_p50_ms["coding"][-1] == history.ttft_p99_ms["coding"][-1] == coding.ttft_p50_ms
    json.dumps(snap.to_json(), allow_nan=False)


def test_figures_leave_the_window() -> None:
    s, clock = stats()
    s.finish(request(tpot_s=0.9))
    clock.now += 100
    s.finish(request())
    clock.now += 4
    snap = build_snapshot([s.state()])
    assert snap.classes[0].attainment == 1.0
    assert snap.classes[0].total_requests == 2
    points = snap.history.attainment["coding"]
    assert points[0] == 0.0 and points[-1] == 1.0 and None in points


def test_a_server_that_reads_long_prompts_is_not_shown_as_idle() -> None:
    """No iteration ends for longer than its figures count as current."""
    s, clock = stats()
    s.load(0, 1, 0.3)
    assert build_snapshot([s.state()]).queue == 1, "the first prompt of all"
    s.iteration(iteration())
    depth = build_snapshot([s.state()]).depth
    for _ in range(3):
        clock.now += 0.8 * FRESH_S
        s.load(12, 30, 0.8)
        snapshot = build_snapshot([s.state()])
        assert (snapshot.running, snapshot.queue, snapshot.kv_use) == (12, 30, 0.8)
        assert snapshot.depth == depth
    clock.now += 2 * FRESH_S
    s.load(0, 0, 0.0)
    assert build_snapshot([s.state()]).running == 0


def test_idle_server_shows_no_running_requests() -> None:
    s, clock = stats()
    s.iteration(iteration())
    clock.now += 10
    snapshot = build_snapshot([s.state()])
    assert (snapshot.running, snapshot.queue, snapshot.kv_use) == (0, 0, None)


def test_ranks_are_added() -> None:
    (a, clock), (b, _) = stats(), stats()
    for s in (a, b):
        s.finish(request())
        s.iteration(iteration())
    b.finish(request(tpot_s=0.1))
    a._clock = b._clock = clock
    clock.now += 4
    snap = build_snapshot([a.state(), b.state()])
    assert snap.ranks == 2 and snap.running == 8
    assert snap.classes[0].requests == 3 and snap.classes[0].attainment == pytest.approx(2 / 3)
    assert snap.accept_length == pytest.approx(2.5)
    assert snap.queue == max(filter(None, snap.history.queue)) == 2


def test_the_forecast_of_the_best_rank_is_shown() -> None:
    (a, _), (b, _) = stats(), stats()
    assert build_snapshot([a.state()]).classes[0].next is None
    a.forecast(Forecast(0.5, {"coding": ClassForecast(30.0, 1.0, 0.0)}))
    b.forecast(Forecast(1.0, {"coding": ClassForecast(20.0, 1.5, 40.0)}))
    snap = build_snapshot([json.loads(json.dumps(s.state())) for s in (a, b)])
    assert snap.admission_open == 1.0
    assert snap.classes[0].next == ClassForecast(30.0, 1.0, 0.0), "a wait is worse than a slower token"
    assert snap.classes[1].next is None


def test_slos_that_routers_seem_to_drop() -> None:
    registry = CollectorRegistry()
    s, _ = stats(registry)
    for _ in range(MIN_LOST):
        s.came(routed=True, stated=False)
    assert build_snapshot([s.state()]).notes == [], "perhaps nobody states one"
    for stated in (True, False):
        s.came(routed=False, stated=stated)
    (note,) = build_snapshot([s.state()]).notes
    assert note.startswith(f"{MIN_LOST} requests came through a router without an SLO, while 1 ")
    count = {**MODEL, "through": "router", "slo_stated": "no"}
    assert registry.get_sample_value("adaserve:requests_total", count) == MIN_LOST


def test_history_matches_a_count_by_hand() -> None:
    s, clock = stats()
    events: list[tuple[float, bool]] = []
    for k in range(200):
        met = (k * 7) % 3 > 0
        s.finish(request(tpot_s=0.02 if met else 0.05))
        events.append((clock.now, met))
        clock.now += 1.1
    history = build_snapshot([s.state()]).history
    for t, got in zip(history.t, history.attainment["coding"], strict=True):
        inside = [met for at, met in events if t - 60 <= at < t]
        assert got == (pytest.approx(sum(inside) / len(inside)) if inside else None)


def test_the_first_bucket_is_still_filling() -> None:
    """In the first two seconds, and when the first request comes after minutes of rest."""
    s, clock = stats()
    s.finish(request())
    s.iteration(iteration())
    for _ in range(2):
        snap = build_snapshot([s.state()])
        assert snap.classes[0].total_requests >= 1
        assert len(snap.history.t) == len(snap.history.attainment["coding"]) >= 1
        clock.now += 1000.0
        s.finish(request())


def test_history_costs_the_same_after_any_rest() -> None:
    """After this one a list of all moments would not fit into memory."""
    s, clock = stats()
    s.finish(request())
    clock.now += 1e13
    s.finish(request())
    assert len(build_snapshot([s.state()]).history.t) <= HISTORY_S / BUCKET_S


def test_nothing_is_forgotten_of_iterations_before_the_history() -> None:
    """Who looks twice, however far apart, sees all that happened in between."""
    s, clock = stats()
    for _ in range(3 * int(HISTORY_S / BUCKET_S)):
        s.iteration(iteration(new_tokens=2))
        clock.now += BUCKET_S
    state = s.state()
    assert len(state["buckets"]) == HISTORY_S / BUCKET_S
    every = [state["older"], *state["buckets"]]
    assert sum(b["iterations"] for b in every) == 3 * HISTORY_S / BUCKET_S
    assert sum(b["sums"]["new_tokens"] for b in every) == 6 * HISTORY_S / BUCKET_S


def test_nothing_tells_whose_request_was_slow() -> None:
    s, _ = stats()
    s.finish(request(tpot_s=0.9))
    assert "rid" not in json.dumps(s.state()) and "rid" not in json.dumps(
        build_snapshot([s.state()]).to_json()
    )


def test_no_rank_has_reported() -> None:
    snap = build_snapshot([])
    assert snap.notes and snap.classes == []
    json.dumps(snap.to_json(), allow_nan=False)


def test_prometheus_counts() -> None:
    registry = CollectorRegistry()
    s, _ = stats(registry)
    s.finish(request(ttft_slo_s=0.05))
    s.finish(request())
    s.iteration(iteration(sources={"suffix": [8, 4, 3]}, windows={"all": 3, "64": 2}))
    s.finish(request(failed=True, tpot_s=None))  # publishes the iterations before it

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, MODEL | labels)

    def count(objective: str, outcome: str) -> float | None:
        wanted = {"slo_class": "coding", "objective": objective, "outcome": outcome}
        return value("adaserve:slo_requests_total", **wanted)

    assert [count("all", o) for o in ("met", "missed", "failed")] == [1, 1, 1]
    assert [count("tpot", o) for o in ("met", "missed", "failed")] == [2, 0, 1]
    assert [count("ttft", o) for o in ("met", "missed", "failed")] == [0, 1, 0]
    assert value("adaserve:goodput_tokens_total", slo_class="coding") == 40
    assert value("adaserve:slo_tpot_ratio_bucket", slo_class="coding", le="0.5") == 0
    assert value("adaserve:slo_tpot_ratio_bucket", slo_class="coding", le="0.75") == 2
    assert value("adaserve:iteration_seconds_total", phase="other") == pytest.approx(0.005)
    told = {
        "iterations_total": 1, "decoded_rows_total": 4, "drafted_tokens_total": 24,
        "verified_tokens_total": 20, "emitted_tokens_total": 10, "expected_tokens_total": 11,
        "tree_depth_sum": 3, "tree_width_sum": 2, "token_budget_sum": 24, "verify_batch_tokens_sum": 20,
        "accept_length_sum": 2.5, "calibration_error": 0.1,
    }  # fmt: skip
    assert {name: value(f"adaserve:{name}") for name in told} == pytest.approx(told)
    assert value("adaserve:output_tokens_total", slo_class="coding") == 120
    for stage, tokens in (("proposed", 8), ("verified", 4), ("accepted", 3)):
        assert value("adaserve:source_tokens_total", source="suffix", stage=stage) == tokens
    assert value("adaserve:draft_window_rows_total", window="all") == 3
    assert value("adaserve:draft_window_rows_total", window="64") == 2
    assert value("adaserve:slo_target", slo_class="coding") == 0.9


def test_an_objective_that_nobody_has_met_is_told_as_0() -> None:
    """A ratio in PromQL has no value where one side lacks the series: 0% attained would not be drawn."""
    registry = CollectorRegistry()
    stats(registry)
    for objective, outcome in product(("all", "tpot", "ttft"), ("met", "missed", "failed")):
        labels = MODEL | {"slo_class": "chat", "objective": objective, "outcome": outcome}
        assert registry.get_sample_value("adaserve:slo_requests_total", labels) == 0


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"failed": True}, "failed"),
        ({"ttft_slo_s": 0.05}, "first token came late"),
        ({"tpot_s": 0.05, "retractions": 2}, "retracted 2 times"),
        ({"ttft_slo_s": 0.05, "tpot_s": 0.05, "retractions": 1}, "retracted once"),
        ({"tpot_s": 0.05, "stall_s": 0.7, "iterations": 20}, "prefills of other requests took 700 ms"),
        (
            {"tpot_s": 0.05, "iterations": 30, "mean_running": 9.0},
            "each needed 2.2 tokens but gave 1.3 (9 running)",
        ),
    ],
)
def test_reasons(values: dict[str, Any], says: str) -> None:
    assert says in slow_reason(request(**values))


def test_ratio_bins_are_narrow() -> None:
    for ratio in (0.06, 0.5, 0.97, 1.0, 1.3, 17.0):
        assert bin_center(log_bin(ratio)) == pytest.approx(ratio, rel=0.016)


def test_an_objective_is_judged_by_the_requests_that_have_it() -> None:
    """As Prometheus counts it. A request without a TTFT SLO has not met one."""
    s, _ = stats()
    for ttft_s in (0.1, 0.9):
        s.finish(request(slo_class="custom", tpot_slo_s=math.inf, ttft_s=ttft_s, ttft_slo_s=0.8))
    s.finish(request(slo_class="custom", tpot_s=0.050))
    s.finish(request(slo_class="coding"))
    shown = {c.name: c for c in build_snapshot([s.state()]).classes}
    custom, coding = shown["custom"], shown["coding"]
    assert (custom.attainment_ttft, custom.attainment_tpot) == (0.5, 0.0)
    assert custom.attainment == pytest.approx(1 / 3)
    assert (coding.attainment_ttft, coding.attainment_tpot) == (None, 1.0)


def test_a_server_without_metrics_is_told_the_same() -> None:
    live, _ = stats()
    live.nothing_held()
    live.shed("coding", "overload")
    live.learned(DraftLearning(trainer="running"))


def test_iterations_are_published_a_few_at_a_time() -> None:
    """A whole second of them would hold up the iteration after it."""
    registry = CollectorRegistry()
    s, _ = stats(registry)
    published = []
    for _ in range(2 * PUBLISHED_AT_ONCE + 1):
        s.iteration(iteration())
        published.append(registry.get_sample_value("adaserve:iterations_total", MODEL))
    steps = [0.0, *(float(PUBLISHED_AT_ONCE * k) for k in (1, 2))]
    assert sorted(set(published)) == steps and published.index(steps[1]) == PUBLISHED_AT_ONCE - 1


def test_ttft_stands_beside_tpot_and_the_gate_beside_both() -> None:
    registry = CollectorRegistry()
    s, clock = stats(registry)
    for k in range(1, 101):
        s.finish(request(ttft_s=0.01 * k, ttft_slo_s=0.8))
    s.iteration(iteration(gated={"coding": [2, 0.7], "chat": [1, 0.2]}))
    s.iteration(iteration(gated={"coding": [4, 0.9]}))
    assert registry.get_sample_value("adaserve:iterations_total", MODEL) == 0, "not published one by one"
    s.forecast(Forecast(1.0, {}))  # publishes the iterations before it
    states = [s.state(), s.state()]
    coding, chat, _ = build_snapshot([json.loads(json.dumps(state)) for state in states]).classes
    assert (coding.attainment_ttft, coding.attainment_tpot) == (0.8, 1.0)
    assert coding.attainment == 0.8, "both count"
    assert coding.ttft_p50_ms == pytest.approx(500, rel=0.04)
    assert coding.ttft_p99_ms == pytest.approx(990, rel=0.04)
    assert coding.tpot_p50_ms == coding.tpot_p99_ms == pytest.approx(20, rel=0.03)
    assert (coding.gated, coding.gated_longest_ms) == (8, pytest.approx(900)), "two ranks"
    assert (chat.gated, chat.gated_longest_ms) == (0, None), "its prompt was let in"

    def value(name: str, slo_class: str) -> float | None:
        return registry.get_sample_value(f"adaserve:{name}", MODEL | {"slo_class": slo_class})

    assert (value("gated_prompts", "coding"), value("gated_longest_seconds", "coding")) == (4, 0.9)
    assert (value("gated_prompts", "chat"), value("gated_longest_seconds", "chat")) == (0, 0)
    assert value("ttft_seconds_count", "coding") == 100
    clock.now += 4
    history = build_snapshot([s.state()]).history
    assert [v for v in history.gated if v is not None] == [3.5], "prompts per iteration"
    clock.now += 60
    assert all(c.gated == 0 for c in build_snapshot([s.state()]).classes), "an idle server holds nobody back"
