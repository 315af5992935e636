"""Writes records as they come, and keeps the few numbers that a live table needs.

Memory does not grow with the number of requests: a record is written and forgotten."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adaserve.host.files import write_atomically
from adaserve.slo.run_summary import RequestRecord

_BINS_PER_DECADE = 100  # 2.3% per bin
_LOWEST_MS = 0.01


@dataclass
class LogHistogram:
    """Counts of times in logarithmic bins, for percentiles to within 1.2%."""

    counts: dict[int, int] = field(default_factory=dict)
    n: int = 0

    def add(self, value_ms: float) -> None:
        key = round(math.log10(max(value_ms, _LOWEST_MS) / _LOWEST_MS) * _BINS_PER_DECADE)
        self.counts[key] = self.counts.get(key, 0) + 1
        self.n += 1

    def merge(self, counts: Iterable[tuple[int, int]]) -> None:
        """Adds the counts of another histogram."""
        for key, count in counts:
            self.counts[key] = self.counts.get(key, 0) + count
            self.n += count

    def percentile(self, p: float) -> float | None:
        """The value below which ``p`` percent of the samples lie, ms; None without samples."""
        left = math.ceil(self.n * p / 100)
        for key in sorted(self.counts):
            left -= self.counts[key]
            if left <= 0:
                return float(_LOWEST_MS * 10 ** (key / _BINS_PER_DECADE))
        return None


@dataclass
class ClassTally:
    """Running figures of one class."""

    requests: int = 0
    failed: int = 0
    attained: int = 0
    good_tokens: int = 0
    slo_tpot_ms: float | None = None
    tpot_sum_ms: float = 0.0
    tpot: LogHistogram = field(default_factory=LogHistogram)
    ttft: LogHistogram = field(default_factory=LogHistogram)

    def add(self, record: RequestRecord) -> None:
        self.slo_tpot_ms = record.slo_tpot_ms
        if not record.judged:
            return
        self.requests += 1
        self.failed += not record.ok
        if not record.ok:
            return
        if record.attained:
            self.attained += 1
            self.good_tokens += record.output_tokens
        if record.tpot_s is not None:
            self.tpot_sum_ms += record.tpot_s * 1e3
            self.tpot.add(record.tpot_s * 1e3)
        if record.ttft_s is not None:
            self.ttft.add(record.ttft_s * 1e3)

    @property
    def attainment(self) -> float | None:
        return self.attained / self.requests if self.requests else None

    def row(self, name: str) -> dict[str, Any]:
        """One line of a live table; JSON values."""
        return {
            "name": name,
            "requests": self.requests,
            "failed": self.failed,
            "slo_tpot_ms": self.slo_tpot_ms,
            "mean_tpot_ms": self.tpot_sum_ms / self.tpot.n if self.tpot.n else None,
            "p99_tpot_ms": self.tpot.percentile(99),
            "p50_ttft_ms": self.ttft.percentile(50),
            "attained": self.attained,
            "attainment": self.attainment,
            "good_tokens": self.good_tokens,
        }


class Recorder:
    """``requests.jsonl`` and ``progress.json`` of one run."""

    def __init__(self, out: Path, planned: int, warmup_s: float = 0.0) -> None:
        """The live table leaves out what is planned before ``warmup_s``, as the summary does."""
        self.out = out
        self.planned, self.warmup_s = planned, warmup_s
        self.finished = 0
        self.classes: dict[str, ClassTally] = {}
        self._file = open(out / "requests.jsonl", "w", encoding="utf-8")  # noqa: SIM115

    def add(self, record: RequestRecord, line: str | None = None) -> None:
        """Writes one record (``line``: its JSON, when it is at hand already). Raises OSError."""
        self._file.write((line if line is not None else record.to_json()) + "\n")
        self._file.flush()  # into the page cache: safe even when this process is killed
        self.finished += 1
        if record.scheduled_s >= self.warmup_s:
            self.classes.setdefault(record.slo_class, ClassTally()).add(record)

    def rows(self) -> list[dict[str, Any]]:
        """The live table: classes by name, then all of them together."""
        rows = [tally.row(name) for name, tally in sorted(self.classes.items())]
        counts = ("requests", "failed", "attained", "good_tokens")
        total = {key: sum(r[key] for r in rows) for key in counts}
        attainment = total["attained"] / total["requests"] if total["requests"] else None
        return [*rows, {"name": "all", **total, "attainment": attainment}]

    def write_progress(self) -> None:
        """Replaces ``progress.json``, which is not indented: that would take time from the streams."""
        data = {"planned": self.planned, "finished": self.finished, "by_class": self.rows()}
        with suppress(OSError):  # it is only for show
            write_atomically(self.out / "progress.json", json.dumps(data).encode())

    def close(self) -> None:
        """Nothing is left to be written but what could not be."""
        with suppress(OSError):
            self._file.close()
