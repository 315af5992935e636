"""What prefills cost the decoding requests, judged by recent iterations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adaserve.scheduler.admission.gate_loops import headroom
from adaserve.scheduler.averages import MovingAverage, blend
from adaserve.scheduler.costs.latency import Latency
from adaserve.scheduler.interface import FloatArray, IntArray, RunningBatch

NEWEST = 0.1
"""Weight of the newest iteration in the moving averages."""

HORIZON_TOKENS = 32
"""How far ahead a request's pace is trusted."""


@dataclass(frozen=True, slots=True)
class Stakes:
    """What running requests would lose if others joined; arrays of shape [m], for those m whose TPOT SLO can
    still be met."""

    left_s: FloatArray  # until the last token is due, if the request is not behind
    iterations: FloatArray  # until it comes
    cycle_s: FloatArray  # [k + 1], of an iteration with 0, 1, ..., k more requests

    def headroom(self, joining: int, prefill_s: float) -> float:
        """If ``joining`` more requests run, as ``scheduler/admission/gate_loops.py`` has it for the tightest
        one."""
        return headroom(self.left_s, self.iterations, self.cycle_s, joining, prefill_s, 0)


@dataclass(frozen=True, slots=True)
class Interference:
    """What prefills would cost the decoding requests, and how long they take."""

    slack_s: FloatArray  # [n] as ``stall_slack`` gives it
    period_s: float  # seconds of a decode iteration, prefills not included
    sizes: IntArray  # [k] chunk sizes on offer, rising
    seconds: FloatArray  # [k] predicted seconds of a prefill of that many tokens, rising
    stakes: Stakes
    decodes: int = 0  # decode iterations since the last chunk
    spent_s: float = 0.0  # seconds of prefill since the last decode iteration
    lost_wait_s: float = np.inf  # seconds since a lost prompt was started for having waited longest

    @property
    def worth_tokens(self) -> float:
        """Prompt tokens whose reading takes as long as the fixed cost of a forward."""
        if len(self.sizes) == 1:
            return 0.0
        token_s = float(self.seconds[-1] - self.seconds[0]) / float(self.sizes[-1] - self.sizes[0])
        return max(0.0, float(self.seconds[0]) / token_s - 1.0) if token_s > 0 else np.inf


class RecentWork:
    """Recent prefills and decode iterations: what a driver keeps for its next ``Interference``."""

    def __init__(self) -> None:
        self.decodes, self.spent_s = 0, 0.0  # as in ``Interference``
        self.lost_at_s = 0.0  # when a lost prompt was last started for having waited longest
        self.cycle_s = MovingAverage(NEWEST)  # from the end of an iteration to that of the next
        self._iteration_s = MovingAverage(NEWEST)  # of those without prefills in between
        self._requests = MovingAverage(NEWEST)  # per iteration
        self._verified = MovingAverage(NEWEST)  # tokens per verification
        self._pace = MovingAverage(NEWEST)
        self._paces: dict[str, float] = {}  # the same of each request of the last iteration

    @property
    def pace(self) -> float:
        """Tokens per request and iteration."""
        return max(1.0, self._pace.value)

    def prefilled(self, seconds: float) -> None:
        """A forward of prompts alone."""
        self.decodes, self.spent_s = 0, self.spent_s + seconds

    def decoded(
        self, rids: Sequence[str], new: IntArray, verified: float, chunk: int, cycle_s: float
    ) -> None:
        """An iteration of n requests: ``new`` [n] and ``verified`` tokens, ``chunk`` prompt tokens in its
        verification, and seconds as in ``IterationOutcome``."""
        if not chunk and not self.spent_s:
            self._iteration_s.add(cycle_s)
        self.cycle_s.add(cycle_s)
        self._requests.add(float(len(new)))
        self._verified.add(verified)
        self._pace.add(float(new.mean()))
        known, usual = self._paces, self.pace
        self._paces = {
            rid: blend(known.get(rid, usual), float(tokens), NEWEST)
            for rid, tokens in zip(rids, new.tolist(), strict=True)
        }
        self.decodes, self.spent_s = 0 if chunk else self.decodes + 1, 0.0

    def interference(
        self,
        latency: Latency,
        running: RunningBatch,
        joining: int,
        chunks: tuple[IntArray, FloatArray],
        now_s: float,
    ) -> Interference:
        """``joining``: the most requests whose start can be asked about. ``chunks``: sizes and seconds as in
        ``Interference``."""
        n = max(1, len(running))
        forward_s, longer_s = self._forwards_s(latency, n + np.arange(joining + 1))
        if self._iteration_s.value:
            period_s = max(self._iteration_s.value + float(longer_s[0]), float(forward_s[0]))
        else:
            period_s = latency.iteration_s(n, 0, 1, n)
        cycle_s = np.maximum((self.cycle_s.value or period_s) + longer_s, forward_s)
        pace = np.array([self._paces.get(rid, self.pace) for rid in running.rids])
        slack_s = stall_slack(running, now_s, pace, period_s)
        stakes = stakes_of(latency, running, now_s, self.pace, cycle_s)
        lost_wait_s = now_s - self.lost_at_s
        return Interference(slack_s, period_s, *chunks, stakes, self.decodes, self.spent_s, lost_wait_s)

    def _forwards_s(self, latency: Latency, requests: IntArray) -> tuple[FloatArray, FloatArray]:
        """Seconds of a verification for these numbers of requests [k], each with as many tokens as recently,
        and how much longer that is than with the recent number of requests, [k]. Averages need a dozen
        iterations to follow the batch: after it has shrunk they would still say that there is no room."""
        usual = self._requests.value or float(requests[0])
        each = self._verified.value / usual or 1.0  # not known: roots alone
        seconds = latency.verify_s(each * np.append(requests, usual))
        return seconds[:-1], seconds[:-1] - seconds[-1]


def stakes_of(
    latency: Latency, running: RunningBatch, now_s: float, pace: float, cycle_s: FloatArray
) -> Stakes:
    """What is at stake if requests join. ``pace``: tokens per request and iteration. ``cycle_s``: as in
    ``Stakes``, prefills in between included.

    A request that is ahead of its SLO has that time to spare. One that is behind counts as if it were on
    schedule: drafts help it to catch up, and if all prompts waited for that, they would miss their own SLOs.
    An SLO that a request could not meet even if it ran alone holds no prompt back."""
    slo_s, ahead = running.tpot_slo_s, running.tokens_ahead.astype(np.float64)
    known = np.isfinite(slo_s)
    slo_s, iterations = np.where(known, slo_s, 0.0), ahead / pace
    spare_s = running.decode_start_s + slo_s * running.decoded_tokens - now_s
    left_s = slo_s * ahead + np.maximum(spare_s, 0.0)
    at_stake = known & (left_s > iterations * latency.iteration_s(1, 0, 1, 1))
    return Stakes(left_s[at_stake], iterations[at_stake], cycle_s)


def stall_slack(running: RunningBatch, now_s: float, pace: FloatArray, period_s: float) -> FloatArray:
    """How long each request could stand still and still meet its TPOT SLO, seconds, [n].

    With o tokens decoded and L to come at ``pace`` [n] tokens per iteration of ``period_s``, the last one
    comes at now + L period / pace and is due at decode start + SLO (o + L); slack is the difference, at most
    ``HORIZON_TOKENS`` ahead. 0 for a request that is late but can still make it by its end, inf for one that
    can no longer meet its SLO or has none: sparing it gains nothing.
    """
    token_s = period_s / np.maximum(pace, 1e-6)
    slo = np.where(np.isfinite(running.tpot_slo_s), running.tpot_slo_s, 0.0)
    ahead_s = running.decode_start_s + slo * running.decoded_tokens - now_s
    left = running.tokens_ahead.astype(np.float64)
    at_end = ahead_s + left * (slo - token_s)
    near = ahead_s + np.minimum(left, HORIZON_TOKENS) * (slo - token_s)
    lost = (at_end < 0) & (near < 0)
    slack: FloatArray = np.where(lost | ~np.isfinite(running.tpot_slo_s), np.inf, np.maximum(near, 0.0))
    return slack
