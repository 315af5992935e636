"""The gate's loops, compiled: they run before every iteration while prompts wait.

They are in one module, because Numba's cache on disk does not notice when a function of another file has
changed.
"""

from __future__ import annotations

import math

import numpy as np

from adaserve.scheduler.compiled import BOOLS, FLOAT, FLOATS, INT, INTS, compiled
from adaserve.scheduler.interface import BoolArray, FloatArray, IntArray

PER_LOST = 4
"""For every this many prompts that start together, one running request may miss its SLO: a queue must not
wait for the last slow ones of a batch."""


@compiled(INT, INTS, FLOATS)
def one_prefill_s(tokens: int, sizes: IntArray, seconds: FloatArray) -> float:
    """Seconds of a prefill of ``tokens`` in as few chunks as possible. ``sizes`` and ``seconds`` [k] as
    ``Interference`` has them; below the first size the time is in proportion."""
    whole, rest = divmod(tokens, sizes[-1])
    at = np.searchsorted(sizes, rest)
    below, below_s = (sizes[at - 1], seconds[at - 1]) if at else (0, 0.0)
    share = (rest - below) / (sizes[at] - below)
    return float(whole * seconds[-1] + below_s + share * (seconds[at] - below_s))


@compiled(INTS, INTS, FLOATS)
def each_prefill_s(tokens: IntArray, sizes: IntArray, seconds: FloatArray) -> FloatArray:
    """The same of several, [n]."""
    taken = np.empty(len(tokens))
    for i in range(len(tokens)):
        taken[i] = one_prefill_s(tokens[i], sizes, seconds)
    return taken


@compiled(FLOATS, FLOATS, FLOATS, INT, FLOAT, INT)
def headroom(
    left_s: FloatArray, iterations: FloatArray, cycle_s: FloatArray, joining: int, more_s: float, spared: int
) -> float:
    """The time left until the last token is due, divided by the time needed: the least value of all requests
    except the ``spared`` tightest, if ``joining`` more requests run and their prompts take ``more_s``; inf if
    nothing is at stake. The arrays are those of ``Stakes``."""
    if spared >= len(left_s):
        return math.inf
    each_s = cycle_s[min(joining, len(cycle_s) - 1)]
    room = left_s / (iterations * each_s + more_s)
    return float(np.partition(room, spared)[spared])


@compiled(INTS, BOOLS, FLOAT, INT)
def group_ends(left: IntArray, lost: BoolArray, enough: float, most: int) -> IntArray:
    """Where each group of prompts ends, rising, of prompts with ``left`` tokens each [n] in their order.

    A group ends when it has ``enough`` tokens, or when the next prompt would make more than ``most``. Lost
    ones are never in a group with others. Fewer than PER_LOST prompts are groups of one."""
    ends, count, start, tokens = np.empty(len(left), np.int64), 0, 0, 0
    for i in range(len(left) + 1):
        ended = i == len(left) or tokens >= enough or tokens + left[i] > most or lost[i] != lost[i - 1]
        if i > start and ended:
            step = i - start if i - start >= PER_LOST else 1
            for end in range(start + step, i + 1, step):
                ends[count] = end
                count += 1
            start, tokens = i, 0
        if i < len(left):
            tokens += left[i]
    return ends[:count]


@compiled(INTS, FLOATS, FLOATS, INTS, FLOAT, INTS, FLOATS, FLOATS, FLOATS, FLOATS)
def admitted(
    left: IntArray,
    encode_s: FloatArray,
    needed: FloatArray,
    ends: IntArray,
    enough: float,
    sizes: IntArray,
    seconds: FloatArray,
    left_s: FloatArray,
    iterations: FloatArray,
    cycle_s: FloatArray,
) -> BoolArray:
    """Which prompts start, of those with ``left`` tokens and ``encode_s`` each [n] in their order, [n].

    Those that need no headroom do. The others, whose groups end at ``ends``, are judged one group after the
    other: there must be the headroom that the least demanding one has ``needed`` [n]. A group that has to
    wait keeps back smaller ones, of fewer than ``enough`` tokens, that need as much. The further arrays are
    those of ``Interference`` and ``Stakes``."""
    starts = needed == 0.0
    judged = np.flatnonzero(~starts)
    joining, tokens, encoders_s = int(starts.sum()), int(left[starts].sum()), float(encode_s[starts].sum())
    closed, first = math.inf, 0  # the least headroom that a group needs which waits
    for end in ends:
        group = judged[first:end]
        more, more_s, least = int(left[group].sum()), float(encode_s[group].sum()), float(needed[group].min())
        taken_s = one_prefill_s(tokens + more, sizes, seconds) + encoders_s + more_s
        room = headroom(left_s, iterations, cycle_s, joining + len(group), taken_s, len(group) // PER_LOST)
        if room < least or (least >= closed and more < enough):
            closed = min(closed, least) if len(group) > 1 else closed
        else:
            starts[group] = True
            joining, tokens, encoders_s = joining + len(group), tokens + more, encoders_s + more_s
        first = end
    return starts
