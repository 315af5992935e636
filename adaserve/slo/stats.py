"""What the scheduler process counts: SLO outcomes per class and the shape of each iteration.

Pure Python and cheap (a few microseconds per call), since it runs inside the decode loop. Numbers
are kept in buckets of a few seconds for the last minutes; :meth:`SLOStats.state` gives them as JSON
values that :mod:`adaserve.slo.snapshot` merges over data-parallel ranks.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from adaserve.slo.classes import CUSTOM_CLASS, SLOConfig
from adaserve.slo.metrics import within
from adaserve.slo.prometheus import ServerMetrics

BUCKET_S = 2.0
HISTORY_S = 300.0
SLOW_KEPT = 12
RATIO_BINS_PER_OCTAVE = 24
_RATIO_LOW = 0.05


@dataclass(slots=True)
class FinishedRequest:
    """One answered (or failed) request, as the server saw it. Seconds; inf = no objective."""

    rid: str
    slo_class: str
    tpot_slo_s: float
    ttft_slo_s: float
    ttft_s: float | None
    tpot_s: float | None  # None when fewer than two tokens were generated
    output_tokens: int
    failed: bool = False
    iterations: int = 0  # decode iterations that it took part in
    stall_s: float = 0.0  # of its decode time, how much went into prefills of others
    retractions: int = 0
    mean_running: float = 0.0  # requests that decoded beside it, itself included


@dataclass(slots=True)
class IterationSample:
    """One decode iteration."""

    running: int
    queue: int
    depth: int
    width: int
    budget: int
    verify_tokens: int  # roots included
    drafted_tokens: int  # candidates, kept or not
    new_tokens: int  # emitted by all requests
    expected_tokens: float  # what selection expected them to emit
    draft_s: float
    select_s: float
    verify_s: float
    total_s: float
    kv_use: float = 0.0  # share of the KV pool in use


@dataclass(slots=True)
class _ClassBucket:
    """Outcomes of one class during one bucket."""

    requests: int = 0
    met: int = 0
    met_tpot: int = 0
    met_ttft: int = 0
    failed: int = 0
    tokens: int = 0
    good_tokens: int = 0
    tpot_sum_s: float = 0.0
    tpot_count: int = 0
    ttft_max_s: float = 0.0
    ratio: dict[int, int] = field(default_factory=dict)  # log bin of TPOT / SLO -> count

    def to_json(self) -> dict[str, Any]:
        names = ("requests", "met", "met_tpot", "met_ttft", "failed", "tokens", "good_tokens")
        data: dict[str, Any] = {name: getattr(self, name) for name in names}
        data |= {"tpot_sum_s": self.tpot_sum_s, "tpot_count": self.tpot_count}
        data |= {"ttft_max_s": self.ttft_max_s}
        data["ratio"] = {str(k): v for k, v in self.ratio.items()}
        return data


_SUMS = ("depth", "width", "budget", "verify_tokens", "drafted_tokens", "new_tokens", "running")
_TIMES = ("draft_s", "select_s", "verify_s", "total_s", "expected_tokens")


@dataclass(slots=True)
class _Bucket:
    """Everything that happened during ``BUCKET_S`` seconds."""

    key: int  # epoch time // BUCKET_S: the same on every rank
    classes: dict[str, _ClassBucket] = field(default_factory=dict)
    iterations: int = 0
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_SUMS + _TIMES, 0.0))
    queue_max: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "classes": {name: c.to_json() for name, c in self.classes.items()},
            "iterations": self.iterations,
            "sums": dict(self.sums),
            "queue_max": self.queue_max,
        }


def ratio_bin(ratio: float) -> int:
    """Logarithmic bin of TPOT / SLO, 3% wide."""
    return round(math.log2(max(ratio, _RATIO_LOW)) * RATIO_BINS_PER_OCTAVE)


def bin_ratio(key: int) -> float:
    """Centre of a bin."""
    return float(2.0 ** (key / RATIO_BINS_PER_OCTAVE))


class SLOStats:
    """Accumulates. One per scheduler process; not thread-safe."""

    def __init__(
        self,
        config: SLOConfig,
        metrics: ServerMetrics | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._labels = frozenset(config.labels)
        self._metrics = metrics
        self._clock = clock
        self._started = clock()
        self._buckets: deque[_Bucket] = deque(maxlen=int(HISTORY_S / BUCKET_S))
        self._slow: deque[dict[str, Any]] = deque(maxlen=SLOW_KEPT)
        self._slos: dict[str, tuple[float | None, float | None]] = {}
        self._last: dict[str, Any] = {}
        self._totals: dict[str, list[int]] = {}  # class -> [requests, met]
        if metrics is not None:
            metrics.start({name: config.target(name) for name in config.labels})

    def finish(self, request: FinishedRequest) -> None:
        """Counts a request that ended. Do not call it for warm-up or client-aborted requests."""
        # An unexpected name must not create a new time series.
        name = request.slo_class if request.slo_class in self._labels else CUSTOM_CLASS
        met_tpot = not request.failed and within(request.tpot_s, request.tpot_slo_s)
        met_ttft = not request.failed and (
            request.ttft_slo_s == math.inf or within(request.ttft_s, request.ttft_slo_s)
        )
        met = met_tpot and met_ttft
        self._slos[name] = (_ms(request.tpot_slo_s), _ms(request.ttft_slo_s))
        total = self._totals.setdefault(name, [0, 0])
        total[0] += 1
        total[1] += met
        bucket = self._bucket().classes.setdefault(name, _ClassBucket())
        _count(bucket, request, met_tpot, met_ttft)
        if not met:
            self._slow.append(self._slow_entry(request, name))
        if self._metrics is not None:
            self._metrics.finish(name, request, met_tpot, met_ttft)

    def iteration(self, sample: IterationSample) -> None:
        """Counts a decode iteration."""
        bucket = self._bucket()
        bucket.iterations += 1
        sums = bucket.sums
        for key in _SUMS + _TIMES:
            sums[key] += getattr(sample, key)
        bucket.queue_max = max(bucket.queue_max, sample.queue)
        self._last = {
            "at": self._clock(),
            "running": sample.running,
            "queue": sample.queue,
            "depth": sample.depth,
            "width": sample.width,
            "budget": sample.budget,
            "kv_use": sample.kv_use,
        }
        if self._metrics is not None:
            self._metrics.iteration(sample)

    def state(self) -> dict[str, Any]:
        """JSON values; see :func:`adaserve.slo.snapshot.build_snapshot`."""
        return {
            "now": self._clock(),
            "started": self._started,
            "bucket_s": BUCKET_S,
            "targets": {name: self._config.target(name) for name in self._config.labels},
            "slos": {name: list(pair) for name, pair in self._slos.items()},
            "totals": {name: list(pair) for name, pair in self._totals.items()},
            "buckets": [b.to_json() for b in self._buckets],
            "last": dict(self._last),
            "slow": list(self._slow),
        }

    def _bucket(self) -> _Bucket:
        key = int(self._clock() // BUCKET_S)
        if not self._buckets or self._buckets[-1].key != key:
            self._buckets.append(_Bucket(key))
        return self._buckets[-1]

    def _slow_entry(self, request: FinishedRequest, name: str) -> dict[str, Any]:
        return {
            "at": self._clock(),
            "rid": request.rid[:40],
            "slo_class": name,
            "tpot_ms": None if request.tpot_s is None else request.tpot_s * 1e3,
            "slo_tpot_ms": _ms(request.tpot_slo_s),
            "ttft_ms": None if request.ttft_s is None else request.ttft_s * 1e3,
            "slo_ttft_ms": _ms(request.ttft_slo_s),
            "output_tokens": request.output_tokens,
            "reason": slow_reason(request),
        }


def _count(bucket: _ClassBucket, request: FinishedRequest, met_tpot: bool, met_ttft: bool) -> None:
    bucket.requests += 1
    bucket.met += met_tpot and met_ttft
    bucket.met_tpot += met_tpot
    bucket.met_ttft += met_ttft
    bucket.failed += request.failed
    bucket.tokens += request.output_tokens
    if met_tpot and met_ttft:
        bucket.good_tokens += request.output_tokens
    if request.ttft_s is not None:
        bucket.ttft_max_s = max(bucket.ttft_max_s, request.ttft_s)
    if request.tpot_s is not None:
        bucket.tpot_sum_s += request.tpot_s
        bucket.tpot_count += 1
        if math.isfinite(request.tpot_slo_s):
            key = ratio_bin(request.tpot_s / request.tpot_slo_s)
            bucket.ratio[key] = bucket.ratio.get(key, 0) + 1


def slow_reason(request: FinishedRequest) -> str:
    """One short sentence: what kept the request from its SLO."""
    if request.failed:
        return "it failed"
    if within(request.tpot_s, request.tpot_slo_s):
        return "the first token came late: it waited in the queue or for its prefill"
    if request.retractions:
        times = "once" if request.retractions == 1 else f"{request.retractions} times"
        return f"retracted {times}: the KV cache was full"
    assert request.tpot_s is not None
    decode_s = request.tpot_s * max(1, request.output_tokens - 1)
    excess_s = decode_s - request.tpot_slo_s * max(1, request.output_tokens - 1)
    if request.stall_s >= 0.5 * excess_s:
        return f"prefills of other requests took {request.stall_s * 1e3:.0f} ms of {decode_s * 1e3:.0f} ms"
    if request.iterations == 0:
        return "slower than its SLO"
    iteration_s = (decode_s - request.stall_s) / request.iterations
    need, got = iteration_s / request.tpot_slo_s, (request.output_tokens - 1) / request.iterations
    beside = f", {request.mean_running:.0f} running" if request.mean_running else ""
    return (
        f"{iteration_s * 1e3:.0f} ms per iteration: needed {need:.1f} tokens in each, got {got:.1f}{beside}"
    )


def _ms(value_s: float) -> float | None:
    return value_s * 1e3 if math.isfinite(value_s) else None


def ratio_percentile(counts: dict[int, int], p: float) -> float | None:
    """Percentile of TPOT / SLO from binned counts; None without any."""
    left = math.ceil(sum(counts.values()) * p / 100)
    if not left:
        return None
    for key in sorted(counts):
        left -= counts[key]
        if left <= 0:
            return bin_ratio(key)
    return None
