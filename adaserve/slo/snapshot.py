"""The JSON behind the live page: ``/slo/snapshot.json``.

Built in the server's main process from the states of all scheduler processes
(:meth:`adaserve.slo.stats.SLOStats.state`, one per data-parallel rank).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from adaserve.slo.classes import CUSTOM_CLASS, DEFAULT_CLASS
from adaserve.slo.stats import ratio_percentile

SNAPSHOT_VERSION = 1
WINDOW_S = 60.0
"""Current figures are over this long; the history shows how they got there."""


@dataclass(frozen=True)
class ClassSnapshot:
    """One SLO class over the window. None = nothing to tell yet."""

    name: str
    target: float
    slo_tpot_ms: float | None
    slo_ttft_ms: float | None
    requests: int
    attained: int
    failed: int
    attainment: float | None
    attainment_tpot: float | None
    attainment_ttft: float | None
    tpot_mean_ms: float | None
    ratio_p50: float | None  # TPOT / SLO
    ratio_p99: float | None
    goodput_tps: float
    throughput_tps: float
    total_requests: int  # since the server started
    total_attained: int


@dataclass(frozen=True)
class History:
    """Equally spaced points, oldest first; None where nothing happened. ``t``: epoch seconds."""

    t: list[float]
    goodput_tps: list[float | None]
    throughput_tps: list[float | None]
    running: list[float | None]
    queue: list[float | None]
    accept_length: list[float | None]
    depth: list[float | None]
    width: list[float | None]
    budget: list[float | None]
    attainment: dict[str, list[float | None]]  # class -> share over the window that ends at t
    ratio_p50: dict[str, list[float | None]]
    ratio_p99: dict[str, list[float | None]]


@dataclass(frozen=True)
class Snapshot:
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
    goodput_tps: float
    throughput_tps: float
    accept_length: float | None  # tokens per request and iteration, bonus included
    depth: int | None  # d, w, B of the last iteration
    width: int | None
    budget: int | None
    iteration_ms: dict[str, float]  # mean per phase: draft, select, verify, other
    calibration_error: float | None  # expected / emitted tokens - 1
    classes: list[ClassSnapshot]
    slow: list[dict[str, Any]]  # newest first
    history: History
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def build_snapshot(
    states: Sequence[Mapping[str, Any]],
    model: str | None = None,
    policy: str | None = None,
    baseline_ms: float | None = None,
) -> Snapshot:
    """Merges the states of all ranks; an empty list gives a snapshot that says so."""
    now = max((s["now"] for s in states), default=0.0)
    bucket_s = float(states[0]["bucket_s"]) if states else 2.0
    # The bucket that is still filling would show as a dip.
    last_key = int(now // bucket_s) - 1
    buckets = _merged(states)
    window = [buckets[k] for k in _keys(last_key + 1, WINDOW_S, bucket_s) if k in buckets]
    span_s = min(WINDOW_S, max(bucket_s, now - min((s["started"] for s in states), default=now)))
    names = _class_names(states)
    lasts = [s["last"] for s in states if s["last"]]
    sums = _sum_all(window)
    return Snapshot(
        schema_version=SNAPSHOT_VERSION,
        time=now,
        uptime_s=now - min((s["started"] for s in states), default=now),
        window_s=WINDOW_S,
        model=model,
        policy=policy,
        baseline_ms=baseline_ms,
        ranks=len(states),
        running=_fresh(lasts, now, "running"),
        queue=_fresh(lasts, now, "queue"),
        kv_use=max((last["kv_use"] for last in lasts), default=None),
        goodput_tps=sum(c["good_tokens"] for b in window for c in b["classes"].values()) / span_s,
        throughput_tps=sum(c["tokens"] for b in window for c in b["classes"].values()) / span_s,
        accept_length=_share(sums.get("new_tokens", 0.0), sums.get("running", 0.0)),
        depth=max((last["depth"] for last in lasts), default=None),
        width=max((last["width"] for last in lasts), default=None),
        budget=max((last["budget"] for last in lasts), default=None),
        iteration_ms=_phases(sums, sum(b["iterations"] for b in window)),
        calibration_error=_calibration(sums),
        classes=[_class(name, states, window, span_s) for name in names],
        slow=sorted((e for s in states for e in s["slow"]), key=lambda e: -e["at"])[:12],
        history=_history(buckets, names, last_key, bucket_s),
        notes=[] if states else ["the scheduler has not reported yet"],
    )


def _class_names(states: Sequence[Mapping[str, Any]]) -> list[str]:
    """Configured classes in their order; "default" and "custom" only once they were used."""
    names = list(dict.fromkeys(n for s in states for n in s["targets"]))
    used = {n for s in states for n in s["totals"]}
    return [n for n in names if n not in (DEFAULT_CLASS, CUSTOM_CLASS) or n in used]


def _keys(end: int, span_s: float, bucket_s: float) -> range:
    return range(end - int(span_s / bucket_s) + 1, end + 1)


def _merged(states: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Buckets by time, added over ranks."""
    merged: dict[int, dict[str, Any]] = {}
    for state in states:
        for b in state["buckets"]:
            into = merged.setdefault(
                b["key"], {"classes": {}, "iterations": 0, "sums": {}, "queue_max": 0, "ranks": 0}
            )
            into["iterations"] += b["iterations"]
            into["queue_max"] += b["queue_max"]
            into["ranks"] += 1
            _add(into["sums"], b["sums"])
            for name, c in b["classes"].items():
                _add_class(into["classes"].setdefault(name, {"ratio": {}}), c)
    return merged


def _add(into: dict[str, float], values: Mapping[str, float]) -> None:
    for key, value in values.items():
        into[key] = into.get(key, 0) + value


def _add_class(into: dict[str, Any], c: Mapping[str, Any]) -> None:
    for key, value in c.items():
        if key == "ratio":
            for k, n in value.items():
                into["ratio"][int(k)] = into["ratio"].get(int(k), 0) + n
        elif key == "ttft_max_s":
            into[key] = max(into.get(key, 0.0), value)
        else:
            into[key] = into.get(key, 0) + value


def _sum_all(window: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for b in window:
        _add(sums, b["sums"])
    return sums


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _fresh(lasts: Sequence[Mapping[str, Any]], now: float, key: str) -> int:
    """An idle scheduler reports no iterations: what it said long ago no longer holds."""
    return sum(int(last[key]) for last in lasts if now - last["at"] < 5.0)


def _phases(sums: Mapping[str, float], iterations: int) -> dict[str, float]:
    if not iterations:
        return {}
    ms = {k: sums[f"{k}_s"] * 1e3 / iterations for k in ("draft", "select", "verify")}
    return ms | {"other": max(0.0, sums["total_s"] * 1e3 / iterations - sum(ms.values()))}


def _calibration(sums: Mapping[str, float]) -> float | None:
    ratio = _share(sums.get("expected_tokens", 0.0), sums.get("new_tokens", 0.0))
    return None if ratio is None else ratio - 1


def _of(window: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    total: dict[str, Any] = {"ratio": {}}
    for b in window:
        if name in b["classes"]:
            _add_class(total, b["classes"][name])
    return total


def _class(
    name: str, states: Sequence[Mapping[str, Any]], window: Sequence[Mapping[str, Any]], span_s: float
) -> ClassSnapshot:
    c = _of(window, name)
    n = c.get("requests", 0)
    slo = next((s["slos"][name] for s in states if name in s["slos"]), [None, None])
    mean_s = _share(c.get("tpot_sum_s", 0.0), c.get("tpot_count", 0))
    return ClassSnapshot(
        name=name,
        target=next(s["targets"][name] for s in states if name in s["targets"]),
        slo_tpot_ms=slo[0],
        slo_ttft_ms=slo[1],
        requests=n,
        attained=c.get("met", 0),
        failed=c.get("failed", 0),
        attainment=_share(c.get("met", 0), n),
        attainment_tpot=_share(c.get("met_tpot", 0), n),
        attainment_ttft=_share(c.get("met_ttft", 0), n),
        tpot_mean_ms=None if mean_s is None else mean_s * 1e3,
        ratio_p50=ratio_percentile(c["ratio"], 50),
        ratio_p99=ratio_percentile(c["ratio"], 99),
        goodput_tps=c.get("good_tokens", 0) / span_s,
        throughput_tps=c.get("tokens", 0) / span_s,
        total_requests=sum(s["totals"].get(name, [0, 0])[0] for s in states),
        total_attained=sum(s["totals"].get(name, [0, 0])[1] for s in states),
    )


def _history(
    buckets: Mapping[int, Mapping[str, Any]], names: Sequence[str], last_key: int, bucket_s: float
) -> History:
    # At least one point: at first, and after a rest, the only bucket is the one that is still filling.
    keys = list(range(min([*buckets, last_key]), last_key + 1))[-150:]
    at = [buckets.get(k) for k in keys]

    def mean(name: str, per: str | None = None) -> list[float | None]:
        """Per iteration, or per unit of another sum."""
        return [
            None
            if b is None
            else _share(b["sums"].get(name, 0.0), b["sums"][per] if per else b["iterations"])
            for b in at
        ]

    def tokens(name: str) -> list[float | None]:
        # Requests report their tokens when they finish: single buckets jump, 10 s are readable.
        per_bucket = {k: _tokens(buckets.get(k), name) for k in range(keys[0] - 4, keys[-1] + 1)}
        return [sum(per_bucket[j] for j in range(k - 4, k + 1)) / (5 * bucket_s) for k in keys]

    rolling = {name: _rolling(buckets, name, keys, int(WINDOW_S / bucket_s)) for name in names}
    return History(
        t=[(k + 1) * bucket_s for k in keys],
        goodput_tps=tokens("good_tokens"),
        throughput_tps=tokens("tokens"),
        running=mean("running"),
        queue=[None if b is None else float(b["queue_max"]) for b in at],
        accept_length=mean("new_tokens", per="running"),
        depth=mean("depth"),
        width=mean("width"),
        budget=mean("budget"),
        attainment={name: points[0] for name, points in rolling.items()},
        ratio_p50={name: points[1] for name, points in rolling.items()},
        ratio_p99={name: points[2] for name, points in rolling.items()},
    )


Points = list[float | None]


def _rolling(
    buckets: Mapping[int, Mapping[str, Any]], name: str, keys: Sequence[int], length: int
) -> tuple[Points, Points, Points]:
    """Attainment, p50 and p99 of TPOT / SLO over the window that ends at each key. Adds what enters
    and subtracts what leaves: this runs on the server's event loop."""
    requests = met = 0
    ratio: dict[int, int] = {}
    points: tuple[Points, Points, Points] = ([], [], [])
    for k in range(keys[0] - length + 1, keys[-1] + 1):
        for key, sign in ((k, 1), (k - length, -1)):
            if sign < 0 and key < keys[0] - length + 1:
                continue
            c = (buckets.get(key) or _NO_CLASSES)["classes"].get(name)
            if c is not None:
                requests += sign * c["requests"]
                met += sign * c["met"]
                for bin_key, n in c["ratio"].items():
                    ratio[bin_key] = ratio.get(bin_key, 0) + sign * n
        if k >= keys[0]:
            points[0].append(_share(met, requests))
            points[1].append(ratio_percentile(ratio, 50))
            points[2].append(ratio_percentile(ratio, 99))
    return points


_NO_CLASSES: Mapping[str, Any] = {"classes": {}}


def _tokens(bucket: Mapping[str, Any] | None, key: str) -> float:
    return 0.0 if bucket is None else sum(c[key] for c in bucket["classes"].values())
