"""Client against server: attainment as both counted it, and why they judge single requests differently.

An AdaServe server sends its own verdict with every answer, so that the two are compared request by
request; its counters also hold the requests whose answers never arrived."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from adaserve.slo.metrics import RequestRecord

if TYPE_CHECKING:
    from adaserve.loadgen.report import Run

CLOSE = 0.05
"""When a request is this close to its SLO, client and server may judge it differently."""
SHOWN = 40
"""Requests that a report lists."""


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
    # The objective on which they disagree: the one that only the side that saw a miss missed.
    at_client = not record.met_ttft if not record.attained else _missed(verdict, "ttft")
    objective = "TTFT" if at_client and record.slo_ttft_ms is not None else "TPOT"
    key = objective.lower()
    return Flip(
        id=record.id,
        objective=objective,
        slo_ms=float((record.slo_ttft_ms if key == "ttft" else record.slo_tpot_ms) or 0.0),
        client_ms=ttft_ms if key == "ttft" else tpot_ms,
        server_ms=verdict[f"{key}_ms"],
        client_met=record.attained,
        server_met=bool(verdict["met"]),
        why=_why(record, verdict, key),
    )


def _missed(verdict: Mapping[str, Any], key: str) -> bool:
    time, slo = verdict[f"{key}_ms"], verdict[f"{key}_slo_ms"]
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


def agreement_rows(run: Run) -> list[dict[str, Any]]:
    """Attainment as the client and as the server counted it, per class, and why they differ; none without
    server counters.
    """
    server = run.summary.get("server")
    if not isinstance(server, Mapping):
        return []
    rows = []
    for name, c in run.summary["by_class"].items():
        theirs = server.get(name, {}).get("all") or {}
        if not theirs.get("requests") and run.verdicts[name].told:
            # The server counts them under "custom", as all that state milliseconds; the answers give the
            # class.
            told = run.verdicts[name]
            theirs = {"requests": told.told, "attainment": told.attainment}
        if theirs and theirs.get("attainment") is not None and c["slo_attainment"] is not None:
            verdicts = run.verdicts[name]
            rows.append(
                {
                    "run": run.label,
                    "name": name,
                    "client": c["slo_attainment"],
                    "server": theirs["attainment"],
                    "client_n": c["requests"],
                    "server_n": theirs["requests"],
                    "points": 100 * (c["slo_attainment"] - theirs["attainment"]),
                    "why": "; ".join(_differences(run, name, theirs["requests"])),
                    "told": verdicts.told,
                    "gap": verdicts.gap,
                    "ttft_gap_ms": verdicts.ttft_gap_ms,
                    "undecided": verdicts.undecided,
                    "flips": len(verdicts.flips),
                }
            )
    return [*rows, _together(rows)] if len(rows) > 1 else rows


def _together(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The classes of a run as one row."""
    client_n, server_n = sum(r["client_n"] for r in rows), sum(r["server_n"] for r in rows)
    client = sum(r["client"] * r["client_n"] for r in rows) / client_n
    server = sum(r["server"] * r["server_n"] for r in rows) / server_n
    return {
        "run": rows[0]["run"],
        "name": "all",
        "client": client,
        "server": server,
        "client_n": client_n,
        "server_n": server_n,
        "points": 100 * (client - server),
        "why": "",
        "told": sum(r["told"] for r in rows),
        "gap": None,
        "ttft_gap_ms": None,
        "undecided": sum(r["undecided"] for r in rows),
        "flips": sum(r["flips"] for r in rows),
    }


def flip_rows(run: Run) -> list[dict[str, Any]]:
    """The requests of a run that were judged differently, at most SHOWN."""
    rows = [
        {"run": run.folder.name, "name": name, "flip": f} for name, v in run.verdicts.items() for f in v.flips
    ]
    return rows[:SHOWN]


def _differences(run: Run, name: str, server_n: int) -> list[str]:
    """What the records of a class hold that client and server may count differently."""
    c, arrays, verdicts = run.summary["by_class"][name], run.arrays[name], run.verdicts[name]
    close = np.abs(arrays["ratio"] - 1) <= CLOSE
    if isinstance(c["slo_ttft_ms"], int | float):
        close |= np.abs(arrays["ttft"] * 1e3 / c["slo_ttft_ms"] - 1) <= CLOSE
    found = {
        "judged differently, see below": len(verdicts.flips),
        f"within {CLOSE:.0%} of their SLO": int(close.sum()),
        "failed at the client": c["failed"],
        "more at the server: warm-up, hung up late, or other clients": server_n - c["requests"],
        "never counted by the server: turned away or aborted": c["requests"] - server_n,
    }
    return [f"{n} {what}" for what, n in found.items() if n > 0]
