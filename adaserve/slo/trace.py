"""Request traces: their form in memory, and the project's own file format.

The project's JSONL is Mooncake's, with SLO keys added: one object per line, sorted by ``timestamp``
(milliseconds from 0) with ``input_length, output_length`` and optionally ``session_id, slo_class,
slo_tpot_ms, slo_x_baseline, slo_ttft_ms, text_input, prompt_id``. ``trace_formats.py`` reads it, and public
formats besides.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from adaserve.errors import UserError
from adaserve.slo.classes import DEFAULT_CLASS, SLO, SLOConfig, SLOLimits, times_baseline
from adaserve.slo.resolve import resolve

EPOCH_S = 1e9
"""Later times are those of the epoch, as servers record them: no trace that starts at 0 takes 31 years."""


class TraceError(UserError, ValueError):
    """A trace that cannot be used; the message says where and what to change."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace."""

    arrival_s: float  # seconds from the start of the trace, >= 0
    prompt_tokens: int
    output_tokens: int  # generated length, or the generation cap if the trace has only that
    slo_class: str | None = None
    slo_tpot_ms: float | None = None
    slo_x_baseline: float | None = None  # TPOT SLO as a multiple of the unloaded latency per token
    slo_ttft_ms: float | None = None
    session_id: str | None = None  # rows of one session are turns of one conversation
    text: str | None = None
    prompt_id: str | None = None  # the same id = the same prompt text

    def slo(self, config: SLOConfig, baseline_s: float | None) -> SLO:
        """The row's objectives: its own milliseconds, its own multiple, then its class.

        Raises SLOError for an unknown class or when a needed baseline is unknown."""
        params: dict[str, Any] = {
            "slo_class": self.slo_class,
            "slo_tpot_ms": self.slo_tpot_ms,
            "slo_ttft_ms": self.slo_ttft_ms,
        }
        if self.slo_tpot_ms is None and self.slo_x_baseline is not None:
            name = self.slo_class or DEFAULT_CLASS
            params["slo_tpot_ms"] = times_baseline(self.slo_x_baseline, baseline_s, name) * 1e3
        # What clients may ask for now does not limit what was served.
        unlimited = config.model_copy(update={"limits": SLOLimits()})
        slo = resolve({}, params, unlimited).at(baseline_s)
        # A server files a client's own milliseconds under "custom"; a trace's classes are trusted.
        return slo if self.slo_class is None else replace(slo, slo_class=config.get(self.slo_class).name)


@dataclass(frozen=True)
class Trace:
    """Rows sorted by arrival, and where they came from."""

    rows: tuple[TraceRow, ...]
    source: str = ""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def is_recorded(self) -> bool:
        """Whether a server has written it (``request_log.py``): times are those of the epoch."""
        return bool(self.rows) and self.rows[0].arrival_s > EPOCH_S

    @property
    def duration_s(self) -> float:
        """Time of the last arrival."""
        return self.rows[-1].arrival_s if self.rows else 0.0

    @property
    def rps(self) -> float:
        """Mean arrival rate (n - 1 gaps over the time between first and last arrival)."""
        span = self.duration_s - self.rows[0].arrival_s if self.rows else 0.0
        return (len(self.rows) - 1) / span if span > 0 else 0.0

    @classmethod
    def merged(cls, traces: Iterable[Trace]) -> Trace:
        """All requests on one clock, from the first arrival on: what several servers recorded."""
        parts = list(traces)
        rows = sorted((row for trace in parts for row in trace.rows), key=lambda row: row.arrival_s)
        kept = tuple(replace(row, arrival_s=row.arrival_s - rows[0].arrival_s) for row in rows)
        return cls(kept, ", ".join(trace.source for trace in parts))

    def window(self, start_s: float, duration_s: float = math.inf) -> Trace:
        """The rows that arrive in [start, start + duration), with time counted from ``start_s``."""
        kept = [r for r in self.rows if start_s <= r.arrival_s < start_s + duration_s]
        return replace(self, rows=tuple(replace(r, arrival_s=r.arrival_s - start_s) for r in kept))

    def scaled(self, time_scale: float) -> Trace:
        """Arrival times multiplied by ``time_scale``: 2 = half the load."""
        if not 0 < time_scale < math.inf:
            raise TraceError(f"the time scale must be a positive number, not {time_scale}")
        return replace(self, rows=tuple(replace(r, arrival_s=r.arrival_s * time_scale) for r in self.rows))

    def at_rps(self, target_rps: float) -> Trace:
        """Stretched or squeezed to this mean rate; bursts keep their shape."""
        if self.rps == 0.0:
            raise TraceError("a trace with one arrival time has no rate to scale")
        return self.scaled(self.rps / target_rps)

    @property
    def sha256(self) -> str:
        """Hash of the content (not of the file), equal for equal rows."""
        digest = hashlib.sha256()
        for line in to_jsonl(self.rows):
            digest.update(line.encode())
        return digest.hexdigest()


def to_jsonl(rows: Iterable[TraceRow]) -> Iterator[str]:
    """The project's JSONL, line by line (with newlines). Times keep microseconds."""
    for r in rows:
        data: dict[str, Any] = {
            "timestamp": round(r.arrival_s * 1e3, 3),
            "input_length": r.prompt_tokens,
            "output_length": r.output_tokens,
        }
        for key, attribute in _OPTIONAL.items():
            if (value := getattr(r, attribute)) is not None:
                data[key] = value
        yield json.dumps(data, ensure_ascii=False) + "\n"


def write_jsonl(rows: Iterable[TraceRow], path: str | Path) -> None:
    """Writes the project's JSONL."""
    with open(path, "w", encoding="utf-8") as f:
        f.writelines(to_jsonl(rows))


_OPTIONAL = {
    "slo_class": "slo_class",
    "slo_tpot_ms": "slo_tpot_ms",
    "slo_x_baseline": "slo_x_baseline",
    "slo_ttft_ms": "slo_ttft_ms",
    "session_id": "session_id",
    "text_input": "text",
    "prompt_id": "prompt_id",
}


def assign_classes(rows: Iterable[TraceRow], mix: Mapping[str, float], seed: int) -> list[TraceRow]:
    """Gives each row without a class one drawn from ``mix`` (class -> weight), reproducibly."""
    names = list(mix)
    weights = np.array([mix[n] for n in names], float)
    rng = np.random.default_rng([seed, 0x5105])
    result = list(rows)
    drawn = rng.choice(len(names), size=len(result), p=weights / weights.sum())
    return [r if r.slo_class else replace(r, slo_class=names[k]) for r, k in zip(result, drawn, strict=True)]
