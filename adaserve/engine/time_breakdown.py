"""Where a worker's time goes."""

from __future__ import annotations

from collections.abc import Sequence

from adaserve.engine.device import Run
from adaserve.scheduler.interface import IterationOutcome

STALL_S = 0.01
"""No model runs for so long in a loop: kernels are compiled, garbage is collected, or many requests end."""


class TimeBreakdown:
    """Sums since the start: seconds, and how often."""

    def __init__(self) -> None:
        self.last_end_s = 0.0
        """When the latest decode iteration was over."""
        names = "decode_s iterations prefill_s prefills target_s draft_s loop_s loop_models_s loops"
        names += " stalls stalled_s unread mixed"
        self._sums = dict.fromkeys(names.split(), 0.0)
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
        sums["mixed"] += outcome.prefill_tokens > 0
        sums["unread"] += outcome.plan.takes_all and outcome.trees.n_nodes > 0
        of_model = [sum(start.seconds_until(end) for start, end in forwards) for forwards in runs]
        sums["target_s"] += of_model[0]
        sums["draft_s"] += sum(of_model[1:])
        # Loops: decode iterations in a row, from end to end.
        if not outcome.prefilled:
            sums["loop_s"] += outcome.since_last_s
            sums["loop_models_s"] += sum(of_model)
            sums["loops"] += 1
            idle_s = outcome.since_last_s - sum(of_model)
            if idle_s > STALL_S:
                sums["stalls"] += 1
                sums["stalled_s"] += idle_s
        self.has_prefilled, self.last_end_s = False, outcome.end_s

    def report(self) -> dict[str, float]:
        """A copy of the sums, by name."""
        return dict(self._sums)
