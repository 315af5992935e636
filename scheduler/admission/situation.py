"""What a decision about prefills is based on: the settings, who waits, and who would be held up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from adaserve.scheduler.admission.gate_loops import each_prefill_s
from adaserve.scheduler.admission.interference import Interference
from adaserve.scheduler.averages import FloatOrArray
from adaserve.scheduler.interface import BoolArray, FloatArray, IntArray

Order = Literal["fcfs", "slack", "short", "deadline"]
Pacing = Literal["fixed", "slack"]


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Settings of prefills. By default: no gate, first come first served, fixed chunks."""

    chunk_tokens: int = 512  # most prefill tokens per iteration
    order: Order = "fcfs"
    gate: float | None = None  # start prompts only while the tightest running SLO keeps this headroom
    lost_every_s: float | None = None  # gate: prompts are given up, one starts this often; None = never
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
    interference: Interference

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
        prefills_s = prefill_s(self.waiting.prompt_left, self.interference) + self.waiting.encode_s
        needs_s = self.interference.period_s + prefills_s
        late: BoolArray = ~self.waiting.started & (self.aims_s < self.now_s + needs_s)
        return late


def tpot_to_meet_s(tpot_slo_s: float, most_tokens: int) -> float:
    """The TPOT SLO of a request, inf if none is stated or if the answer has at most one token, and so no
    TPOT."""
    return math.inf if most_tokens <= 1 else tpot_slo_s


def first_token_due_s(arrival_s: FloatOrArray, ttft_slo_s: FloatOrArray, otherwise_s: float) -> FloatOrArray:
    """Arrival plus TTFT SLO, or plus ``otherwise_s`` where none is stated; of one request or [n]."""
    due: Any = arrival_s + np.where(np.isfinite(ttft_slo_s), ttft_slo_s, otherwise_s)
    return due


def prefill_s(tokens: IntArray, interference: Interference) -> FloatArray:
    """Seconds of prefills of ``tokens`` [n], each in as few chunks as possible.

    A prompt of a few tokens takes nearly as long as one of some dozens."""
    return each_prefill_s(tokens, interference.sizes, interference.seconds)


def until_read_s(situation: Situation, order: IntArray) -> FloatArray:
    """Seconds of prefill until each prompt of ``order`` is read, [len(order)], encoders included."""
    waiting = situation.waiting
    prefills_s = prefill_s(np.cumsum(waiting.prompt_left[order]), situation.interference)
    until_s: FloatArray = prefills_s + np.cumsum(waiting.encode_s[order])
    return until_s
