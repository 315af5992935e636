"""What an iteration takes on this host, learned from those that were served.

A latency model comes from a short measurement, from a file, or from an earlier run. It may be wrong: the host
was busy then, or it is another host. So it is only where learning starts (``scheduler/cost_table.py``).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import overload

import numpy as np

from adaserve.scheduler.cost_table import (
    LATEST,
    LEARN_EVERY,
    MUCH,
    QUANTILE,
    CostTable,
    context_at,
    context_step,
)
from adaserve.scheduler.interface import FloatArray, IterationOutcome
from adaserve.scheduler.latency import ForwardCost, Latency, LatencyModel, StepCost, TableCost

STEP_RANGE = 2.0
"""A draft step costs at most this many times as much, or as little, as the line through all drafts says."""


class FirstStep:
    """What the first draft step for n requests takes, and all around the steps, without reading their
    contexts: fixed + n x per_row.

    Only whole drafts are timed. So this is a least squares fit of fixed + n x per_row and two factors, of the
    first guess of the later steps and of that of reading contexts, by relative errors: a time that was far
    too long hardly counts.
    """

    KEPT = 0.98  # of the weight of older drafts, per draft
    PRIOR = 0.1  # of the weight of a draft's time, for the prior's

    def __init__(self, prior: StepCost) -> None:
        one, eight = prior.seconds(np.array([1.0, 8.0]), 0.0).tolist()
        # The prior counts little: that it was ten times too fast must not look like ten drafts that were not.
        # What short contexts seem to say of reading is noise, and must not be taken for what long ones cost.
        weight = np.array([self.PRIOR, self.PRIOR, self.PRIOR, 1.0])
        rows = np.eye(4)
        rows[:2, :2] = [[1 / one, 1 / one], [1 / eight, 8 / eight]]
        rows *= weight[:, None]
        self._prior = rows.T @ rows, rows.T @ weight
        self._square: FloatArray = np.zeros((4, 4))
        self._right: FloatArray = np.zeros(4)
        self._new: list[tuple[float, float, float, float]] = []
        self._work_out()

    def observe(self, n: int, later_s: float, seconds: float, reading_s: float = 0.0) -> None:
        """A draft for n requests took ``seconds``. First guesses: ``later_s`` for its later steps, and
        ``reading_s`` for what all steps read of the contexts."""
        self._new.append((1.0 / seconds, n / seconds, later_s / seconds, reading_s / seconds))
        if len(self._new) >= LEARN_EVERY:
            self._work_out()

    def _work_out(self) -> None:
        rows = np.array(self._new).reshape(-1, 4)
        kept = self.KEPT ** len(rows)
        self._square = kept * self._square + rows.T @ rows
        self._right = kept * self._right + rows.sum(axis=0)
        self._new.clear()
        square, right = self._prior
        fixed, per_row, *factors = np.linalg.solve(square + self._square, right + self._right).tolist()
        # Of the first guesses of later steps, and of reading contexts.
        self.factor, self.reading = (max(f, 0.01) for f in factors)
        self.cost = ForwardCost(fixed_s=max(0.0, fixed), per_token_s=max(0.0, per_row))

    def seconds(self, n: int) -> float:
        """Predicted, where there is no context to read."""
        return self.cost.fixed_s + n * self.cost.per_token_s


class LearnedCosts(Latency):
    """What an iteration takes on this host. The policies of one server share it, and all of them teach it."""

    def __init__(self, start: LatencyModel, learn: bool = True) -> None:
        """``learn`` False: take the start as it is."""
        self._start, self._learn = start, learn
        self.verify = CostTable(start.verify.seconds, _learned_sizes(start, start.verify))
        self.first = FirstStep(start.draft_first or start.draft)
        self.step = CostTable(start.draft.seconds, _learned_sizes(start, start.draft))
        # By step of the context, as in the tables.
        self._guess_s = lru_cache(maxsize=1024)(lambda rows, step: start.draft_step_s(rows, context_at(step)))
        self._latest_other = deque([start.overhead_s] * 3, maxlen=LATEST)
        self._other_s = start.overhead_s

    # -- predicting ---------------------------------------------------------------------------

    @property
    def slowdown(self) -> float:
        """How many times as long as on a quiet host forwards take at present; 1 = the host is quiet."""
        return self.verify.slowdown

    def verify_curve(self, first: int, count: int, context: float = 0.0) -> FloatArray:
        """Seconds of target forwards of first, first + 1, ... tokens, [count]."""
        return self.verify.quiet_curve(context, first + count)[first : first + count] * self.slowdown

    @overload
    def verify_s(self, tokens: float, context: float = ...) -> float: ...
    @overload
    def verify_s(self, tokens: FloatArray, context: float = ...) -> FloatArray: ...
    def verify_s(self, tokens: float | FloatArray, context: float = 0.0) -> float | FloatArray:
        if not isinstance(tokens, np.ndarray):
            return self.verify.quiet_s(int(tokens), context) * self.slowdown
        curve = self.verify.quiet_curve(context, int(tokens.max(initial=0.0)) + 1)
        seconds: FloatArray = np.interp(tokens, np.arange(len(curve)), curve) * self.slowdown
        return seconds

    def draft_step_s(self, rows: float, context: float = 0.0) -> float:
        return self.step.quiet_s(int(rows), context) * self.slowdown

    def draft_start_s(self, n: int, context: float = 0.0) -> float:
        return max(0.0, self._first_s(n, context) - self.step.quiet_s(n, context)) * self.slowdown

    def other_s(self) -> float:
        return self._other_s

    def baseline_s(self, context: float) -> float:
        """Seconds per token of a lone request without speculation on a quiet host, with ``context`` cached
        tokens."""
        return self.verify.quiet_s(1, context) + self._other_s

    def learned(self) -> LatencyModel | None:
        """What is known of the quiet host, a start for the next run; None while nothing is known."""
        verify = self.verify.learned(_points(self._start.verify))
        if verify is None:
            return None
        draft = self.step.learned(_points(self._start.draft))
        return LatencyModel(
            draft=self._start.draft if draft is None else draft,
            verify=verify,
            overhead_s=self._other_s,
            source=self._start.source,
            draft_first=self.first.cost,
            learned=True,
        )

    def prefills(self) -> CostTable:
        """A table for prefills, which go through both models."""
        target, draft = self._start.verify, self._start.draft
        return CostTable(
            lambda tokens, context: target.seconds(tokens, context) + draft.seconds(tokens, context)
        )

    def _reading_s(self, n: int, context: float) -> float:
        """The first guess of what a draft step of n rows takes for the cached tokens that it reads."""
        return self._guess_s(n, context_step(context)) - self._guess_s(n, 0)

    def _first_s(self, n: int, context: float) -> float:
        """The first draft step for n requests, and all around the steps."""
        return self.first.seconds(n) + self.first.reading * self._reading_s(n, context)

    # -- learning -----------------------------------------------------------------------------

    def observe(self, outcome: IterationOutcome, context: float) -> None:
        """An iteration that was served with ``context`` cached tokens. Its draft may have read fewer."""
        if not self._learn:
            return
        tokens = outcome.selection.verify_tokens + outcome.prefill_tokens
        self.verify.observe(tokens, context, outcome.verify_s)
        n, depth = outcome.plan.drafting_rows, outcome.trees.draft_steps
        if depth:
            self._observe_draft(n, depth, outcome.plan.width, outcome.plan.draft_context, outcome.draft_s)
        if outcome.since_last_s:
            self._observe_other(outcome.since_last_s - outcome.draft_s - outcome.verify_s)

    def _observe_draft(self, n: int, depth: int, width: int, context: float, seconds: float) -> None:
        if not (math.isfinite(seconds) and seconds > 0) or math.log(self.slowdown) > MUCH:
            return
        rows, later = n * width, depth - 1
        guess_s, reading_s = self._guess_s(rows, 0), self._reading_s(rows, context)
        all_reading_s = later * reading_s + self._reading_s(n, context)
        self.first.observe(n, later * guess_s, seconds, all_reading_s)
        if later:
            line_s = self.first.factor * guess_s + self.first.reading * reading_s
            step_s = (seconds - self._first_s(n, context)) / later
            step_s = min(max(step_s, line_s / STEP_RANGE), line_s * STEP_RANGE)
            self.step.observe(rows, context, step_s, self.slowdown)

    def _observe_other(self, seconds: float) -> None:
        """A prefill or an idle time in between makes it longer, so the low quantile counts here, too."""
        if math.isfinite(seconds):
            self._latest_other.append(max(0.0, seconds))
            self._other_s = sorted(self._latest_other)[int(QUANTILE * len(self._latest_other))]


def _points(cost: StepCost) -> Sequence[float]:
    """Sizes of which a guess is worth keeping."""
    return cost.tokens if isinstance(cost, TableCost) else (64.0, 256.0, 1024.0, 4096.0)


def _learned_sizes(start: LatencyModel, cost: StepCost) -> Sequence[float]:
    return cost.tokens if start.learned and isinstance(cost, TableCost) else ()
