"""What the scheduler process tells its statistics and its metrics: a finished request, a decode iteration."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from adaserve.slo.classes import SLO
from adaserve.slo.run_summary import within

STAGES = ("proposed", "verified", "accepted")
"""What is counted of the tokens of each source of drafts."""

READING = "drafts reading "
"""Before what is read of a context, in the names of sums."""


@dataclass(slots=True)
class FinishedRequest:
    """One answered (or failed) request, as the server saw it."""

    slo: SLO
    ttft_s: float | None
    tpot_s: float | None  # None when fewer than two tokens were generated
    output_tokens: int
    predicted_tpot_s: float | None = None  # when it arrived
    failed: bool = False
    iterations: int = 0  # decode iterations that it took part in
    stall_s: float = 0.0  # of its decode time, how much went into prefills of others
    retractions: int = 0
    mean_running: float = 0.0  # requests that decoded beside it, itself included

    @property
    def met_tpot(self) -> bool:
        return not self.failed and within(self.tpot_s, self.slo.tpot_s)

    @property
    def met_ttft(self) -> bool:
        slo_s = self.slo.ttft_s
        answered = slo_s == math.inf or (self.ttft_s is not None and within(self.ttft_s, slo_s))
        return not self.failed and answered

    @property
    def met(self) -> bool:
        return self.met_tpot and self.met_ttft

    @property
    def tpot_ratio(self) -> float | None:
        """TPOT / SLO; None without either."""
        if self.tpot_s is None or math.isinf(self.slo.tpot_s):
            return None
        return self.tpot_s / self.slo.tpot_s

    @property
    def prediction_error(self) -> float | None:
        """Predicted / delivered TPOT - 1; None without either, and for requests that failed."""
        if self.failed or self.predicted_tpot_s is None or not self.tpot_s:
            return None
        return self.predicted_tpot_s / self.tpot_s - 1


class IterationSample(msgspec.Struct):
    """One decode iteration."""

    running: int
    depth: int
    width: int
    budget: int
    verify_tokens: int  # roots included
    drafted_tokens: int  # candidates, kept or not
    new_tokens: int  # emitted by all requests
    expected_tokens: float  # what selection expected them to emit
    draft_s: float
    select_s: float
    verify_s: float
    total_s: float
    sources: dict[str, list[int]] = {}  # tokens that each proposed, and of these verified and accepted
    windows: dict[str, int] = {}  # requests that were drafted for, by what was read of their contexts
    gated: dict[str, list[float]] = {}
    """Prompts that the admission gate holds back, by class: how many, and seconds that the oldest waited."""
    queue: int = 0
    kv_use: float = 0.0  # share of the KV pool in use


class DraftScores(msgspec.Struct):
    """Expected accepted tokens of a chain of 4, by two drafts: means over requests of one class."""

    requests: int
    present: float
    first: float


class Judged(msgspec.Struct):
    """Expected accepted tokens of a chain of 4 of three drafts, on the same requests."""

    at: float  # epoch seconds
    candidate: float
    present: float
    first: float
    verdict: str  # "better", "worse", "undecided", or "first": the first draft serves again
    classes: dict[str, DraftScores] = {}


class DraftLearning(msgspec.Struct):
    """A draft that learns, since the server started."""

    trainer: str  # "starting", "running", "restarting" or, for good, "ended"
    judged: list[Judged] = []  # the newest ones, oldest first
    swaps: int = 0
    rejected: int = 0  # candidates that were worse, or could not be served
    swap_ms: float = 0.0  # of the last swap
    requests: int = 0  # that were learned from, and their tokens
    tokens: int = 0
    updates: int = 0
    cpu_s: float = 0.0  # that the trainer has used
    recorded: int = 0  # requests that were handed to the trainer
    dropped: int = 0  # requests for which there was no room
