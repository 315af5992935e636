"""Prefill and overload as policy: order, start, chunk size, and what to do with requests that are lost."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, Literal, TypeVar

import numpy as np

from adaserve.scheduler.averages import Numbers
from adaserve.scheduler.gate import group_ends, readings_s, starting
from adaserve.scheduler.interface import BoolArray, FloatArray, IntArray
from adaserve.scheduler.pressure import Pressure

Queued = TypeVar("Queued", bound=tuple[Any, ...])

Order = Literal["fcfs", "slack", "short", "deadline"]
Pacing = Literal["fixed", "slack"]

LEAST_HEADROOM = 0.8
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

LATER_S = 1e6
"""More than any wait, so that such a prompt comes after all others."""

GATE_CLAIM = 0.6
"""A prompt starts anyway when its prefill needs this share of the time that is left until its TTFT SLO."""

WASTE = 1.15
"""A token in a chunk that is worth a forward costs at most this many times one in the largest chunk."""

STARTING_ITERATIONS = 12
"""Iterations that pass between the decision that a prompt starts and its first token, beyond its prefill."""

MOST_WAITING = 64
"""A decision looks at this many prompts of the queue: of those that can be in time, the ones due first."""

MOST_LATE = 16
"""It also looks at this many prompts that will miss their TTFT SLO, those that have waited longest: more of
them change nothing."""


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Settings of prefills. By default: no gate, no shedding, first come first served, fixed chunks."""

    chunk_tokens: int = 512  # most prefill tokens per iteration
    order: Order = "fcfs"
    gate: float | None = None  # start prompts only while the tightest running SLO keeps this headroom
    lost_every_s: float | None = None  # gate: prompts are given up, one starts this often; None = never
    shed: bool = False  # answer 429 to requests whose TTFT SLO is already lost; off by default
    pacing: Pacing = "fixed"  # slack: chunks are as large as the running requests can bear
    least_tokens: int = 16  # slack: smaller chunks are not worth a forward; see ``least_chunk``, too
    most_decodes: int = 8  # slack: decode iterations after which a waiting prompt gets its next chunk
    spend: float = 0.4  # slack: share of the tightest request's slack used between two decode iterations
    patience_s: float = 3.0  # slack: TTFT to aim at for requests without a TTFT SLO
    late_share: float = 0.7  # slack: largest share of the time that prompts past their TTFT aim can claim

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be >= 1, got {self.chunk_tokens}")
        if self.order not in ("fcfs", "slack", "short", "deadline"):
            raise ValueError(f"order must be fcfs, slack, short or deadline, got {self.order!r}")
        if self.pacing not in ("fixed", "slack"):
            raise ValueError(f"pacing must be fixed or slack, got {self.pacing!r}")
        for name in ("least_tokens", "most_decodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if not 0 < self.spend <= 1:
            raise ValueError(f"spend must be in (0, 1], got {self.spend}")
        if not 0 < self.late_share < 1:  # a predicted wait is work / late_share
            raise ValueError(f"late_share must be in (0, 1), got {self.late_share}")
        if self.lost_every_s is not None and not self.lost_every_s > 0:
            raise ValueError(f"lost_every_s must be > 0, got {self.lost_every_s}")
        if self.lost_every_s is not None and self.order != "deadline":
            raise ValueError(f"lost_every_s goes with order deadline, got {self.order!r}")
        if not self.patience_s > 0:
            raise ValueError(f"patience_s must be > 0, got {self.patience_s}")


@dataclass(frozen=True, slots=True)
class WaitingBatch:
    """Requests whose prefill is not done; arrays of shape [n]."""

    arrival_s: FloatArray
    ttft_slo_s: FloatArray  # inf = none
    prompt_left: IntArray  # tokens still to be prefilled
    started: BoolArray  # part of the prompt is in the cache, or it was retracted after its first token
    tpot_slo_s: FloatArray  # inf = none to meet, see ``tpot_to_meet_s``
    encode_s: FloatArray  # beyond that of its tokens: of the encoders of its images, audio and video

    @property
    def has_tpot_slo(self) -> BoolArray:
        """Which prompts have a TPOT SLO to meet, [n]."""
        return np.isfinite(self.tpot_slo_s)

    @property
    def stated(self) -> BoolArray:
        """Which prompts state a TTFT SLO, [n]."""
        return np.isfinite(self.ttft_slo_s)


@dataclass(frozen=True)
class Situation:
    """What a decision about prefills is based on."""

    config: PrefillConfig
    waiting: WaitingBatch
    now_s: float
    pressure: Pressure

    @cached_property
    def aims_s(self) -> FloatArray:
        """When each first token should be out, [n]: by the TTFT SLO, or after ``patience_s``."""
        waiting = self.waiting
        return first_token_due_s(waiting.arrival_s, waiting.ttft_slo_s, self.config.patience_s)

    @cached_property
    def late(self) -> BoolArray:
        """Which prompts that have not started cannot have their first token out when it is due, [n]; none if
        no prompt is ever given up.

        Their prefill would come too late even if it were the next one. The time of an iteration is reserved
        for the first token's way to the client."""
        if self.config.lost_every_s is None:
            return np.zeros(len(self.aims_s), np.bool_)
        reading_s = prefill_s(self.waiting.prompt_left, self.pressure) + self.waiting.encode_s
        needs_s = self.pressure.period_s + reading_s
        late: BoolArray = ~self.waiting.started & (self.aims_s < self.now_s + needs_s)
        return late


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """What to prefill now: the rows of ``order`` until ``tokens`` are spent (0 = decode first). Rows of
    ``shed`` get 429. ``lost``: a lost prompt comes first this time, because it has waited longest.
    ``reserved``: how many of the tokens belong to prompts that overtake a started one.

    A lost prompt has had its turn even if there is no room for it. Otherwise it would come first until there
    is room, and no prompt that can still be in time could pass it. In the simulator, with little memory, a
    tenth of all requests would miss their SLOs because of that, and no prompt would wait less."""

    tokens: int
    order: IntArray
    shed: IntArray
    lost: bool = False
    reserved: int = 0


def least_chunk(sizes: IntArray, seconds: FloatArray) -> int:
    """Smallest of ``sizes`` [k] at which a token costs at most ``WASTE`` times that at the largest."""
    per_token_s = seconds / sizes
    return int(sizes[int(np.argmax(per_token_s <= WASTE * per_token_s[-1]))])


def tpot_to_meet_s(tpot_slo_s: float, most_tokens: int) -> float:
    """The TPOT SLO of a request, inf if none is stated or if the answer has at most one token, and so no
    TPOT."""
    return math.inf if most_tokens <= 1 else tpot_slo_s


def first_token_due_s(arrival_s: Numbers, ttft_slo_s: Numbers, otherwise_s: float) -> Numbers:
    """Arrival plus TTFT SLO, or plus ``otherwise_s`` where none is stated; of one request or [n]."""
    due: Any = arrival_s + np.where(np.isfinite(ttft_slo_s), ttft_slo_s, otherwise_s)
    return due


def prefill_s(tokens: IntArray, pressure: Pressure) -> FloatArray:
    """Seconds of prefills of ``tokens`` [n], each in as few chunks as possible.

    A prompt of a few tokens takes nearly as long as one of some dozens."""
    return readings_s(tokens, pressure.sizes, pressure.seconds)


def until_read_s(situation: Situation, order: IntArray) -> FloatArray:
    """Seconds of prefill until each prompt of ``order`` is read, [len(order)], encoders included."""
    waiting = situation.waiting
    reading_s = prefill_s(np.cumsum(waiting.prompt_left[order]), situation.pressure)
    until_s: FloatArray = reading_s + np.cumsum(waiting.encode_s[order])
    return until_s


def claimed_share(situation: Situation, order: IntArray) -> float:
    """Share of the time that prefills need for all of ``order`` (not empty) to be done in time; 0 to 1.

    Only a TTFT SLO that can still be met claims more than ``late_share``. An SLO for which even all of the
    time would be too little is lost already. The next decision comes after an iteration, so the time left by
    then counts.
    """
    waiting, pressure = situation.waiting, situation.pressure
    work_s = until_read_s(situation, order)
    left_s = situation.aims_s[order] - situation.now_s
    firm = waiting.stated[order] & (work_s <= left_s)
    later_s = left_s - pressure.period_s
    share = np.divide(work_s, later_s, out=np.full(len(order), np.inf), where=later_s > 0)
    return float(np.minimum(share, np.where(firm, 1.0, situation.config.late_share)).max())


def slack_tokens(situation: Situation, order: IntArray) -> int:
    """Size of the chunk that ``order`` (not empty) gets before the next decode iteration; 0 = decode first.

    As much as the tightest request can bear (``spend`` of its slack), or as much as the waiting prompts
    claim, whichever is more. A chunk that is too small to be worth a forward, or too small for a prompt that
    overtakes, waits until there is more, but for at most ``most_decodes`` iterations: a prompt always makes
    progress.
    """
    config, waiting, pressure = situation.config, situation.waiting, situation.pressure
    left = int(waiting.prompt_left[order].sum())
    sizes, seconds = pressure.sizes, pressure.seconds
    least_slack_s = float(np.min(pressure.slack_s, initial=np.inf))
    bearable_s = config.spend * (least_slack_s + pressure.spent_s)
    share = claimed_share(situation, order)
    rounds = max(1, pressure.decodes)
    claimed_s = pressure.period_s * rounds * share / (1 - share) if share < 1 else np.inf
    within = int(np.searchsorted(seconds, max(bearable_s, claimed_s) - pressure.spent_s, side="right"))
    tokens = min(int(sizes[within - 1]) if within else 0, config.chunk_tokens)
    beside = int(waiting.prompt_left[order[0]]) + 1 if _overtakes_first(waiting, order) else 0
    unsplit = unsplit_tokens(situation, order)
    worth_it = unsplit or max(config.least_tokens, least_chunk(sizes, seconds))
    least = max(min(worth_it, config.chunk_tokens), beside)
    if tokens < min(least, left):
        if pressure.decodes < config.most_decodes:
            return 0
        tokens = least
    if unsplit:
        return unsplit
    # As few chunks as that size needs, but equal ones: no forward for a few tokens at the end.
    if tokens < min(left, config.chunk_tokens):
        return max(beside, -(-left // -(-left // tokens)))
    return tokens


def ends_of_groups(situation: Situation, order: IntArray) -> IntArray:
    """Where the groups of ``order`` end. A group is prompts that follow each other and share a forward: until
    reading their tokens takes as long as the fixed cost of a forward, or no more fit whole into one. Lost
    prompts are never in a group with others, and fewer than ``PER_LOST`` prompts are judged one by one.

    On a GPU, where one prompt costs nearly what ten cost, a group is all that fit; on a CPU it is one."""
    waiting, enough = situation.waiting, situation.pressure.worth_tokens
    lost = (situation.late & waiting.stated)[order]
    return group_ends(waiting.prompt_left[order], lost, enough, situation.config.chunk_tokens)


def unsplit_tokens(situation: Situation, order: IntArray) -> int:
    """Tokens of the prompts of ``order`` that fit whole into a forward, if a chunk must end with one of them
    because two halves would cost more than they save. 0 = a chunk may end anywhere."""
    waiting, most = situation.waiting, situation.config.chunk_tokens
    if _overtakes_first(waiting, order):
        return 0
    ends = np.cumsum(waiting.prompt_left[order])
    whole = int(ends[ends <= most].max(initial=0))
    return whole if whole <= situation.pressure.worth_tokens else 0


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


def _overtakes_first(waiting: WaitingBatch, order: IntArray) -> bool:
    return bool(waiting.started[order].any() and not waiting.started[order[0]])


def reserved_tokens(waiting: WaitingBatch, order: IntArray, tokens: int) -> int:
    """The tokens of a chunk that belong to prompts which come before the started one and fit in beside it."""
    if not _overtakes_first(waiting, order):
        return 0
    ahead = order[: int(np.argmax(waiting.started[order]))]
    taken = np.cumsum(waiting.prompt_left[ahead])
    return int(taken[taken < tokens].max(initial=0))


def most_overdue(situation: Situation, order: IntArray) -> int | None:
    """The prompt of ``order`` that has been overdue longest, if none was started for this reason in the last
    ``lost_every_s``. A lost one must have been due for that long; one without a TTFT SLO has already been
    patient."""
    waiting, every_s = situation.waiting, situation.config.lost_every_s
    if not len(order) or every_s is None or situation.pressure.lost_wait_s < every_s:
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
    of ``LEAST_HEADROOM``, and once it is lost ``LOST_HEADROOM``. One without a TTFT SLO loses nothing by
    waiting, so it always waits for ``gate``.
    """
    config, waiting, pressure = situation.config, situation.waiting, situation.pressure
    if config.gate is None:
        return np.zeros(len(order), np.bool_)
    needed, stakes = needed_headroom(situation, order)[order], pressure.stakes
    ends = ends_of_groups(situation, order[needed > 0.0])
    starts = starting(
        waiting.prompt_left[order], waiting.encode_s[order], needed, ends, pressure.worth_tokens,
        pressure.sizes, pressure.seconds, stakes.left_s, stakes.iterations, stakes.cycle_s,
    )  # fmt: skip
    return ~starts


def needed_headroom(situation: Situation, order: IntArray) -> FloatArray:
    """The headroom that each prompt needs to start, [n]; 0: it does not wait. ``order``: first to last."""
    config, waiting, pressure = situation.config, situation.waiting, situation.pressure
    late, stated = situation.late, waiting.stated
    work_s = np.zeros(len(late))
    work_s[order] = until_read_s(situation, order)
    left_s = situation.aims_s - situation.now_s - STARTING_ITERATIONS * pressure.period_s
    can_wait = work_s < GATE_CLAIM * left_s
    least, gate = 0.0, np.full(len(late), config.gate)
    if config.lost_every_s is not None:
        least = min(1.0, LEAST_HEADROOM + HEADROOM_PER_LATE * int(np.count_nonzero(late)))
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


def rank_of(config: PrefillConfig, arrival_s: Numbers, ttft_slo_s: Numbers, prompt_left: Numbers) -> Numbers:
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
    in_time = sorted([*stated[lost : lost + MOST_WAITING], *patient[late : late + MOST_WAITING]])
    return [*in_time[:MOST_WAITING], *patient[: min(late, MOST_WAITING)], *stated[: min(lost, MOST_LATE)]]


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


def plan_prefill(situation: Situation, n_running: int) -> PrefillPlan:
    """Pure: the prefill share of one iteration of ``n_running`` requests.

    Started prompts go first (their KV slots are taken already), except that with the order ``deadline``
    others may overtake them.
    """
    config, waiting = situation.config, situation.waiting
    shed = config.shed & (situation.now_s - waiting.arrival_s > waiting.ttft_slo_s) & ~waiting.started
    order = in_order(situation)
    order = order[~shed[order]]
    overdue, ahead = None, 0  # tokens of the started prompts, which come before it
    if n_running:
        overdue = most_overdue(situation, order)
        order = order[~held_back(situation, order) | (order == overdue)]
        if overdue is not None:
            order = order[np.argsort((order != overdue) & ~waiting.started[order], kind="stable")]
            ahead = int(waiting.prompt_left[order[waiting.started[order]]].sum())
    elif config.gate is not None:
        order = first_to_start(situation, order)
    tokens = config.chunk_tokens if len(order) else 0
    if tokens and config.pacing == "slack":
        tokens = slack_tokens(situation, order) if n_running else unsplit_tokens(situation, order) or tokens
    reserved = reserved_tokens(waiting, order, tokens)
    lost = overdue is not None and ahead < tokens
    return PrefillPlan(tokens, order, np.flatnonzero(shed), lost, reserved)
