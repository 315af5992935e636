"""What the scheduler process counts: SLO outcomes per class and the shape of each iteration.

Cheap (a few microseconds per call), since it runs inside the decode loop. Numbers are kept in buckets
of a few seconds for the last few minutes; :meth:`SLOStats.state` gives them as JSON values that
:mod:`adaserve.slo.snapshot` merges over data-parallel ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from adaserve.slo.classes import SLOConfig, to_ms
from adaserve.slo.events import READING, STAGES, DraftLearning, FinishedRequest, IterationSample
from adaserve.slo.forecast_types import Forecast
from adaserve.slo.prometheus import ServerMetrics

PUBLISHED_AT_ONCE = 8
"""Iterations. One by one each would cost 0.1 ms; those of a second, all at once, what an iteration takes."""

BUCKET_S = 2.0
HISTORY_S = 300.0
SLOW_KEPT = 12
BINS_PER_OCTAVE = 24
_LOWEST = 0.05
_EPOCH_S = time.time() - time.perf_counter()


def epoch_s() -> float:
    """Epoch seconds by a clock that cannot be set: the time at startup plus what has passed since."""
    return _EPOCH_S + time.perf_counter()


class ClassCounts(msgspec.Struct):
    """Outcomes of one class over some time."""

    requests: int = 0
    met: int = 0
    # Of each objective only those that have it: others would count as met.
    asked_tpot: int = 0
    asked_ttft: int = 0
    met_tpot: int = 0
    met_ttft: int = 0
    failed: int = 0
    tokens: int = 0
    good_tokens: int = 0
    tpot_sum_s: float = 0.0
    tpot_count: int = 0
    # Log-scaled histograms (``log_bin``): TPOT / SLO, and milliseconds.
    ratio: dict[int, int] = {}
    tpot_ms: dict[int, int] = {}
    ttft_ms: dict[int, int] = {}

    def count(self, request: FinishedRequest) -> None:
        self.requests += 1
        self.met += request.met
        if math.isfinite(request.slo.tpot_s):
            self.asked_tpot += 1
            self.met_tpot += request.met_tpot
        if math.isfinite(request.slo.ttft_s):
            self.asked_ttft += 1
            self.met_ttft += request.met_ttft
        self.failed += request.failed
        self.tokens += request.output_tokens
        self.good_tokens += request.output_tokens if request.met else 0
        if request.tpot_s is not None:
            self.tpot_sum_s += request.tpot_s
            self.tpot_count += 1
        for into, value in (
            (self.ratio, request.tpot_ratio),
            (self.tpot_ms, to_ms(request.tpot_s)),
            (self.ttft_ms, to_ms(request.ttft_s)),
        ):
            if value is not None:
                add_numbers(into, {log_bin(value): 1})

    def add(self, other: ClassCounts) -> None:
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, dict):
                add_numbers(mine, theirs)
            else:
                setattr(self, name, mine + theirs)


_NOT_SUMMED = ("queue", "kv_use", "sources", "windows", "gated")
_SUMMED = tuple(name for name in IterationSample.__struct_fields__ if name not in _NOT_SUMMED)


class Bucket(msgspec.Struct):
    """Everything that happened during ``BUCKET_S`` seconds."""

    key: int  # epoch time // BUCKET_S: the same on every rank
    classes: dict[str, ClassCounts] = {}
    iterations: int = 0
    sums: dict[str, float] = {}
    queue_max: int = 0

    def add(self, other: Bucket) -> None:
        """Adds what another rank did in the same time."""
        self.iterations += other.iterations
        self.queue_max += other.queue_max
        add_numbers(self.sums, other.sums)
        for name, counts in other.classes.items():
            self.classes.setdefault(name, ClassCounts()).add(counts)


class SlowRequest(msgspec.Struct):
    """A request that missed its SLO, for the page."""

    at: float  # epoch seconds
    slo_class: str
    tpot_ms: float | None
    slo_tpot_ms: float | None
    ttft_ms: float | None
    slo_ttft_ms: float | None
    output_tokens: int
    reason: str


class RankState(msgspec.Struct):
    """What one scheduler process has counted, and reports to the page."""

    now: float  # epoch seconds, like ``started`` and ``last_at``
    started: float
    targets: dict[str, float]  # of all labels
    older: Bucket  # all before ``buckets``, together
    buckets: list[Bucket] = []  # the last HISTORY_S in which something happened
    slos: dict[str, tuple[float | None, float | None]] = {}  # class -> TPOT and TTFT of its last request, ms
    totals: dict[str, tuple[int, int]] = {}  # class -> requests and how many met, since the start
    last: IterationSample | None = None
    last_at: float = 0.0
    slow: list[SlowRequest] = []  # the last SLOW_KEPT
    learning: DraftLearning | None = None  # if a draft learns
    stated: int = 0  # requests with an SLO of their own, since the start
    routed_without: int = 0  # requests through a router without one
    forecast: Forecast | None = None


def add_numbers(into: dict[Any, Any], values: Mapping[Any, Any]) -> None:
    """``into[key] += value`` for each."""
    for key, value in values.items():
        into[key] = into.get(key, 0) + value


def log_bin(value: float) -> int:
    """Logarithmic bin, 3% wide."""
    return round(math.log2(max(value, _LOWEST)) * BINS_PER_OCTAVE)


def bin_center(key: int) -> float:
    """The inverse of ``log_bin``."""
    return float(2.0 ** (key / BINS_PER_OCTAVE))


class SLOStats:
    """Accumulates. One per scheduler process; not thread-safe."""

    def __init__(
        self,
        config: SLOConfig,
        metrics: ServerMetrics | None = None,
        clock: Callable[[], float] = epoch_s,
    ) -> None:
        self._metrics, self._clock = metrics, clock
        now, targets = clock(), {name: config.get(name).target for name in config.labels}
        self._state = RankState(now, now, targets, older=Bucket(0))
        self._unpublished: list[IterationSample] = []
        if metrics is not None:
            metrics.start(targets)

    def finish(self, request: FinishedRequest) -> None:
        """Counts a request that ended. Do not call it for warm-up or client-aborted requests."""
        state, slo, name = self._state, request.slo, request.slo.slo_class
        state.slos[name] = (to_ms(slo.tpot_s), to_ms(slo.ttft_s))
        requests, attained = state.totals.get(name, (0, 0))
        state.totals[name] = (requests + 1, attained + request.met)
        self._bucket().classes.setdefault(name, ClassCounts()).count(request)
        if not request.met:
            times = (to_ms(request.tpot_s), to_ms(slo.tpot_s), to_ms(request.ttft_s), to_ms(slo.ttft_s))
            slow = SlowRequest(self._clock(), name, *times, request.output_tokens, slow_reason(request))
            state.slow = [*state.slow[1 - SLOW_KEPT :], slow]
        if self._metrics is not None:
            self._metrics.finish(request)
            self._publish(self._metrics)

    def iteration(self, sample: IterationSample) -> None:
        """Counts a decode iteration."""
        bucket = self._bucket()
        bucket.iterations += 1
        sums = bucket.sums
        for key in _SUMMED:
            sums[key] = sums.get(key, 0.0) + getattr(sample, key)
        for source, counts in sample.sources.items():
            add_numbers(sums, {f"{stage} by {source}": c for stage, c in zip(STAGES, counts, strict=True)})
        add_numbers(sums, {READING + window: rows for window, rows in sample.windows.items()})
        held = sum(count for count, _ in sample.gated.values())
        sums["gated"] = sums.get("gated", 0.0) + held
        bucket.queue_max = max(bucket.queue_max, sample.queue)
        self._state.last, self._state.last_at = sample, self._clock()
        if self._metrics is not None:
            self._unpublished.append(sample)
            if len(self._unpublished) == PUBLISHED_AT_ONCE:
                self._publish(self._metrics)

    def load(self, running: int, queue: int, kv_use: float) -> None:
        """What runs and waits now, as far as anything does. Iterations say it too, but none ends while long
        prompts are read."""
        if running or queue:
            last = self._state.last or IterationSample(0, *(0,) * 11)
            self._state.last = msgspec.structs.replace(last, running=running, queue=queue, kv_use=kv_use)
            self._state.last_at = self._clock()

    def _publish(self, metrics: ServerMetrics) -> None:
        """Tells Prometheus of the iterations since the last time."""
        samples, self._unpublished = self._unpublished, []
        for sample in samples:
            metrics.iteration(sample)

    def came(self, routed: bool, stated: bool) -> None:
        """Counts how a request came: through a router or not, with an SLO of its own or not."""
        self._state.stated += stated
        self._state.routed_without += routed and not stated
        if self._metrics is not None:
            self._metrics.came(routed, stated)

    def forecast(self, forecast: Forecast) -> None:
        """Publishes what one more request would get, and what iterations did: once a second at least."""
        self._state.forecast = forecast
        if self._metrics is not None:
            self._metrics.forecast(forecast)
            self._publish(self._metrics)

    def nothing_held(self) -> None:
        """Nothing runs or waits, so until the next iteration no prompt is held back."""
        if self._metrics is not None:
            self._metrics.held({})

    def shed(self, slo_class: str, reason: str) -> None:
        """Counts a request that got 429."""
        if self._metrics is not None:
            self._metrics.shed(slo_class, reason)

    def learned(self, learning: DraftLearning) -> None:
        """How a draft that learns is doing now."""
        self._state.learning = learning
        if self._metrics is not None:
            self._metrics.learned(learning)

    def state(self) -> dict[str, Any]:
        """A RankState as JSON values; see :func:`adaserve.slo.snapshot.build_snapshot`."""
        self._state.now = self._clock()
        built: dict[str, Any] = msgspec.to_builtins(self._state, str_keys=True)
        return built

    def _bucket(self) -> Bucket:
        key, buckets = int(self._clock() // BUCKET_S), self._state.buckets
        if not buckets or buckets[-1].key != key:
            buckets.append(Bucket(key))
            if len(buckets) > HISTORY_S / BUCKET_S:
                self._state.older.add(buckets.pop(0))
        return buckets[-1]


def slow_reason(request: FinishedRequest) -> str:
    """One short sentence: why the request missed its SLO."""
    if request.failed:
        return "it failed"
    if request.met_tpot:
        return "the first token came late: it waited in the queue or for its prefill"
    if request.retractions:
        times = "once" if request.retractions == 1 else f"{request.retractions} times"
        return f"it was retracted {times}: the KV cache was full"
    assert request.tpot_s is not None
    slo_s, later = request.slo.tpot_s, max(1, request.output_tokens - 1)
    decode_s = request.tpot_s * later
    if request.stall_s >= 0.5 * (decode_s - slo_s * later):
        return f"prefills of other requests took {request.stall_s * 1e3:.0f} ms of {decode_s * 1e3:.0f} ms"
    if request.iterations == 0:
        return "it was slower than its SLO"
    iteration_s = (decode_s - request.stall_s) / request.iterations
    need, got = iteration_s / slo_s, (request.output_tokens - 1) / request.iterations
    beside = f" ({request.mean_running:.0f} running)" if request.mean_running else ""
    return (
        f"{iteration_s * 1e3:.0f} ms per iteration: each needed {need:.1f} tokens but gave {got:.1f}{beside}"
    )
