"""How much of its context a draft reads: learned acceptance against learned cost, per request.

A draft that reads only the first and the recent tokens is cheap at any length (MagicDec, section 4). But it
may agree less often with the target, or more often if the draft was trained on shorter texts. Which effect is
stronger differs by request and load (section 4.3), so each way of reading has its own acceptance and cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from adaserve.scheduler.acceptance import AcceptanceRates, Tested, expected_accept_length
from adaserve.scheduler.interface import (
    FloatArray,
    IntArray,
    IterationOutcome,
    RunningBatch,
    tokens_read,
)

PROBE_EVERY = 32
"""Drafts after which an unused window is tried again; more if it costs more."""


class DraftWindows:
    """Chooses among ``windows`` (0 = the whole context) and learns what each gains."""

    def __init__(self, windows: Sequence[int], sinks: int) -> None:
        self._windows, self._sinks = np.array(windows, np.int64), sinks
        self._rates = [AcceptanceRates() for _ in windows]
        self._unused: IntArray = np.zeros(len(windows), np.int64)  # drafts since a window was used

    def choose(
        self,
        running: RunningBatch,
        weight: FloatArray,
        depth: int,
        rate: float,
        step_s: Callable[[float], float],
    ) -> IntArray | None:
        """The window of each row, [n]; None if no window leaves anything out.

        A chain of ``depth`` is worth ``weight`` [n] times its expected accept length. ``rate``: value of a
        second; ``step_s``: seconds of a draft step by the cached tokens that it reads, all rows together.
        """
        reads = tokens_read(running.context_tokens, self._windows[:, None], self._sinks)  # [windows, n]
        everything, least = float(reads[0].sum()), float(reads.min(axis=0).sum())
        if everything == least:
            return None
        token_s = max(0.0, step_s(everything) - step_s(least)) / (everything - least)
        accepted = np.stack([r.of_rows(running.rids, running.slo_class) for r in self._rates])
        worth = weight * expected_accept_length(accepted, depth) - rate * depth * token_s * reads
        cuts = reads < running.context_tokens  # a window that leaves nothing out is not another way to read
        worth[1:][~cuts[1:]] = -np.inf
        best: IntArray = worth.argmax(axis=0)
        if (due := self._due(reads, best, step_s)) is not None:
            best = np.where(cuts[due] if due else True, due, best)
        window: IntArray = self._windows[best]
        return window

    def _due(self, reads: IntArray, best: IntArray, step_s: Callable[[float], float]) -> int | None:
        """A window that is due for another try; None = none."""
        usual_s = step_s(float(np.take_along_axis(reads, best[None, :], axis=0).sum()))
        for k in np.flatnonzero(self._unused >= PROBE_EVERY).tolist():
            if self._unused[k] >= PROBE_EVERY * step_s(float(reads[k].sum())) / usual_s:
                self._unused[k] = 0  # now, since nothing may be drafted with it
                return k
        return None

    def observe(self, outcomes: Sequence[IterationOutcome], tests: Tested) -> None:
        """Learns from iterations of one batch; ``tests``: the tested nodes of all their drafts."""
        running, shape = outcomes[0].plan.running, (len(outcomes), -1)
        none = np.zeros(len(running), np.int64)
        used = np.stack([none if (w := o.plan.draft.window) is None else w for o in outcomes])
        context = np.stack([o.plan.running.context_tokens for o in outcomes])
        smallest = self._windows[self._windows > 0].min() + self._sinks
        chosen = (context > smallest) & (tests.tried.reshape(shape) > 0)  # shorter ones leave no choice
        if not chosen.any():
            return
        self._unused += len(outcomes)
        for k, window in enumerate(self._windows.tolist()):
            mine = chosen & (used == window)
            if mine.any():
                self._unused[k] = 0
                tried, passed = ((v.reshape(shape) * mine).sum(axis=0) for v in (tests.tried, tests.passed))
                self._rates[k].observe(running.rids, running.slo_class, tried, passed)

    def forget(self, rid: str) -> None:
        """Drops a finished request."""
        for rates in self._rates:
            rates.forget(rid)
