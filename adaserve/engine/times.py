"""Where a worker's time goes."""

from __future__ import annotations

from collections.abc import Sequence

from adaserve.engine.device import Run
from adaserve.scheduler.interface import IterationOutcome


class Times:
    """Sums since the start: seconds, and how often."""

    def __init__(self) -> None:
        self.last_end_s = 0.0
        """When the latest decode iteration was over."""
        self._sums = dict.fromkeys(
            ("decode_s", "iterations", "prefill_s", "prefills", "target_s", "draft_s", "loop_s", "loops"), 0.0
        )
        self.has_prefilled = True
        """Whether there was a prefill since then."""

    def prefilled(self, seconds: float) -> None:
        self._sums["prefill_s"] += seconds
        self._sums["prefills"] += 1
        self.has_prefilled = True

    def decoded(self, outcome: IterationOutcome, runs: Sequence[Sequence[Run]]) -> None:
        """``runs``: the forwards of the target, and of each draft model."""
        sums = self._sums
        sums["decode_s"] += outcome.total_s
        sums["iterations"] += 1
        if not outcome.prefilled:  # loops: decode iterations in a row, from end to end
            sums["loop_s"] += outcome.since_last_s
            sums["loops"] += 1
        self.has_prefilled, self.last_end_s = False, outcome.end_s
        for name, of_model in zip(("target_s", *("draft_s" for _ in runs[1:])), runs, strict=True):
            sums[name] += sum(start.seconds_until(end) for start, end in of_model)

    def report(self) -> dict[str, float]:
        """A copy of the sums, by name."""
        return dict(self._sums)
