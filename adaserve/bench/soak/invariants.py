"""What must be true of the server as a whole. Pure functions: figures in, faults in words out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import theilslopes

from adaserve.bench.soak.tally import Tally
from adaserve.loadgen.server_metrics import REQUESTS, Samples

TOKENS = "adaserve:output_tokens_total"
GROWTH_MIB = 64.0
"""How much a process may grow after its warm-up."""
WARM_UP = 0.3
"""Share of the samples that belong to the warm-up: caches and heaps fill."""
MIN_SAMPLES = 20
"""With fewer samples after the warm-up memory is reported and not judged."""
LOG_WORDS = (
    "memory leak",
    "Scheduler hit an exception",
    "Traceback (most recent",
    "Child process",
)


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Resident memory of every process of the server at one time."""

    at_s: float
    mib: Mapping[str, float]  # by role


@dataclass(frozen=True, slots=True)
class Growth:
    """How the memory of one process changed after the warm-up."""

    role: str
    first_mib: float
    last_mib: float
    mib_per_hour: float  # Theil-Sen slope
    grown_mib: float  # the slope's lower 95% bound times the time
    judged: bool

    @property
    def fault(self) -> str | None:
        if not self.judged or self.grown_mib <= GROWTH_MIB:
            return None
        return (
            f"{self.role} grew by at least {self.grown_mib:.0f} MiB after its warm-up "
            f"({self.mib_per_hour:.0f} MiB per hour); {GROWTH_MIB:.0f} MiB are accepted"
        )


def process_fault(first: MemorySample, now: MemorySample) -> str | None:
    """Uvicorn replaces HTTP workers that die, so only their names tell."""
    if first.mib.keys() == now.mib.keys():
        return None
    gone, new = sorted(first.mib.keys() - now.mib.keys()), sorted(now.mib.keys() - first.mib.keys())
    return f"processes of the server ended: {', '.join(gone) or 'none'}; new ones: {', '.join(new) or 'none'}"


def memory_growth(samples: Sequence[MemorySample]) -> list[Growth]:
    """One entry for each process that lived through all samples."""
    late = samples[int(len(samples) * WARM_UP) :]
    roles = set.intersection(*(set(s.mib) for s in late)) if late else set()
    return [_growth(role, late) for role in sorted(roles)]


def _growth(role: str, late: Sequence[MemorySample]) -> Growth:
    at_s = np.array([s.at_s for s in late])
    mib = np.array([s.mib[role] for s in late])
    if len(late) < 2:
        return Growth(role, mib[0], mib[-1], 0.0, 0.0, False)
    slope, _, low, _ = theilslopes(mib, at_s)
    span_s = at_s[-1] - at_s[0]
    judged = len(late) >= MIN_SAMPLES
    return Growth(role, mib[0], mib[-1], slope * 3600, float(low * span_s), judged)


@dataclass(frozen=True, slots=True)
class ServerCounts:
    """What the server counted, by SLO class."""

    requests: Mapping[str, float]
    tokens: Mapping[str, float]
    failed: float

    @classmethod
    def of(cls, samples: Samples) -> ServerCounts:
        """From its Prometheus metrics."""
        requests: Counter[str] = Counter()
        tokens: Counter[str] = Counter()
        failed = 0.0
        for (name, labels), value in samples.items():
            at = dict(labels)
            if name == REQUESTS and at["objective"] == "all":
                requests[at["slo_class"]] += value  # type: ignore[assignment]
                failed += value if at["outcome"] == "failed" else 0
            elif name == TOKENS:
                tokens[at["slo_class"]] += value  # type: ignore[assignment]
        return cls(requests, tokens, failed)


def count_faults(before: ServerCounts, after: ServerCounts, tally: Tally) -> list[str]:
    """Whether the server's counters grew by what the clients counted. Both while nothing runs."""
    faults = []
    pairs: list[tuple[str, Mapping[str, float], Mapping[str, float], Counter[str], Counter[str]]] = [
        ("requests", before.requests, after.requests, tally.served, tally.maybe),
        ("output tokens", before.tokens, after.tokens, tally.served_tokens, tally.maybe_tokens),
    ]
    for what, old, new, sure, maybe in pairs:
        for name in sorted({*old, *new, *sure, *maybe}):
            grew = int(new.get(name, 0) - old.get(name, 0))
            low, high = sure[name], sure[name] + maybe[name]
            if not low <= grew <= high:
                due = f"{low}" if low == high else f"{low} to {high}"
                faults.append(f"class {name}: the server counted {grew} {what}, its clients {due}")
    if after.failed > before.failed:
        faults.append(f"the server gave up {after.failed - before.failed:.0f} requests")
    return faults


def snapshot_faults(snapshot: Mapping[str, Any], counts: ServerCounts) -> list[str]:
    """Whether the live page says the same as Prometheus."""
    faults = []
    for shown in snapshot["classes"]:
        name, there, here = shown["name"], shown["total_requests"], counts.requests.get(shown["name"], 0)
        if there != here:
            faults.append(f"class {name}: /slo says {there} requests, Prometheus {here:.0f}")
    return faults


def idle_faults(load: Mapping[str, Any]) -> list[str]:
    """``load``: a rank of ``/v1/loads``, after everything was answered and the prefix cache flushed."""
    return [
        f"{name} is {load[name]} in a server that has nothing to do"
        for name in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
        if load[name] != 0
    ]


def log_faults(new_text: str) -> list[str]:
    """Lines of the server's log that must not be there."""
    found = [line for line in new_text.splitlines() if any(word in line for word in LOG_WORDS)]
    return [re.sub(r"\s+", " ", line)[:300] for line in found]
