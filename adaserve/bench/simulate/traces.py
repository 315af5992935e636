"""Traces as the options of ``adaserve simulate`` name them."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from operator import attrgetter

from adaserve.scheduler.simulator.workload import synthetic_trace
from adaserve.slo.classes import PAPER_MIX
from adaserve.slo.trace import Trace, TraceError, assign_classes
from adaserve.slo.trace_formats import read_trace

DRAWN = "synthetic:"
"""Begins the name of a trace that is drawn and not read from a file."""


def read_workload(spec: str, seed: int) -> Trace:
    """A trace file, or ``synthetic:N:RPS[:BURST]`` (BURST: squared coefficient of variation of gaps). Rows
    get the paper's mix if none of them has a class or SLO."""
    if spec.startswith(DRAWN):
        requests, *rates = _numbers(spec)
        return synthetic_trace(int(requests), rates[0], seed, PAPER_MIX, *rates[1:])
    return _with_classes(read_trace(spec), seed)


def rate_rps(spec: str, trace: Trace) -> float:
    """Requests per second of what ``read_workload`` gave. For a drawn trace, the rate that was asked for:
    what is drawn differs by seed."""
    return _numbers(spec)[1] if spec.startswith(DRAWN) else trace.rps


def _numbers(spec: str) -> list[float]:
    """N, RPS and BURST of ``synthetic:N:RPS[:BURST]``, all above 0. Raises TraceError."""
    count, *rates = spec.split(":")[1:]
    try:
        numbers = [int(count), *map(float, rates)]
    except ValueError:
        numbers = []
    if len(numbers) not in (2, 3) or not all(0 < n < inf for n in numbers):
        raise TraceError(f"expected synthetic:N:RPS[:BURST], such as synthetic:100:2.5, not {spec!r}")
    return numbers


def read_recorded(specs: list[str], seed: int) -> Trace:
    """As ``read_workload``, or what several servers recorded, in the order in which requests finished."""
    if len(specs) == 1 and specs[0].startswith(DRAWN):
        return read_workload(specs[0], seed)
    return _with_classes(Trace.merged(read_trace(path, sort=True) for path in specs), seed)


def _with_classes(trace: Trace, seed: int) -> Trace:
    stated = attrgetter("slo_class", "slo_tpot_ms", "slo_x_baseline", "slo_ttft_ms")
    if all(stated(row) == (None,) * 4 for row in trace.rows):
        return replace(trace, rows=tuple(assign_classes(trace.rows, PAPER_MIX, seed)))
    return trace
