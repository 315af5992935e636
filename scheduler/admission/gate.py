"""The admission gate: which prompts must not start yet, or running requests would miss their SLOs."""

from __future__ import annotations

import numpy as np

from adaserve.scheduler.admission.gate_loops import admitted, group_ends
from adaserve.scheduler.admission.situation import Situation, until_read_s
from adaserve.scheduler.interface import BoolArray, FloatArray, IntArray

MIN_HEADROOM = 0.8
HEADROOM_PER_LATE = 0.05
"""A prompt whose TTFT SLO is nearly due is given up if starting it would leave the tightest running TPOT SLO
with too little headroom. The limit is the first number, plus the second for every late prompt that waits, but
at most 1. With nobody late it may be a short burst, which costs the running requests little. With many late,
the load is too high to serve everybody in time, and every further request makes others miss their SLOs. Tuned
on the sweep's traffic, in the simulator."""

LOST_HEADROOM = 1.5
"""A prompt whose TTFT SLO is lost needs this headroom to start, or that of the gate if it is more. It has
nothing left to gain. With only the gate's headroom the lost prompts would fill up the batch, so that those
that can still be in time would be lost as well. Tuned likewise."""

GATE_CLAIM = 0.6
"""A prompt starts anyway when its prefill needs this share of the time that is left until its TTFT SLO."""

STARTING_ITERATIONS = 12
"""Iterations that pass between the decision that a prompt starts and its first token, beyond its prefill."""


def ends_of_groups(situation: Situation, order: IntArray) -> IntArray:
    """Where the groups of ``order`` end. A group is prompts that follow each other and share a forward: until
    reading their tokens takes as long as the fixed cost of a forward, or no more fit whole into one. Lost
    prompts are never in a group with others, and fewer than ``PER_LOST`` prompts are judged one by one.

    On a GPU, where one prompt costs nearly what ten cost, a group is all that fit; on a CPU it is one."""
    waiting, enough = situation.waiting, situation.interference.worth_tokens
    lost = (situation.late & waiting.stated)[order]
    return group_ends(waiting.prompt_left[order], lost, enough, situation.config.chunk_tokens)


def most_overdue(situation: Situation, order: IntArray) -> int | None:
    """The prompt of ``order`` that has been overdue longest, if none was started for this reason in the last
    ``lost_every_s``. A lost one must have been due for that long; one without a TTFT SLO has already been
    patient."""
    waiting, every_s = situation.waiting, situation.config.lost_every_s
    if not len(order) or every_s is None or situation.interference.lost_wait_s < every_s:
        return None
    grace_s = np.where(waiting.stated, every_s, 0.0)
    overdue_s = situation.now_s - situation.aims_s - grace_s
    overdue_s = np.where(waiting.started, -np.inf, overdue_s)[order]
    first = int(np.argmax(overdue_s))
    return int(order[first]) if overdue_s[first] >= 0 else None


def held_back(situation: Situation, order: IntArray) -> BoolArray:
    """Prompts that must not start yet, because a running request would miss its SLO, [len(order)].

    Running requests stand still while a prompt is read, and iterations get longer with every request that
    joins, so with too many of them nobody meets a tight SLO. Serving fewer at a time does the same work and
    costs only TTFT. So a prompt waits while the tightest running SLO would have less than ``gate`` headroom.
    Prompts that start together are read together: on a GPU the first may cost nearly all that ten cost.

    When its prefill and those before it would need ``GATE_CLAIM`` of the time that is left until its aim (its
    TTFT SLO, or ``patience_s``), a prompt no longer waits for that. Without ``lost_every_s`` it starts then.
    With it, a prompt must not make others miss their SLO for the sake of its own: it still needs the headroom
    of ``MIN_HEADROOM``, and once it is lost ``LOST_HEADROOM``. One without a TTFT SLO loses nothing by
    waiting, so it always waits for ``gate``.
    """
    config, waiting, interference = situation.config, situation.waiting, situation.interference
    if config.gate is None:
        return np.zeros(len(order), np.bool_)
    needed, stakes = needed_headroom(situation, order)[order], interference.stakes
    ends = ends_of_groups(situation, order[needed > 0.0])
    starts = admitted(
        waiting.prompt_left[order], waiting.encode_s[order], needed, ends, interference.worth_tokens,
        interference.sizes, interference.seconds, stakes.left_s, stakes.iterations, stakes.cycle_s,
    )  # fmt: skip
    return ~starts


def needed_headroom(situation: Situation, order: IntArray) -> FloatArray:
    """The headroom that each prompt needs to start, [n]; 0: it does not wait. ``order``: first to last."""
    config, waiting, interference = situation.config, situation.waiting, situation.interference
    late, stated = situation.late, waiting.stated
    work_s = np.zeros(len(late))
    work_s[order] = until_read_s(situation, order)
    left_s = situation.aims_s - situation.now_s - STARTING_ITERATIONS * interference.period_s
    can_wait = work_s < GATE_CLAIM * left_s
    least, gate = 0.0, np.full(len(late), config.gate)
    if config.lost_every_s is not None:
        least = min(1.0, MIN_HEADROOM + HEADROOM_PER_LATE * int(np.count_nonzero(late)))
        can_wait |= late | ~stated
        gate[late & stated] = max(config.gate or 0.0, LOST_HEADROOM)
    return np.where(waiting.started, 0.0, np.where(can_wait, gate, least))


def first_to_start(situation: Situation, order: IntArray) -> IntArray:
    """The prompts of ``order`` that may start while nothing decodes, so that the gate has no running request
    to judge by.

    Of the prompts with a TPOT SLO only the first group: the gate judges the others by it, an iteration later.
    If all that wait started together, all of them could be too slow."""
    waiting = situation.waiting
    bound = waiting.has_tpot_slo
    tight = order[bound[order]]
    for end in ends_of_groups(situation, tight)[:1]:
        bound[tight[:end]] = False
    return order[(~bound | waiting.started)[order]]
