"""The cost of one kind of forward by size, learned from served forwards.

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

from adaserve.scheduler.costs.latency import KVReadCost, TabulatedCost
from adaserve.scheduler.interface import FloatArray, IntArray

Seconds = Callable[[FloatArray], FloatArray]
"""Tokens [k] of forwards -> the seconds [k] that they take."""

SIZES: IntArray = np.unique(
    np.concatenate([np.arange(1, 33), np.round(32 * 2 ** (np.arange(1, 57) / 8))]).astype(np.int64)
)
"""Sizes that are learned: each one up to 32 tokens, then eight per doubling, to 4096."""

_SIZE_OF: IntArray = np.abs(np.log(np.arange(1, 4097))[:, None] - np.log(SIZES)).argmin(axis=1)

LATEST = 24
"""How many times are remembered per size."""

QUANTILE = 0.2
"""Quantile of the latest times of a size that counts as its quiet cost."""

KNOWN = 6.0
"""From this trust on (roughly: times seen) a size says how busy the host is."""

MUCH = math.log(1.3)
"""Beyond this ratio a time is much longer or shorter than expected."""

RECENT = 9
"""The present slowdown is the median over this many times of known sizes."""

PATIENCE_S = 600.0
"""When all forwards have been slow for this many seconds, the host is not busy: it has become slower."""

LEARN_EVERY = 8
"""What was learned is computed again after this many times."""


class LowQuantiles:
    """A low quantile of the latest values in each of several buckets, and how far it can be trusted.

    Buckets with few values are estimated with the help of their neighbors.
    """

    NEIGHBORS = 3.0  # trust that a bucket's neighbors have together
    RISE = 0.3  # that a bucket may lie above its neighbors, per trust
    DOUBT = 3.0  # a value lower by x leaves exp(-3 x) of the trust in all
    FORGET = 0.999  # of the trust, per value taken in anywhere: old values count less

    def __init__(self, place: FloatArray, reach: float, zero: float) -> None:
        """``place`` [k] of the buckets; ``reach``: distance at which a neighbor counts half; ``zero``: trust
        in a value of 0 among the neighbors."""
        self._zero = zero
        distance = (place[:, None] - place) / reach
        self._near: FloatArray = 1.0 / (1.0 + distance**2)
        np.fill_diagonal(self._near, 0.0)
        k = len(place)
        self._latest: FloatArray = np.full((k, LATEST), np.inf)
        self._count: IntArray = np.zeros(k, np.int64)  # values since the bucket's beginning
        self._new: list[int] = []  # buckets of the values since ``work_out``
        self._own: FloatArray = np.zeros(k)
        self.trust: FloatArray = np.zeros(k)
        self.values: FloatArray = np.zeros(k)

    def believe(self, buckets: Sequence[int]) -> None:
        """Takes 0 for the known value of these buckets."""
        times = math.ceil(KNOWN)
        self._latest[buckets, :times] = 0.0
        self._count[buckets] = self.trust[buckets] = times

    def add(self, bucket: int, value: float) -> None:
        """Adds ``value``."""
        self._latest[bucket, self._count[bucket] % LATEST] = value
        self._count[bucket] += 1
        self._new.append(bucket)

    def outdo(self, bucket: int, value: float) -> None:
        """``value`` is far below what is believed, so earlier, slower values were disturbed, and not only in
        this bucket. The further below it is, the less the values of other buckets count: these sizes may not
        be served again for long."""
        self.work_out()
        if self.trust[bucket] >= KNOWN:
            self.trust *= math.exp(self.DOUBT * (value - self.values[bucket]))
        kept = self._latest[bucket] < value + MUCH
        count = np.count_nonzero(kept)
        order = np.argsort(~kept, kind="stable")
        self._latest[bucket] = self._latest[bucket, order]
        self._latest[bucket, count:] = np.inf
        self._count[bucket] = self.trust[bucket] = count

    def forget(self) -> None:
        """Starts over; the values stay until there are better ones."""
        self._latest[:] = np.inf
        self._count[:] = 0
        self._new.clear()
        np.minimum(self.trust, 1.0, out=self.trust)

    def work_out(self) -> None:
        """Brings ``values`` up to date."""
        self.trust *= self.FORGET ** len(self._new)
        np.add.at(self.trust, self._new, 1.0)
        np.minimum(self.trust, LATEST, out=self.trust)
        new = list(set(self._new))
        latest = np.sort(self._latest[new], axis=1)
        low = (QUANTILE * np.minimum(self._count[new], LATEST)).astype(np.int64)
        self._own[new] = latest[np.arange(len(new)), low]
        self._new.clear()
        weight = self._near * self.trust
        around = (weight @ self._own) / (weight.sum(axis=1) + self._zero)
        # What was seen once or twice and took far longer than its neighbors say may have been disturbed.
        own = np.minimum(self._own, around + self.RISE * self.trust)
        self.values = (self.trust * own + self.NEIGHBORS * around) / (self.trust + self.NEIGHBORS)


class LearnedCostTable:
    """Learned seconds of one kind of forward by size, with nothing in the KV cache, kept as the logarithm of
    the ratio to a first guess.
    """

    def __init__(self, guess: Seconds, known: Sequence[float] = ()) -> None:
        """``guess``: as ``StepCost.alone``; ``known``: sizes of which it was learned on this host."""
        self._guess = guess
        self._sizes = LowQuantiles(np.log2(SIZES), reach=0.25, zero=0.05)
        self._sizes.believe([size_bucket(t) for t in known])
        self.slowdown = 1.0  # what known sizes take at present, relative to their quiet cost
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._slow_s = 0.0
        self._unjudged = 0  # forwards of unknown sizes in a row, while the host is busy
        self._unused = 0  # times since the values were worked out
        self._curve: FloatArray = np.zeros(0)  # quiet, by size
        self._plain: list[float] = []  # the same: single values are faster from a list

    # -- learning -----------------------------------------------------------------------------

    def knows(self, size: int) -> bool:
        """Whether forwards of that size were seen often enough to judge the host by them."""
        return bool(self._sizes.trust[size_bucket(size)] >= KNOWN)

    def judge(self, size: int, seconds: float, kv_read_s: float) -> None:
        """Notes how busy the host is by a forward of a known size, of which reading the KV cache should have
        taken ``kv_read_s``."""
        if not self.knows(size):
            self._not_judged()
            return
        self._unjudged = 0
        off = math.log(seconds / (self.quiet_s(size) + kv_read_s))
        self._recent.append(off)
        self._slow_s = self._slow_s + seconds if off > MUCH else 0.0
        if self._slow_s > PATIENCE_S:
            self._sizes.forget()
            self._recent.clear()
            self._slow_s = 0.0
        recent = sorted(self._recent)
        self.slowdown = math.exp(recent[len(recent) // 2]) if len(recent) > RECENT // 2 else 1.0

    def learn(self, size: int, seconds: float) -> None:
        """A forward that took ``seconds`` without what it read of the KV cache."""
        bucket = size_bucket(size)
        off = math.log(seconds / self.quiet_s(size))
        if off > MUCH and math.log(self.slowdown) > MUCH:
            return
        sizes = self._sizes
        ratio = float(off + sizes.values[bucket])
        if off < -MUCH:
            sizes.outdo(bucket, ratio)
        sizes.add(bucket, ratio)
        self._unused += 1
        if self._unused >= LEARN_EVERY or off < -MUCH:
            self._unused = 0
            sizes.work_out()
            self._plain = []
            self.quiet_curve()  # now, not where somebody waits for a prediction

    def _not_judged(self) -> None:
        """If known sizes are no longer served, nothing says how busy the host is. Then it counts as not busy,
        because the cost of what is served now has to be learned."""
        if math.log(self.slowdown) <= MUCH:
            return
        self._unjudged += 1
        if self._unjudged > LATEST:
            self._unjudged = 0
            self._recent.clear()
            self.slowdown = 1.0

    # -- predicting ---------------------------------------------------------------------------

    def quiet_curve(self, size: int = 0) -> FloatArray:
        """Quiet seconds of forwards of 0, 1, 2, ... tokens, up to ``size`` at least."""
        if len(self._plain) <= size:
            sizes = np.arange(max(256, len(self._curve), 1 << size.bit_length()))
            ratio = np.interp(sizes, SIZES, self._sizes.values)
            self._curve = self._guess(sizes.astype(np.float64)) * np.exp(ratio)
            self._plain = self._curve.tolist()
        return self._curve

    def quiet_s(self, size: int) -> float:
        """Quiet seconds of one forward."""
        if len(self._plain) <= size:
            self.quiet_curve(size)
        return self._plain[size]

    def learned(self, further: Sequence[float], kv_read: KVReadCost) -> TabulatedCost | None:
        """The quiet costs of known sizes, of ``further`` ones, which a server that meets only other sizes
        would miss, and those of reading the KV cache; None while no size is known."""
        at = np.flatnonzero(self._sizes.trust >= KNOWN)
        if not at.size:
            return None
        known = tuple(map(float, SIZES[at]))
        sizes = sorted({*known, *map(float, map(int, further))})
        curve = self.quiet_curve(int(sizes[-1]))
        seconds = tuple(float(curve[int(t)]) for t in sizes)
        return TabulatedCost(tuple(sizes), seconds, *kv_read, known=known)


def size_bucket(size: float) -> int:
    """Bucket in which a forward of ``size`` tokens is learned."""
    return int(_SIZE_OF[min(max(int(size), 1), len(_SIZE_OF)) - 1])
