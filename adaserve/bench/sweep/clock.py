"""How long the rest of a sweep will take."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich.progress import ProgressColumn, Task
from rich.text import Text

from adaserve.bench.sweep.plan import SweepPlan

_OVERHEAD_S = 12.0  # first guess: of a case, beyond its arrivals


@dataclass
class Clock:
    """How long what is left will take."""

    overhead_s: float = _OVERHEAD_S
    seen: int = 0
    case_end_s: float | None = None  # of the running case, as planned
    later_s: float = 0.0  # of what comes after it

    def learn(self, planned_s: float, took_s: float) -> None:
        self.seen += 1
        self.overhead_s += (max(0.0, took_s - planned_s) - self.overhead_s) / self.seen

    def expected_s(self, plan: SweepPlan) -> float:
        """Of any case."""
        return plan.seconds + self.overhead_s

    @property
    def left_s(self) -> float:
        running = 0.0 if self.case_end_s is None else max(0.0, self.case_end_s - time.monotonic())
        return running + self.later_s


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
