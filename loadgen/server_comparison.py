"""Compares an AdaServe server's verdict on each request with what the client measured, and says why they
differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adaserve.slo.run_summary import RequestRecord

Gap = tuple[float, float, float]
"""5th percentile, median, 95th."""


@dataclass(frozen=True)
class Flip:
    """A request that client and server judged differently. Times in ms."""

    id: str
    objective: str  # TPOT or TTFT
    slo_ms: float
    client_ms: float | None
    server_ms: float | None
    client_met: bool
    server_met: bool
    why: str


@dataclass(frozen=True)
class Verdicts:
    """What the answers of one class said about themselves, beside what the client measured."""

    told: int  # requests whose answer carried the server's verdict
    met: int  # of them, met at the server
    flips: tuple[Flip, ...]
    gap: Gap | None  # client's TPOT / server's - 1
    ttft_gap_ms: Gap | None  # client's TTFT - server's
    undecided: int  # requests of which an SLO lies within that gap of the server's time

    @property
    def attainment(self) -> float | None:
        return self.met / self.told if self.told else None


def compare(records: Iterable[RequestRecord]) -> Verdicts:
    """Compares the records of one class with the verdicts that came with their answers."""
    told = [(r, r.server_slo) for r in records if r.server_slo is not None and r.judged]
    flips = tuple(_flip(r, s) for r, s in told if r.attained != s["met"])
    ratios = [
        r.tpot_s * 1e3 / s["tpot_ms"] - 1 for r, s in told if r.ok and r.tpot_s is not None and s["tpot_ms"]
    ]
    later = [r.ttft_s * 1e3 - s["ttft_ms"] for r, s in told if r.ok and r.ttft_s is not None and s["ttft_ms"]]
    gap, ttft_gap_ms = _gap(ratios), _gap(later)
    undecided = sum(_tpot_undecided(s, gap) or _ttft_undecided(s, ttft_gap_ms) for _, s in told)
    return Verdicts(len(told), sum(bool(s["met"]) for _, s in told), flips, gap, ttft_gap_ms, undecided)


def _gap(values: Sequence[float]) -> Gap | None:
    if not values:
        return None
    low, middle, high = np.percentile(values, (5, 50, 95)).tolist()
    return low, middle, high


def _tpot_undecided(verdict: Mapping[str, Any], gap: Gap | None) -> bool:
    """Whether the client may see the other side of the TPOT SLO, going by the usual gap."""
    tpot, slo = verdict["tpot_ms"], verdict["tpot_slo_ms"]
    if not tpot or not slo or gap is None:
        return False
    return bool(tpot * (1 + min(gap[0], 0)) <= slo <= tpot * (1 + max(gap[2], 0)))


def _ttft_undecided(verdict: Mapping[str, Any], gap_ms: Gap | None) -> bool:
    ttft, slo = verdict["ttft_ms"], verdict["ttft_slo_ms"]
    if not ttft or not slo or gap_ms is None:
        return False
    return bool(ttft + min(gap_ms[0], 0) <= slo <= ttft + max(gap_ms[2], 0))


def _flip(record: RequestRecord, verdict: Mapping[str, Any]) -> Flip:
    tpot_ms = None if record.tpot_s is None else record.tpot_s * 1e3
    ttft_ms = None if record.ttft_s is None else record.ttft_s * 1e3
    # The objective on which they disagree: the one that only the side that saw a miss missed. A request that
    # failed missed a TTFT SLO even if it had none.
    if record.attained:
        objective = "TTFT" if _missed_ttft(verdict) else "TPOT"
    else:
        objective = "TTFT" if not record.met_ttft and record.slo_ttft_ms is not None else "TPOT"
    key = objective.lower()
    own_ms = record.slo_ttft_ms if key == "ttft" else record.slo_tpot_ms
    return Flip(
        id=record.id,
        objective=objective,
        slo_ms=float(own_ms or verdict[f"{key}_slo_ms"] or 0.0),
        client_ms=ttft_ms if key == "ttft" else tpot_ms,
        server_ms=verdict[f"{key}_ms"],
        client_met=record.attained,
        server_met=bool(verdict["met"]),
        why=_why(record, verdict, key),
    )


def _missed_ttft(verdict: Mapping[str, Any]) -> bool:
    time, slo = verdict["ttft_ms"], verdict["ttft_slo_ms"]
    return time is not None and slo is not None and time > slo


def _why(record: RequestRecord, verdict: Mapping[str, Any], key: str) -> str:
    """One clause, from the first cause that applies."""
    slo_ms = record.slo_ttft_ms if key == "ttft" else record.slo_tpot_ms
    theirs = verdict[f"{key}_slo_ms"]
    if not record.ok:
        return f"it failed on its way to the client: {record.error}"
    if (theirs is None) != (slo_ms is None) or (theirs and slo_ms and abs(theirs / slo_ms - 1) > 1e-3):
        return f"the server judged it by {'no SLO' if theirs is None else f'an SLO of {theirs:g} ms'}"
    if key == "ttft":
        gap_ms = (record.ttft_s or 0.0) * 1e3 - (verdict["ttft_ms"] or 0.0)
        return f"{gap_ms:+.1f} ms on the way to the server's HTTP process, and from its first token back"
    made_ms = (verdict["tpot_ms"] or 0.0) * (record.output_tokens - 1)
    came_ms = ((record.last_token_s or 0.0) - (record.first_token_s or 0.0)) * 1e3
    later, first = record.output_tokens - record.first_chunk_tokens, record.first_chunk_tokens
    if first > 1:
        return (
            f"its first chunk held {first} tokens: the client measures the other {later} "
            f"({came_ms:.0f} ms), the server all after the first ({made_ms:.0f} ms)"
        )
    return f"{later} tokens were made in {made_ms:.1f} ms and arrived in {came_ms:.1f} ms"
