"""Figures with 90% intervals: shares of requests that come in blocks, their differences and ratios."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.stats import t

from adaserve.scheduler.interface import FloatArray

DRAWS = 2000
MAX_SHOWN = 1000.0
_HIGH = 0.95


@dataclass(frozen=True)
class Interval:
    """A figure and its 90% interval; the ends are nan if one block is all there is."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def to_json(self) -> list[float | None]:
        return [round(v, 5) if math.isfinite(v) else None for v in (self.value, self.low, self.high)]

    def scaled(self, value: float) -> Interval:
        """That of a figure which is ``value`` and proportional to this one."""
        factor = value / self.value if self.value else math.nan
        return Interval(value, factor * self.low, factor * self.high)

    def brackets(self, digits: str, scale: float = 1.0) -> str:
        """The ends as they stand after the value; nothing if there are none."""
        if not math.isfinite(self.low):
            return ""
        # Few violations leave their ratio open; how many digits its end has says nothing.
        high = scale * self.high
        end = f"{high:{digits}}" if high < MAX_SHOWN else f"over {MAX_SHOWN:g}"
        return f" [{scale * self.low:{digits}}, {end}]"


@dataclass(frozen=True)
class Spread:
    """How many times the variance of independent requests a share has, going by blocks (the design effect),
    and on how many degrees of freedom that is known: 0 with one block."""

    factor: float = 1.0
    freedom: int = 0

    def share(self, met: float, requests: float) -> Interval:
        """Wilson's interval of ``met / requests``, of ``requests / factor`` independent ones; with Student's
        t in place of the normal quantile, since blocks are few."""
        p, n = met / requests, requests / self.factor
        if self.freedom < 1:
            return Interval(p)
        z = float(t.ppf(_HIGH, self.freedom))
        middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        low, high = (min(max(end / (1 + z * z / n), 0.0), 1.0) for end in (middle - half, middle + half))
        return Interval(p, low, high)


def spread_of(off: FloatArray, independent: FloatArray, freedom: int) -> Spread:
    """Never below that of independent requests: that blocks are alike may be chance."""
    expected = float(np.nansum(independent))
    return Spread(max(1.0, float(np.nansum(off * off)) / expected) if expected else 1.0, freedom)


def difference(a: Interval, b: Interval) -> Interval:
    """a - b, by the ends of both (Newcombe 1998)."""
    value = a.value - b.value
    down, up = math.hypot(a.value - a.low, b.high - b.value), math.hypot(a.high - a.value, b.value - b.low)
    return Interval(value, value - down, value + up)


def ratio(a: Interval, b: Interval, off: FloatArray) -> Interval:
    """a / b, by logarithms; nan over nothing.

    ``off`` [blocks]: the part that each block has of all that makes up a, minus its part of b. What a block
    does to both cancels in a difference, but not in a ratio, unless it does so in proportion. So the interval
    is no narrower than blocks say by themselves (the ratio estimator of Cochran 1977, section 6.4)."""
    if not a.value or not b.value:
        return Interval(0.0 if b.value else math.nan)
    logs = (Interval(*(math.log(v) for v in (x.value, x.low, x.high))) for x in (a, b))
    d, k = difference(*logs), len(off)
    half = float(t.ppf(_HIGH, k - 1)) * math.sqrt(k / (k - 1) * float(off @ off)) if k > 1 else 0.0
    low, high = np.minimum(d.low, d.value - half), np.maximum(d.high, d.value + half)  # nan stays nan
    return Interval(math.exp(d.value), math.exp(low), math.exp(high))


def median_interval(ratios: FloatArray) -> Interval:
    """The median of paired rounds, and 90% of its bootstrap: one round of six may be far off."""
    draws = np.median(np.random.default_rng(0).choice(ratios, (DRAWS, len(ratios))), axis=1)
    low, high = np.percentile(draws, (5.0, 95.0), method="lower")
    return Interval(float(np.median(ratios)), float(low), float(high))
