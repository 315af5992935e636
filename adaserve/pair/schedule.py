"""A training run planned by the clock, because on a shared machine nobody knows the steps per minute."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    until: float  # share of the run at which the phase ends
    rows: int
    length: int


@dataclass(frozen=True)
class Stage:
    """What both models are trained on, and at which share of the learning rates for a start from scratch."""

    target: tuple[Phase, ...]
    draft: tuple[Phase, ...]
    rates: float


# Short windows first: attention is cheap and early learning is local. One phase for the draft: it starts from
# trained layers, and each further shape costs a compilation.
FIRST = Stage((Phase(0.74, 16, 256), Phase(0.94, 8, 512), Phase(1.00, 2, 2048)), (Phase(1.00, 4, 1024),), 1.0)
FURTHER = Stage(FIRST.target, FIRST.draft, 0.5)
# Up to the length the server admits, at rates too low to spoil what was learned on short windows.
LONG = Stage((Phase(0.35, 2, 4096), Phase(1.00, 1, 8192)), (Phase(0.4, 4, 2048), Phase(1.00, 2, 8192)), 0.15)
# An unrolled head keeps its attention weights, which grow with the square of the length. Small batches first:
# at the beginning any text tells the way.
HEAD_PHASES = (Phase(0.35, 8, 256), Phase(0.85, 16, 256), Phase(1.00, 8, 512))


@dataclass
class Clock:
    """Elapsed share of a run of `minutes`; `before_s` was spent before a resume."""

    minutes: float
    before_s: float = 0.0

    def __post_init__(self) -> None:
        self._started = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return self.before_s + time.monotonic() - self._started

    @property
    def share(self) -> float:
        return min(self.elapsed_s / (60 * self.minutes), 1.0)

    def phase(self, phases: tuple[Phase, ...]) -> Phase:
        return next((p for p in phases if self.share < p.until), phases[-1])


def learning_rate(share: float) -> float:
    """Factor on the peak rate: rise, hold, then a long straight fall, which small budgets reward most."""
    warmup, decay_from, floor = 0.02, 0.3, 0.01
    if share < warmup:
        return max(share / warmup, 0.02)
    if share < decay_from:
        return 1.0
    return floor + (1 - floor) * (1 - share) / (1 - decay_from)
