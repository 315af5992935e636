"""How many replicas does this trace need?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CapacityAnswer:
    """The smallest fleet that reaches the target, and every size that was tried."""

    replicas: int | None  # None: not even the largest size tried reaches it
    target: float
    tried: dict[int, float]  # replicas -> attainment


def min_replicas(attainment: Callable[[int], float], target: float, most: int) -> CapacityAnswer:
    """Doubles until the target is reached, then bisects. Raises ValueError on a target outside (0, 1]."""
    if not 0 < target <= 1:
        raise ValueError(f"the target attainment must be in (0, 1], got {target}")
    tried: dict[int, float] = {}

    def reached(n: int) -> bool:
        tried[n] = attainment(n)
        return tried[n] >= target

    low, high = 0, 1
    while not reached(high):
        low, high = high, min(2 * high, most)
        if low >= most:
            return CapacityAnswer(None, target, dict(sorted(tried.items())))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return CapacityAnswer(high, target, dict(sorted(tried.items())))
