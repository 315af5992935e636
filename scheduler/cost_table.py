"""What one kind of forward costs by size, learned from those that were served.

Times are learned per size, whatever their shape: 16 tokens may well cost less than 12.

A forward can take longer than it has to but never less: other processes, page faults and garbage collection
only ever add time. So the quiet cost of a size is a low quantile of its latest times; and while sizes that
are known well take much longer than that, the host is busy and slow times teach nothing. Predictions are
quiet costs times the present slowdown.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from adaserve.scheduler.interface import FloatArray, IntArray
from adaserve.scheduler.latency import TableCost

Seconds = Callable[[FloatArray, float], FloatArray]
"""Seconds [k] of forwards of so many tokens [k] with so many cached tokens."""

SIZES: IntArray = np.unique(
    np.concatenate([np.arange(1, 33), np.round(32 * 2 ** (np.arange(1, 57) / 8))]).astype(np.int64)
)
"""Sizes that are learned: each one up to 32 tokens, then eight per doubling, to 4096."""

_SIZE_OF: IntArray = np.abs(np.log(np.arange(1, 4097))[:, None] - np.log(SIZES)).argmin(axis=1)

CONTEXTS = 16
"""Doublings of the cached tokens that are kept apart; the first is 0 to 64."""

LATEST = 24
"""Times per size that are remembered."""

QUANTILE = 0.2
"""Quantile of the latest times of a size that counts as its quiet cost."""

KNOWN = 6.0
"""Trust (roughly: times seen) from which a size says how busy the host is."""

MUCH = math.log(1.3)
"""A time is much longer or shorter than expected beyond this ratio."""

RECENT = 9
"""Times of known sizes whose median is the present slowdown."""

PATIENCE_S = 600.0
"""When all forwards have been slow for this many seconds, the host is not busy: it has become slower."""

LEARN_EVERY = 8
"""The table is worked out again after this many times."""


class LowQuantiles:
    """A low quantile of the latest values in each of several buckets, and how far it can be trusted.

    A value is the sum of two parts; the other one is learned elsewhere. Buckets that have seen little lean on
    their neighbours.
    """

    NEIGHBOURS = 3.0  # trust that a bucket's neighbours have together
    RISE = 0.3  # that a bucket may lie above its neighbours, per trust
    FORGET = 0.999  # of the trust, per value taken in anywhere: old values count less

    def __init__(self, place: FloatArray, reach: float, zero: float) -> None:
        """``place`` [k] of the buckets; ``reach``: distance at which a neighbour counts half; ``zero``: trust
        in a value of 0 among the neighbours."""
        self._zero = zero
        distance = (place[:, None] - place) / reach
        self._near: FloatArray = 1.0 / (1.0 + distance**2)
        np.fill_diagonal(self._near, 0.0)
        k = len(place)
        self._latest: FloatArray = np.full((k, LATEST), np.inf)
        self._parts: IntArray = np.zeros((k, LATEST), np.int64)
        self._count: IntArray = np.zeros(k, np.int64)  # values since the bucket's beginning
        self._new: list[int] = []  # buckets of the values since ``work_out``
        self._own: FloatArray = np.zeros(k)
        self.trust: FloatArray = np.zeros(k)
        self.values: FloatArray = np.zeros(k)

    def believe(self, buckets: Sequence[int]) -> None:
        """Of these a value of 0 is known."""
        times = math.ceil(KNOWN)
        self._latest[buckets, :times] = 0.0
        self._count[buckets] = self.trust[buckets] = times

    def add(self, bucket: int, value: float, part: int) -> None:
        """Takes in ``value``, of which the other's ``values[part]`` is a part."""
        at = bucket, self._count[bucket] % LATEST
        self._latest[at], self._parts[at] = value, part
        self._count[bucket] += 1
        self._new.append(bucket)

    def outdo(self, bucket: int, value: float) -> None:
        """``value`` is far below what is believed, so slower ones before it were disturbed, not only here."""
        if self.trust[bucket] >= KNOWN:
            self.trust *= 0.5
        kept = self._latest[bucket] < value + MUCH
        count = np.count_nonzero(kept)
        order = np.argsort(~kept, kind="stable")
        self._latest[bucket], self._parts[bucket] = self._latest[bucket, order], self._parts[bucket, order]
        self._latest[bucket, count:] = np.inf
        self._count[bucket] = self.trust[bucket] = count

    def forget(self) -> None:
        """Starts over; the values stay until there are better ones."""
        self._latest[:] = np.inf
        self._count[:] = 0
        self._new.clear()
        np.minimum(self.trust, 1.0, out=self.trust)

    def work_out(self, others: FloatArray) -> None:
        """Brings ``values`` up to date; ``others``: the values of which a part was in those taken in."""
        self.trust *= self.FORGET ** len(self._new)
        np.add.at(self.trust, self._new, 1.0)
        np.minimum(self.trust, LATEST, out=self.trust)
        new = list(set(self._new))
        latest = np.sort(self._latest[new] - others[self._parts[new]], axis=1)
        low = (QUANTILE * np.minimum(self._count[new], LATEST)).astype(np.int64)
        self._own[new] = latest[np.arange(len(new)), low]
        self._new.clear()
        weight = self._near * self.trust
        around = (weight @ self._own) / (weight.sum(axis=1) + self._zero)
        # What was seen once or twice and took far longer than its neighbours say may have been disturbed.
        own = np.minimum(self._own, around + self.RISE * self.trust)
        self.values = (self.trust * own + self.NEIGHBOURS * around) / (self.trust + self.NEIGHBOURS)


class CostTable:
    """Seconds of one kind of forward by size and cached tokens, learned.

    Kept as the logarithm of the ratio to a first guess: a part per size plus one per doubling of the
    context.
    """

    def __init__(self, guess: Seconds, known: Sequence[float] = ()) -> None:
        """``guess``: as ``StepCost.seconds``; ``known``: sizes of which it was learned on this host."""
        self._guess = guess
        self._sizes = LowQuantiles(np.log2(SIZES), reach=0.25, zero=0.05)
        self._contexts = LowQuantiles(np.arange(CONTEXTS, dtype=np.float64), reach=1.0, zero=4.0)
        self._sizes.believe([size_bucket(t) for t in known])
        self.slowdown = 1.0  # what known sizes take at present, relative to their quiet cost
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._slow_s = 0.0
        self._unused = 0  # times since the values were worked out
        self._curves: dict[int, tuple[FloatArray, list[float]]] = {}  # quiet, by step of the context

    # -- learning -----------------------------------------------------------------------------

    def knows(self, size: int) -> bool:
        """Whether forwards of that size were seen often enough to judge others by them."""
        return bool(self._sizes.trust[size_bucket(size)] >= KNOWN)

    def observe(self, size: int, context: float, seconds: float, slowdown: float | None = None) -> None:
        """A forward that was served; nonsense (not finite, not positive) is ignored.

        ``slowdown`` of the host at that time, where another table knows it; None = this one's own.
        """
        if not (math.isfinite(seconds) and seconds > 0):
            return
        bucket, doubling = size_bucket(size), _doubling(context_step(context))
        off = math.log(seconds / self.quiet_s(size, context))
        if self._sizes.trust[bucket] >= KNOWN:
            self._notice(off, seconds)
        slowdown = self.slowdown if slowdown is None else slowdown
        if off > MUCH and math.log(slowdown) > MUCH:
            return
        sizes, contexts = self._sizes, self._contexts
        ratio = float(off + sizes.values[bucket] + contexts.values[doubling])
        if off < -MUCH:
            sizes.outdo(bucket, ratio)
        sizes.add(bucket, ratio, doubling)
        contexts.add(doubling, ratio, bucket)
        self._unused += 1
        if self._unused >= LEARN_EVERY or off < -MUCH:
            self._unused = 0
            sizes.work_out(contexts.values)
            contexts.work_out(sizes.values)
            contexts.values -= contexts.trust @ contexts.values / contexts.trust.sum()  # sizes say the level
            self._curves.clear()

    def _notice(self, off: float, seconds: float) -> None:
        """A known size took exp(``off``) times its quiet cost."""
        self._recent.append(off)
        self._slow_s = self._slow_s + seconds if off > MUCH else 0.0
        if self._slow_s > PATIENCE_S:
            self._sizes.forget()
            self._recent.clear()
            self._slow_s = 0.0
        recent = sorted(self._recent)
        self.slowdown = math.exp(recent[len(recent) // 2]) if len(recent) > RECENT // 2 else 1.0

    # -- predicting ---------------------------------------------------------------------------

    def quiet_curve(self, context: float, size: int = 0) -> FloatArray:
        """Quiet seconds of forwards of 0, 1, 2, ... tokens, up to ``size`` at least."""
        return self._curve(context, size)[0]

    def quiet_s(self, size: int, context: float) -> float:
        """Quiet seconds of one forward."""
        return self._curve(context, size)[1][size]

    def _curve(self, context: float, size: int) -> tuple[FloatArray, list[float]]:
        step = context_step(context)
        known = self._curves.get(step)
        if known is None or len(known[1]) <= size:
            if len(self._curves) >= 64:
                self._curves.clear()
            sizes = np.arange(max(256, 1 << size.bit_length()))
            ratio = np.interp(sizes, SIZES, self._sizes.values) + self._contexts.values[_doubling(step)]
            curve = self._guess(sizes.astype(np.float64), context_at(step)) * np.exp(ratio)
            known = self._curves[step] = (curve, curve.tolist())
        return known

    def learned(self, further: Sequence[float]) -> TableCost | None:
        """The quiet costs of known sizes and of larger ones among ``further``; None while none is known."""
        at = np.flatnonzero(self._sizes.trust >= KNOWN)
        if not at.size:
            return None
        sizes = SIZES[at].tolist()
        sizes += [int(t) for t in further if t > sizes[-1]]
        short, long = 256.0, 4096.0
        curve = self.quiet_curve(short, sizes[-1])
        rise = float(self.quiet_curve(long)[1] - curve[1]) / (long - short)
        seconds = tuple(float(curve[t]) for t in sizes)
        return TableCost(tuple(map(float, sizes)), seconds, max(0.0, rise), short)


def size_bucket(size: float) -> int:
    """Where a forward of ``size`` tokens is learned."""
    return int(_SIZE_OF[min(max(int(size), 1), len(_SIZE_OF)) - 1])


def _doubling(step: int) -> int:
    return min(step // 8, CONTEXTS - 1)


def context_step(context: float) -> int:
    """``context`` cached tokens to the nearest of eight steps per doubling, beginning with 64 tokens.

    What was worked out for one iteration holds for the next ones."""
    return round(8.0 * math.log2(1.0 + context / 64.0))


def context_at(step: int) -> float:
    """Cached tokens of a step."""
    return 64.0 * (2.0 ** (step / 8.0) - 1.0)
