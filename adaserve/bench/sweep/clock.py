"""How long the rest of a sweep will take."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich.progress import ProgressColumn, Task
from rich.text import Text


@dataclass
class Clock:
    """All cases take equally long: their arrivals, and what came on top on average."""

    arrivals_s: float
    overhead_s: float = 12.0  # a first guess
    seen: int = 0
    end_s: float = 0.0  # by the monotonic clock; 0 while nothing is known

    @property
    def case_s(self) -> float:
        """What a case is expected to take."""
        return self.arrivals_s + self.overhead_s

    def begin(self, cases: int) -> None:
        """As many are left, one of which begins now."""
        self.end_s = time.monotonic() + cases * self.case_s

    def learn(self, took_s: float) -> None:
        """Of a case that has ended."""
        self.seen += 1
        self.overhead_s += (max(0.0, took_s - self.arrivals_s) - self.overhead_s) / self.seen

    @property
    def left_s(self) -> float:
        return max(0.0, self.end_s - time.monotonic())


class LeftColumn(ProgressColumn):
    """The clock's estimate, counting down while a case runs."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def render(self, task: Task) -> Text:
        left_s = self._clock.left_s
        return Text(
            "" if not left_s else f"about {left_s / 60:.0f} min left" if left_s > 90 else "almost done"
        )
