"""Online correction of a latency model: slope and offset of measured against predicted seconds."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from adaserve.scheduler.interface import FloatArray
from adaserve.scheduler.latency import LatencyModel


class LineTracker:
    """Exponentially weighted fit ``measured = slope * predicted + offset``.

    While the predictions hardly vary the slope can't be told from the offset. A ridge decides then: it pulls
    the offset to zero, so that the plain ratio remains, which is what a model that is k times wrong needs; or
    the slope to that of another line, ``like``, where what is missing is rather a fixed cost.
    """

    RIDGE = 0.02  # relative to the second moment of the predictions
    LIMITS = (0.1, 10.0)

    def __init__(self, memory: float = 24.0, like: LineTracker | None = None) -> None:
        """``memory``: effective number of observations, after which old ones have faded."""
        self._like = like
        self._decay = 1.0 - 1.0 / memory
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self.slope, self.offset = 1.0, 0.0
        self.floor = self.LIMITS[0]  # least share of a prediction that the corrected one can be

    def observe(self, predicted: float, measured: float) -> None:
        """One pair of seconds; nonsense (not finite, not positive) is ignored, outliers are clipped."""
        if not (math.isfinite(measured) and measured > 0 and predicted > 0):
            return
        if self._n > 4:  # a stall (GC, swap) says nothing about the model
            measured = min(measured, 4.0 * max(self.predict(predicted), predicted * self.LIMITS[0]))
        d = self._decay
        self._n, self._x, self._y = d * self._n + 1, d * self._x + predicted, d * self._y + measured
        self._xx, self._xy = d * self._xx + predicted**2, d * self._xy + predicted * measured
        self._solve()

    def _solve(self) -> None:
        ratio = self._y / self._x
        mean = self._x / self._n
        ridge = self.RIDGE * self._xx
        variance = max(0.0, self._xx - self._x * mean)
        usual = ratio if self._like is None else min(ratio, max(1.0, self._like.slope))
        slope = (self._xy - self._y * mean + ridge * usual) / (variance + ridge)
        self.slope = min(max(slope, self.LIMITS[0] * ratio), 2.0 * ratio)
        self.offset = (self._y - self.slope * self._x) / self._n
        self.floor = self.LIMITS[0] * ratio

    def predict(self, seconds: float) -> float:
        """Corrected seconds."""
        return max(self.floor * seconds, self.slope * seconds + self.offset)


def rounded_context(context: float) -> float:
    """Cached tokens rounded to 3%: what was worked out for one iteration holds for the next ones."""
    step = max(64.0, 2.0 ** (math.frexp(context)[1] - 6))
    return step * round(context / step)


class LatencyTracker:
    """A latency model with its corrections; the policies ask this, never the raw model."""

    def __init__(self, model: LatencyModel, enabled: bool = True) -> None:
        self.model = model
        self.enabled = enabled
        self.verify = LineTracker()
        # Around the steps stands the host's work for a draft as a whole; a slow host is slow in both models.
        self.draft = LineTracker(like=self.verify)
        self._curves: dict[float, FloatArray] = {}

        def target_s(tokens: float, context: float) -> float:
            return model.verify_s(tokens, context)

        # The same few forwards are asked for several times per iteration and in most iterations.
        self._target_s = lru_cache(maxsize=4096)(target_s)
        self._draft_step_s = lru_cache(maxsize=4096)(model.draft_step_s)
        self._draft_s = lru_cache(maxsize=4096)(model.draft_s)

    def verify_curve(self, first: int, count: int, context: float = 0.0) -> FloatArray:
        """Corrected seconds of target forwards of first, first + 1, ... tokens, [count].

        The uncorrected curve is kept per context, rounded to 3%: it is asked for in every iteration.
        """
        bucket = rounded_context(context)
        curve = self._curves.get(bucket)
        if curve is None or len(curve) < first + count:
            if len(self._curves) >= 64:
                self._curves.clear()
            size = max(256, 1 << (first + count - 1).bit_length())
            curve = self.model.verify_s(np.arange(size, dtype=np.float64), bucket)
            self._curves[bucket] = curve
        raw = curve[first : first + count]
        out = raw * self.verify.slope
        out += self.verify.offset
        if out[0] < self.verify.floor * raw[0]:  # a negative offset weighs most where the forward is short
            np.maximum(out, self.verify.floor * raw, out=out)
        return out

    def verify_s(self, tokens: float, context: float = 0.0) -> float:
        """Corrected seconds of one target forward."""
        return self.verify.predict(self._target_s(tokens, context))

    def verify_many(self, tokens: FloatArray, context: float = 0.0) -> FloatArray:
        """Corrected seconds of alternative target forwards, [k]."""
        raw = self.model.verify_s(tokens, context)
        return np.maximum(self.verify.slope * raw + self.verify.offset, self.verify.floor * raw)

    def draft_s(self, n: int, depth: int, width: int, context: float = 0.0) -> float:
        """Corrected seconds of ``depth`` draft forwards and what is around them."""
        if depth <= 0:
            return 0.0
        return self.draft.predict(self._draft_s(n, depth, width, context))

    @property
    def draft_start_s(self) -> float:
        """What drafting costs beyond its steps."""
        return max(0.0, self.draft.offset)

    def draft_step_s(self, rows: float, context: float = 0.0) -> float:
        """Corrected seconds that one more draft forward takes."""
        return self.draft.slope * self._draft_step_s(rows, context)

    def iteration_s(
        self, n: int, depth: int, width: int, verify_tokens: float, context: float = 0.0
    ) -> float:
        """Corrected seconds of a decode iteration."""
        draft = self.draft_s(n, depth, width, context)
        return draft + self.verify_s(verify_tokens, context) + self.model.overhead_s

    def observe_verify(self, tokens: float, context: float, measured_s: float) -> None:
        """A measured target forward."""
        if self.enabled:
            self.verify.observe(self._target_s(tokens, context), measured_s)

    def observe_draft(self, n: int, depth: int, width: int, context: float, measured_s: float) -> None:
        """``depth`` measured draft forwards."""
        if self.enabled and depth > 0:
            self.draft.observe(self._draft_s(n, depth, width, context), measured_s)
