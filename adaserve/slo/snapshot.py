"""The JSON behind the live page: ``/slo/snapshot.json``.

Built in the server's main process from the states of all scheduler processes
(:class:`adaserve.slo.stats.RankState`, one per data-parallel rank).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from adaserve.slo.classes import CUSTOM_CLASS, DEFAULT_CLASS
from adaserve.slo.events import READING, DraftLearning, IterationSample
from adaserve.slo.forecast_types import ClassForecast, Forecast
from adaserve.slo.stats import (
    BUCKET_S,
    HISTORY_S,
    Bucket,
    ClassCounts,
    RankState,
    SlowRequest,
    add_numbers,
    bin_center,
)

SNAPSHOT_VERSION = 3
WINDOW_S = 60.0
"""Current figures are over this long; the history shows how they got there."""
SMOOTHING = 5
"""Buckets that a point of tokens per second is over: requests report their tokens when they finish."""
MIN_LOST = 10
"""So many requests without an SLO are worth a note."""
FRESH_S = 5.0
"""A scheduler with nothing to do tells no load. Figures older than this are no longer shown as current."""

Points = list[float | None]


class ClassSnapshot(msgspec.Struct):
    """One SLO class over the window. None = nothing to report yet."""

    name: str
    target: float
    slo_tpot_ms: float | None
    slo_ttft_ms: float | None
    requests: int
    attained: int
    failed: int
    attainment: float | None
    attainment_tpot: float | None  # of the requests that have an SLO for it, as the next one
    attainment_ttft: float | None
    tpot_mean_ms: float | None
    tpot_p50_ms: float | None
    tpot_p99_ms: float | None
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    gated: int  # prompts that the admission gate holds back now
    gated_longest_ms: float | None  # how long the oldest of them has waited
    ratio_p50: float | None  # TPOT / SLO
    ratio_p99: float | None
    goodput_tps: float
    throughput_tps: float
    total_requests: int  # since the server started
    total_attained: int
    next: ClassForecast | None  # what one more request would get


class History(msgspec.Struct):
    """Equally spaced points, oldest first; None if nothing happened or is known. ``t``: epoch seconds."""

    t: list[float]
    goodput_tps: Points
    throughput_tps: Points
    running: Points
    queue: Points
    gated: Points
    accept_length: Points
    depth: Points
    width: Points
    budget: Points
    attainment: dict[str, Points]  # class -> share over the window that ends at t
    ratio_p50: dict[str, Points]
    ratio_p99: dict[str, Points]
    ttft_p50_ms: dict[str, Points]
    ttft_p99_ms: dict[str, Points]


class Snapshot(msgspec.Struct):
    """What the page shows."""

    schema_version: int
    time: float  # epoch seconds
    uptime_s: float
    window_s: float
    model: str | None
    policy: str | None
    baseline_ms: float | None
    ranks: int
    running: int
    queue: int
    kv_use: float | None  # share, 0 to 1
    admission_open: float | None  # 1 = a new prompt starts at once
    goodput_tps: float
    throughput_tps: float
    accept_length: float | None  # tokens per request and iteration, bonus included
    depth: int | None  # d, w, B of the last iteration
    width: int | None
    budget: int | None
    drafts: dict[str, dict[str, float]]  # source -> tokens/s proposed, verified and accepted
    draft_windows: dict[str, float]  # recent tokens of the context, or "all" -> share of drafts that read it
    iteration_ms: dict[str, float]  # mean per phase: draft, select, verify, other
    calibration_error: float | None  # expected / emitted tokens - 1
    classes: list[ClassSnapshot]
    slow: list[SlowRequest]  # newest first
    history: History
    learning: DraftLearning | None  # of the first rank where a draft learns
    notes: list[str]  # sentences: what else should be known now

    def to_json(self) -> dict[str, Any]:
        built: dict[str, Any] = msgspec.to_builtins(self)
        return built


def build_snapshot(
    states: Sequence[Mapping[str, Any]],
    model: str | None = None,
    policy: str | None = None,
    baseline_ms: float | None = None,
    notes: Iterable[str] = (),
) -> Snapshot:
    """Merges the states and ``notes`` of all ranks. No states at all give a snapshot that says so."""
    ranks = [msgspec.convert(s, RankState, str_keys=True) for s in states]
    now = max((r.now for r in ranks), default=0.0)
    uptime_s = now - min((r.started for r in ranks), default=now)
    last_key = int(now // BUCKET_S) - 1  # the bucket that is still filling would show as a dip
    buckets = _merged(ranks, last_key)
    first = last_key + 2 - int(WINDOW_S / BUCKET_S)
    recent = [b for k, b in buckets.items() if first <= k]
    total = Bucket(0)
    for b in recent:
        total.add(b)
    span_s = now - first * BUCKET_S  # the last bucket has only begun
    per_s = 1.0 / min(span_s, max(BUCKET_S, uptime_s))
    names = _class_names(ranks)
    lasts = [r.last for r in ranks if r.last is not None]
    fresh = [r.last for r in ranks if r.last is not None and now - r.last_at < FRESH_S]
    accepted = _share(total.sums.get("new_tokens", 0.0), total.sums.get("running", 0.0))
    expected = _share(total.sums.get("expected_tokens", 0.0), total.sums.get("new_tokens", 0.0))
    return Snapshot(
        schema_version=SNAPSHOT_VERSION,
        time=now,
        uptime_s=uptime_s,
        window_s=WINDOW_S,
        model=model,
        policy=policy,
        baseline_ms=baseline_ms,
        ranks=len(ranks),
        running=sum(last.running for last in fresh),
        queue=sum(last.queue for last in fresh),
        kv_use=max((last.kv_use for last in fresh), default=None),
        admission_open=max(
            (r.forecast.admission_open for r in ranks if r.forecast is not None), default=None
        ),
        goodput_tps=sum(c.good_tokens for c in total.classes.values()) * per_s,
        throughput_tps=sum(c.tokens for c in total.classes.values()) * per_s,
        accept_length=accepted,
        **_shape(lasts),
        drafts=_drafts(total, per_s),
        draft_windows=_windows(total),
        iteration_ms=_phases(total),
        calibration_error=None if expected is None else expected - 1,
        classes=[
            _class(name, ranks, total.classes.get(name, ClassCounts()), per_s, _gated(name, fresh))
            for name in names
        ],
        slow=sorted((e for r in ranks for e in r.slow), key=lambda e: -e.at)[:12],
        history=_history(buckets, names, last_key),
        learning=next((r.learning for r in ranks if r.learning is not None), None),
        notes=list(dict.fromkeys([*notes, *_lost_slos(ranks), *_learning_notes(ranks)]))
        if ranks
        else ["the scheduler has not reported yet"],
    )


def _learning_notes(ranks: Sequence[RankState]) -> list[str]:
    ended = any(r.learning is not None and r.learning.trainer == "ended" for r in ranks)
    return ["the draft no longer learns: its trainer has ended (the log says when)"] if ended else []


def _lost_slos(ranks: Sequence[RankState]) -> list[str]:
    """A sentence when SLOs seem to get lost on their way here."""
    stated, without = sum(r.stated for r in ranks), sum(r.routed_without for r in ranks)
    if not stated or without < MIN_LOST:
        return []
    return [
        f"{without} requests came through a router without an SLO, while {stated} requests stated one: if "
        "their clients send x-slo headers, the router drops them (docs/fleet.md says what gets through)"
    ]


def _merged(ranks: Sequence[RankState], last_key: int) -> dict[int, Bucket]:
    """Buckets of the last ``HISTORY_S`` by time, added over ranks."""
    merged: dict[int, Bucket] = {}
    for bucket in (b for r in ranks for b in r.buckets):
        if bucket.key > last_key - HISTORY_S / BUCKET_S:
            merged.setdefault(bucket.key, Bucket(bucket.key)).add(bucket)
    return merged


def _class_names(ranks: Sequence[RankState]) -> list[str]:
    """Configured classes in their order; "default" and "custom" only once they were used."""
    used = {n for r in ranks for n in r.totals}
    names = dict.fromkeys(n for r in ranks for n in r.targets)
    return [n for n in names if n not in (DEFAULT_CLASS, CUSTOM_CLASS) or n in used]


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _shape(lasts: Sequence[IterationSample]) -> dict[str, int | None]:
    keys = ("depth", "width", "budget")
    return {key: max((getattr(last, key) for last in lasts), default=None) for key in keys}


def _phases(total: Bucket) -> dict[str, float]:
    if not total.iterations:
        return {}
    mean_ms = {
        k: total.sums[f"{k}_s"] * 1e3 / total.iterations for k in ("draft", "select", "verify", "total")
    }
    whole = mean_ms.pop("total")
    return mean_ms | {"other": max(0.0, whole - sum(mean_ms.values()))}


def _drafts(total: Bucket, per_s: float) -> dict[str, dict[str, float]]:
    """By source, of those that proposed anything."""
    drafts: dict[str, dict[str, float]] = {}
    for key, tokens in total.sums.items():
        stage, by, source = key.partition(" by ")
        if by:
            drafts.setdefault(source, {})[stage] = tokens * per_s
    return drafts


def _windows(total: Bucket) -> dict[str, float]:
    """Shares of the drafts that were made."""
    rows = {k.removeprefix(READING): v for k, v in total.sums.items() if k.startswith(READING)}
    return {window: count / sum(rows.values()) for window, count in rows.items()}


def _gated(name: str, fresh: Sequence[IterationSample]) -> tuple[int, float | None]:
    """Prompts of the class that wait at the gate, and milliseconds of the oldest."""
    held = [last.gated[name] for last in fresh if name in last.gated]
    return int(sum(count for count, _ in held)), max((1e3 * waited_s for _, waited_s in held), default=None)


def _class(
    name: str, ranks: Sequence[RankState], c: ClassCounts, per_s: float, gated: tuple[int, float | None]
) -> ClassSnapshot:
    tpot_ms, ttft_ms = next((r.slos[name] for r in ranks if name in r.slos), (None, None))
    totals = [r.totals.get(name, (0, 0)) for r in ranks]
    mean_s = _share(c.tpot_sum_s, c.tpot_count)
    (p50, p99), (tpot_p50, tpot_p99), (ttft_p50, ttft_p99) = (
        [points[0] for points in _percentiles([c], name)] for name in ("ratio", "tpot_ms", "ttft_ms")
    )
    return ClassSnapshot(
        name=name,
        target=next(r.targets[name] for r in ranks if name in r.targets),
        slo_tpot_ms=tpot_ms,
        slo_ttft_ms=ttft_ms,
        requests=c.requests,
        attained=c.met,
        failed=c.failed,
        attainment=_share(c.met, c.requests),
        attainment_tpot=_share(c.met_tpot, c.asked_tpot),
        attainment_ttft=_share(c.met_ttft, c.asked_ttft),
        tpot_mean_ms=None if mean_s is None else mean_s * 1e3,
        tpot_p50_ms=tpot_p50,
        tpot_p99_ms=tpot_p99,
        ttft_p50_ms=ttft_p50,
        ttft_p99_ms=ttft_p99,
        gated=gated[0],
        gated_longest_ms=gated[1],
        ratio_p50=p50,
        ratio_p99=p99,
        goodput_tps=c.good_tokens * per_s,
        throughput_tps=c.tokens * per_s,
        total_requests=sum(requests for requests, _ in totals),
        total_attained=sum(attained for _, attained in totals),
        next=_best([r.forecast for r in ranks if r.forecast is not None], name),
    )


def _best(forecasts: Sequence[Forecast], name: str) -> ClassForecast | None:
    """The forecast of the rank where one more request of the class would be fastest."""
    told = [f.classes[name] for f in forecasts if name in f.classes]
    return min(told, key=lambda forecast: (forecast.wait_ms, forecast.tpot_ms), default=None)


def _history(buckets: Mapping[int, Bucket], names: Sequence[str], last_key: int) -> History:
    # At least one point: at first, and after a rest, the only bucket is the one that is still filling.
    keys = range(min([*buckets, last_key]), last_key + 1)
    at = [buckets.get(k) for k in keys]
    # Of the first points of a full history, part of what they are over has been dropped.
    whole_from = last_key + 1 - int(HISTORY_S / BUCKET_S) + SMOOTHING

    def mean(name: str, per: str | None = None) -> Points:
        """Per iteration, or per unit of another sum."""
        return [
            None
            if b is None
            else _share(b.sums.get(name, 0.0), b.sums.get(per, 0.0) if per else b.iterations)
            for b in at
        ]

    def tokens(name: str) -> Points:
        made = [0 if b is None else sum(getattr(c, name) for c in b.classes.values()) for b in at]
        rates: list[float] = (_moving_sum(np.array(made, float), SMOOTHING) / (SMOOTHING * BUCKET_S)).tolist()
        return [rate if whole_from <= k else None for k, rate in zip(keys, rates, strict=True)]

    none = ClassCounts()
    per_class = {n: [none if b is None else b.classes.get(n, none) for b in at] for n in names}
    length = int(WINDOW_S / BUCKET_S)
    ratios = {n: _percentiles(counts, "ratio", length) for n, counts in per_class.items()}
    ttfts = {n: _percentiles(counts, "ttft_ms", length) for n, counts in per_class.items()}
    return History(
        t=[(k + 1) * BUCKET_S for k in keys],
        goodput_tps=tokens("good_tokens"),
        throughput_tps=tokens("tokens"),
        running=mean("running"),
        queue=[None if b is None else float(b.queue_max) for b in at],
        gated=mean("gated"),
        accept_length=mean("new_tokens", per="running"),
        depth=mean("depth"),
        width=mean("width"),
        budget=mean("budget"),
        attainment={n: _attainment(counts, length) for n, counts in per_class.items()},
        ratio_p50={n: p50 for n, (p50, _) in ratios.items()},
        ratio_p99={n: p99 for n, (_, p99) in ratios.items()},
        ttft_p50_ms={n: p50 for n, (p50, _) in ttfts.items()},
        ttft_p99_ms={n: p99 for n, (_, p99) in ttfts.items()},
    )


def _moving_sum(values: np.ndarray, length: int) -> np.ndarray:
    """Sums over the last ``length`` rows, each row included; the shape of ``values``."""
    total = np.cumsum(values, axis=0)
    total[length:] -= total[:-length].copy()
    return total


def _attainment(counts: Sequence[ClassCounts], length: int) -> Points:
    """Share that met, over the window that ends at each bucket."""
    sums = _moving_sum(np.array([(c.met, c.requests) for c in counts], float), length)
    return [_share(met, requests) for met, requests in sums.tolist()]


def _percentiles(counts: Sequence[ClassCounts], name: str, length: int = 1) -> tuple[Points, Points]:
    """p50 and p99 of the histogram ``name`` over the ``length`` buckets that end at each bucket."""
    histograms = [getattr(c, name) for c in counts]
    everything: dict[int, int] = {}
    for histogram in histograms:
        add_numbers(everything, histogram)
    if not everything:
        return [None] * len(counts), [None] * len(counts)
    bins = sorted(everything)
    table = np.array([[histogram.get(b, 0) for b in bins] for histogram in histograms], float)
    below = np.cumsum(_moving_sum(table, length), axis=1)  # [buckets, bins]
    centers = np.array([bin_center(b) for b in bins])

    def percentile(p: float) -> Points:
        reached = below >= np.maximum(1.0, np.ceil(below[:, -1:] * p / 100))
        values = centers[np.argmax(reached, axis=1)].tolist()
        return [v if n else None for v, n in zip(values, below[:, -1].tolist(), strict=True)]

    return percentile(50), percentile(99)
