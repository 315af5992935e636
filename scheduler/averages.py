"""Exponential moving averages: recent values count, old ones fade."""

from __future__ import annotations

from typing import TypeVar

from adaserve.scheduler.interface import FloatArray

FloatOrArray = TypeVar("FloatOrArray", float, FloatArray)


def blend(mean: FloatOrArray, value: FloatOrArray, weight: float) -> FloatOrArray:
    """``mean`` moved towards ``value``, which gets ``weight`` (0 to 1)."""
    return (1.0 - weight) * mean + weight * value


class MovingAverage:
    """The mean of a stream of numbers, in which each new number gets ``weight``.

    Old values have a half-life of ``log(0.5) / log(1 - weight)`` values: 6.6 for a weight of 0.1.
    """

    __slots__ = ("_known", "value", "weight")

    def __init__(self, weight: float, start: float | None = None) -> None:
        """Without ``start`` the first value counts in full; until then ``value`` is 0."""
        self.weight, self.value = weight, 0.0 if start is None else start
        self._known = start is not None

    def add(self, value: float) -> None:
        """Adds one more value."""
        self.value = blend(self.value, value, self.weight) if self._known else value
        self._known = True
