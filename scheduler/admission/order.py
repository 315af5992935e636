"""Which waiting prompts come first, and which of them a decision looks at."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np

from adaserve.scheduler.admission.situation import PrefillConfig, Situation, WaitingBatch, first_token_due_s
from adaserve.scheduler.averages import FloatOrArray
from adaserve.scheduler.interface import BoolArray, FloatArray, IntArray

Queued = TypeVar("Queued", bound=tuple[Any, ...])

LATER_S = 1e6
"""More than any wait, so that such a prompt comes after all others."""

MAX_WAITING = 64
"""A decision looks at this many prompts of the queue: of those that can be in time, the ones due first."""

MAX_LATE = 16
"""It also looks at this many prompts that will miss their TTFT SLO, those that have waited longest: more of
them change nothing."""


def overtaking(config: PrefillConfig, waiting: WaitingBatch, due_s: FloatArray) -> BoolArray:
    """Prompts that go before started ones, [n]: those that state when they are due, which is earlier, and fit
    into one chunk.

    A server holds only one partly read prompt. So another prompt can pass it only as a whole, in a chunk
    whose rest goes to the started one.
    """
    if not waiting.started.any():
        return np.zeros(len(due_s), np.bool_)
    earlier = waiting.stated & (due_s < due_s[waiting.started].min())
    return ~waiting.started & earlier & (waiting.prompt_left < config.chunk_tokens)


def rank_of(
    config: PrefillConfig, arrival_s: FloatOrArray, ttft_slo_s: FloatOrArray, prompt_left: FloatOrArray
) -> FloatOrArray:
    """Sort key of prompts that have not started, of one or [n]: lower comes first."""
    if config.order == "short":
        return prompt_left
    if config.order == "fcfs":
        return arrival_s
    return first_token_due_s(arrival_s, ttft_slo_s, LATER_S if config.order == "slack" else config.patience_s)


def looked_at(
    config: PrefillConfig, stated: Sequence[Queued], patient: Sequence[Queued], now_s: float
) -> list[Queued]:
    """The prompts that a decision looks at, from those with a TTFT SLO and the ``patient`` ones, both sorted:
    the first ones that can be in time, and those of either kind that have been late longest. Patient prompts
    have nothing to lose, so all of them may start.

    A prompt is a tuple of its ``rank_of``, its place in the queue, and what else the caller wants."""
    late_s = -np.inf if config.lost_every_s is None else now_s
    lost, late = (bisect_left(queue, late_s, key=itemgetter(0)) for queue in (stated, patient))
    in_time = sorted([*stated[lost : lost + MAX_WAITING], *patient[late : late + MAX_WAITING]])
    return [*in_time[:MAX_WAITING], *patient[: min(late, MAX_WAITING)], *stated[: min(lost, MAX_LATE)]]


def loosest_first(situation: Situation, rank: FloatArray) -> FloatArray:
    """``rank`` [n] with prompts without a TTFT SLO reordered: of those that came within the same
    ``patience_s``, the one with the loosest TPOT SLO comes first.

    So prompts that can bear a similar number of stalls share a forward, and the tight ones come last, when
    fewer forwards will follow."""
    waiting = situation.waiting
    patient = np.flatnonzero(~waiting.stated & ~waiting.started)
    due_s = rank[patient]
    period = np.floor(due_s / situation.config.patience_s)
    order = np.lexsort((due_s, -waiting.tpot_slo_s[patient], period))
    rank = rank.copy()
    rank[patient[order]] = np.sort(due_s)
    return rank


def in_order(situation: Situation) -> IntArray:
    """All rows, in the order in which they are prefilled. Lost ones come after those that can be in time."""
    config, waiting = situation.config, situation.waiting
    rank = rank_of(config, waiting.arrival_s, waiting.ttft_slo_s, waiting.prompt_left.astype(np.float64))
    rank = np.where(situation.late & waiting.stated, rank + LATER_S, rank)
    passes = np.zeros(len(rank), np.bool_)
    if config.order == "deadline":
        rank = loosest_first(situation, rank)
        passes = overtaking(config, waiting, rank)
    return np.lexsort((rank, ~waiting.started, ~passes))
