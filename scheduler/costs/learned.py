"""How long an iteration takes on this host, learned from served iterations.

A latency model comes from a short measurement, from a file, or from an earlier run. It may be wrong: the host
was busy then, or it is another host. So learning only starts from it. The time of forwards by size is learned
in ``scheduler/costs/learned_table.py``, and the time that reading the KV cache adds in
``scheduler/costs/kv_read.py``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import overload

import numpy as np

from adaserve.scheduler.costs.kv_read import FadingFit, LearnedKVRead, scales
from adaserve.scheduler.costs.latency import (
    ForwardCost,
    KVReadCost,
    Latency,
    LatencyModel,
    StepCost,
    TabulatedCost,
)
from adaserve.scheduler.costs.learned_table import LATEST, LEARN_EVERY, MUCH, QUANTILE, LearnedCostTable
from adaserve.scheduler.interface import NO_CONTEXT, Context, FloatArray, IterationOutcome

STEP_RANGE = 2.0
"""A draft step costs at most this many times as much, or as little, as the line through all drafts says."""

MIN_TIME = 1e-3
"""Share of the first guess of a first step. A draft that seems to take less counts as one of this length,
because errors are relative, and a clock that hardly moved must not outweigh all other drafts."""

LITTLE = 0.25
"""If reading takes up to this share of the rest of a forward, it hardly matters: the forward's time teaches
the cost of sizes, and whether the host is busy. Above that, it teaches the cost of reading."""


BASELINE_CONTEXT = Context(256.0)
"""What the lone request has cached whose plain decoding defines the baseline."""


class LearnedForward:
    """One kind of forward: its time by size, and the time to read the KV cache."""

    def __init__(self, guess: StepCost) -> None:
        self.sizes = LearnedCostTable(guess.alone, known_sizes(guess))
        self.kv_read = LearnedKVRead(guess.kv_read, self.sizes.quiet_s(1))

    def quiet_s(self, tokens: int, context: Context) -> float:
        """Seconds of one forward on a quiet host."""
        return self.sizes.quiet_s(tokens) + self.kv_read.cost.seconds(tokens, context)

    def quiet_curve(self, first: int, count: int, context: Context) -> FloatArray:
        """Of forwards of first, first + 1, ... tokens, [count]."""
        sizes = np.arange(first, first + count, dtype=np.float64)
        alone = self.sizes.quiet_curve(first + count)[first : first + count]
        return alone + self.kv_read.cost.seconds(sizes, context)

    def observe(self, tokens: int, context: Context, seconds: float) -> None:
        """A forward that was served; nonsense (not finite, not positive) is ignored."""
        if not (math.isfinite(seconds) and seconds > 0):
            return
        alone_s, kv_read_s = self.sizes.quiet_s(tokens), self.kv_read.cost.seconds(tokens, context)
        little = kv_read_s < LITTLE * alone_s
        if little or math.log(self.sizes.slowdown) > MUCH:  # is the host still busy?
            self.sizes.judge(tokens, seconds, kv_read_s)
        busy = math.log(self.sizes.slowdown) > MUCH and seconds > math.exp(MUCH) * (alone_s + kv_read_s)
        if not busy and (self.sizes.knows(tokens) or not little):
            self.kv_read.observe(tokens, context, seconds, alone_s)
        if little and seconds > 2.0 * kv_read_s:
            self.sizes.learn(tokens, seconds - kv_read_s)


class FirstStep:
    """Time of the first draft step for n requests and of everything around the steps, without reading their
    contexts: fixed + n x per_row; and the time of all steps to read them.

    This is a least squares fit of fixed + n x per_row, of a factor of the first guess of the later steps,
    and of the cost of reading contexts, by relative errors: a time that was far too long hardly counts.
    A GPU times only whole drafts, and drafts that all have the same depth do not show what starting them
    costs. A CPU host knows when the first level was done, and so times both parts.
    """

    KEPT = 0.98  # of the weight of older drafts, per draft
    PRIOR = 0.1  # of the weight of a draft's time, for the prior's

    def __init__(self, prior: StepCost, kv_read: KVReadCost) -> None:
        """``prior``: first guess of a first step; ``kv_read``: what draft steps take to read contexts."""
        one, eight = prior.alone(np.array([1.0, 8.0])).tolist()
        self._scales, self._least_s = scales(kv_read, one), MIN_TIME * one
        # The prior counts little: that it was ten times too fast must not look like ten drafts that were not.
        # What short contexts seem to say of reading is noise, and must not be taken for what long ones cost.
        weight = np.array([self.PRIOR, self.PRIOR, self.PRIOR, 1.0, 1.0])
        rows = np.eye(5)
        rows[:2, :2] = [[1 / one, 1 / one], [1 / eight, 8 / eight]]
        guessed = [c / s for c, s in zip(kv_read, self._scales, strict=True)]
        values = weight * np.array([1.0, 1.0, 1.0, *guessed])
        self._fit = FadingFit(rows * weight[:, None], values, self.KEPT)
        self._work_out()

    def observe(self, n: int, later_s: float, seconds: float, read: float = 0.0, pairs: float = 0.0) -> None:
        """A draft for n requests took ``seconds``, or only its later steps did (n = 0). ``later_s``: first
        guess for the later steps; ``read`` and ``pairs``: sum L and sum q L over all of these steps."""
        scale, pair_scale = self._scales
        seconds = max(seconds, self._least_s)
        row = (float(n > 0), n, later_s, read * scale, pairs * pair_scale)
        self._fit.add(tuple(x / seconds for x in row), 1.0)
        if len(self._fit) >= LEARN_EVERY:
            self._work_out()

    def _work_out(self) -> None:
        fixed, per_row, factor, *found = self._fit.solve()
        self.factor = max(factor, 0.01)  # of the first guess of later steps
        self.kv_read = KVReadCost(*(c * s for c, s in zip(found, self._scales, strict=True)))
        self.cost = ForwardCost(fixed_s=fixed, per_token_s=per_row)

    def seconds(self, n: int) -> float:
        """Predicted seconds if there is no context to read."""
        return self.cost.fixed_s + n * self.cost.per_token_s


MIN_FIRST = 0.2
"""Share of the time of a later step for one request: a first step that was learned to cost less is not
believed."""


def _likely_first(start: LatencyModel) -> StepCost:
    """What an earlier run learned about first steps, unless it is next to nothing compared with a later step.
    In that case the fit has attributed the whole of a draft to reading long contexts, which is no prior to
    scale by."""
    first, one = start.draft_first, np.array([1.0])
    if first is None or float(first.alone(one)[0]) < MIN_FIRST * float(start.draft.alone(one)[0]):
        return start.draft
    return first


class LatestLow:
    """A low quantile of the latest times. A mean is of no use, because an idle time in between makes a time
    longer."""

    def __init__(self, start_s: float) -> None:
        self._latest = deque([start_s] * 3, maxlen=LATEST)
        self.value = start_s

    def add(self, seconds: float) -> None:
        """Adds a time; a value that is not finite is ignored, and a negative one counts as 0."""
        if math.isfinite(seconds):
            self._latest.append(max(0.0, seconds))
            self.value = sorted(self._latest)[int(QUANTILE * len(self._latest))]


class LearnedCosts(Latency):
    """How long an iteration takes on this host. The policies of one server share this object, and it learns
    from all of them."""

    def __init__(self, start: LatencyModel, learn: bool = True) -> None:
        """``learn`` False: take the start as it is."""
        self._start, self._learn = start, learn
        self.verify = LearnedForward(start.verify)
        self.first = FirstStep(_likely_first(start), start.draft.kv_read)
        self.step = LearnedCostTable(start.draft.alone, known_sizes(start.draft))
        self._guess = LearnedCostTable(start.draft.alone)  # never taught: the first guess
        self._select_wait = LatestLow(0.0)
        self._other = LatestLow(start.overhead_s)
        self._other_alone = LatestLow(start.overhead_s)  # around iterations of a lone request

    # -- predicting ---------------------------------------------------------------------------

    @property
    def slowdown(self) -> float:
        return self.verify.sizes.slowdown

    def verify_curve(self, first: int, count: int, context: Context = NO_CONTEXT) -> FloatArray:
        """Seconds of target forwards of first, first + 1, ... tokens, [count]."""
        return self.verify.quiet_curve(first, count, context) * self.slowdown

    @overload
    def verify_s(self, tokens: float, context: Context = ...) -> float: ...
    @overload
    def verify_s(self, tokens: FloatArray, context: Context = ...) -> FloatArray: ...
    def verify_s(self, tokens: float | FloatArray, context: Context = NO_CONTEXT) -> float | FloatArray:
        if not isinstance(tokens, np.ndarray):
            return self.verify.quiet_s(int(tokens), context) * self.slowdown
        curve = self.verify.quiet_curve(0, int(tokens.max(initial=0.0)) + 2, context)
        seconds: FloatArray = np.interp(tokens, np.arange(len(curve)), curve) * self.slowdown
        return seconds

    def draft_step_s(self, rows: float, context: Context = NO_CONTEXT) -> float:
        return (self.step.quiet_s(int(rows)) + self.first.kv_read.seconds(rows, context)) * self.slowdown

    def draft_start_s(self, n: int) -> float:
        return max(0.0, self.first.seconds(n) - self.step.quiet_s(n)) * self.slowdown

    def other_s(self) -> float:
        return self._other.value

    @property
    def select_wait_s(self) -> float:
        """How long a device waits for a selection that could be avoided by taking all candidates. At first it
        is taken as 0."""
        return self._select_wait.value

    def baseline_s(self) -> float:
        """Seconds per token of a lone request without speculation on a quiet host."""
        return self.verify.quiet_s(1, BASELINE_CONTEXT) + self._other_alone.value

    def learned(self) -> LatencyModel | None:
        """What is known about the quiet host, as a start for the next run; None while nothing is known."""
        verify = self.verify.sizes.learned(_points(self._start.verify), self.verify.kv_read.cost)
        if verify is None:
            return None
        draft = self.step.learned(_points(self._start.draft), self.first.kv_read)
        return LatencyModel(
            draft=self._start.draft if draft is None else draft,
            verify=verify,
            overhead_s=self._other_alone.value,
            source=self._start.source,
            draft_first=self.first.cost,
        )

    def first_prefills_s(self, tokens: FloatArray) -> FloatArray:
        """First guess of the seconds [k] of prefills of ``tokens`` [k], which go through both models."""
        return self._start.verify.alone(tokens) + self._start.draft.alone(tokens)

    # -- learning -----------------------------------------------------------------------------

    def observe(self, outcome: IterationOutcome, context: Context) -> None:
        """An iteration that was served with ``context`` in the KV cache. Its draft may have read less.

        A forward that read prompts as well teaches nothing about verification: prompts need no logits, and
        their tokens share what they see, so a token of theirs takes another time."""
        if not self._learn:
            return
        if not outcome.prefill_tokens:
            self.verify.observe(outcome.selection.verify_tokens, context, outcome.verify_s)
        if outcome.trees.draft_steps and outcome.plan.draft.branching is None:  # else steps differ in rows
            self._observe_draft(outcome)
        waited_s = 0.0
        if outcome.trees.n_nodes and outcome.plan.running.may_go_unread and not outcome.plan.takes_all:
            waited_s = outcome.select_s
            self._select_wait.add(waited_s)
        if outcome.since_last_s and not outcome.prefilled:
            around_s = outcome.since_last_s - outcome.draft_s - waited_s - outcome.verify_s
            self._other.add(around_s)
            if len(outcome.plan.running) == 1:
                self._other_alone.add(around_s)

    def _observe_draft(self, outcome: IterationOutcome) -> None:
        seconds, first_s = outcome.draft_s, outcome.first_level_s
        if not (math.isfinite(seconds) and seconds > 0) or math.log(self.slowdown) > MUCH:
            return
        plan, later = outcome.plan, outcome.trees.draft_steps - 1
        n, context, rows = plan.drafting_rows, plan.draft_context, plan.drafting_rows * plan.draft.width
        guess_s = self._guess.quiet_s(rows)
        read, pairs = context.tokens, context.each * n
        later_read, later_pairs = later * context.tokens, later * context.each * rows
        if later and first_s is not None and 0 < first_s < seconds:
            self.first.observe(n, 0.0, first_s, read, pairs)
            self.first.observe(0, later * guess_s, seconds - first_s, later_read, later_pairs)
        else:
            first_s = self.first.seconds(n) + self.first.kv_read.seconds(n, context)
            self.first.observe(n, later * guess_s, seconds, read + later_read, pairs + later_pairs)
        if later:
            line_s = self.first.factor * guess_s
            step_s = (seconds - first_s) / later - self.first.kv_read.seconds(rows, context)
            step_s = min(max(step_s, line_s / STEP_RANGE), line_s * STEP_RANGE)
            self.step.learn(rows, step_s)


def _points(cost: StepCost) -> Sequence[float]:
    """Sizes for which a guess is worth keeping. One token is among them, because the baseline is read
    there."""
    return (1.0, *cost.tokens) if isinstance(cost, TabulatedCost) else (1.0, 8.0, 64.0, 256.0, 1024.0, 4096.0)


def known_sizes(cost: StepCost) -> Sequence[float]:
    """Sizes whose cost was learned by serving, not in a short measurement."""
    return cost.known if isinstance(cost, TabulatedCost) else ()
