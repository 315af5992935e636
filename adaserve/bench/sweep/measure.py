"""One case: the load test, and what client and server counted."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from adaserve.bench.host_contention import HostContention
from adaserve.bench.sweep.plan import Case
from adaserve.host.description import git_sha
from adaserve.loadgen.bench import refuse_what_ended_early, run_bench
from adaserve.loadgen.config import BenchConfig, ClassLoad, Endpoint, TraceSpec
from adaserve.loadgen.results import iter_records
from adaserve.server import ServerProcess
from adaserve.slo.run_summary import RequestRecord, class_summaries, class_summary, run_duration_s
from adaserve.slo.trace import Trace, TraceRow

SILENCE_S = 45.0
"""A stream that is silent for this long has failed."""
_KEPT = (
    "requests", "completed", "failed", "attained", "slo_attainment", "slo_attainment_by_metric",
    "request_goodput", "token_goodput",
    "output_throughput", "request_throughput", "mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms",
    "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "accept_length", "slo_tpot_ms", "total_input_tokens",
    "total_output_tokens",
)  # fmt: skip


@dataclass(frozen=True)
class Traffic:
    """The requests of a point and seed, written to a trace file."""

    path: Path
    rows: tuple[TraceRow, ...]
    slo_ms: Mapping[str, float | None]  # TPOT; the rows have it too, and their TTFT SLO
    temperature: float
    seconds: float
    priorities: Mapping[str, int] | None = None  # of SGLang's scheduling; None = requests carry none
    stated_max_tokens: int | None = None  # None = exactly where the answers end

    @property
    def sha256(self) -> str:
        return Trace(self.rows).sha256

    @property
    def limit_s(self) -> float:
        """A case that takes longer than this is ended; requests without an answer then count as violated."""
        return 3.0 * self.seconds + 45.0

    def config(self, url: str, seed: int) -> BenchConfig:
        classes = {
            name: ClassLoad(
                name=name,
                tpot_ms=slo,
                temperature=self.temperature,
                priority=None if self.priorities is None else self.priorities[name],
            )
            for name, slo in self.slo_ms.items()
        }
        return BenchConfig(
            server=Endpoint(
                url=url, api="generate", ignore_eos=True, timeout_s=SILENCE_S, continuous_usage=False
            ),
            classes=classes,
            trace=TraceSpec(
                path=str(self.path),
                format="jsonl",
                slo_from="trace",
                stated_max_tokens=self.stated_max_tokens,
            ),
            duration_s=self.seconds + 1.0,
            seed=seed,
        )


def run_case(
    server: ServerProcess, case: Case, traffic: Traffic, work: Path
) -> tuple[dict[str, Any], list[RequestRecord]]:
    """Runs the block on a drained server; returns its line of ``cases.jsonl``, and its records.

    Raises KeyboardInterrupt, LoadgenError, httpx errors when the server is gone."""
    shutil.rmtree(work, ignore_errors=True)
    before = _report_of(server)
    started, start_s = datetime.now(UTC), time.monotonic()
    others = HostContention()
    with (
        time_limit(traffic.limit_s) as rang,
        open(os.devnull, "w") as nowhere,
        others.watched(),
    ):
        config = traffic.config(server.url, case.seed)
        summary = run_bench(config, work, console=Console(file=nowhere), checked=True)
    wall_s = time.monotonic() - start_s
    if not rang:
        refuse_what_ended_early(summary)
    after = _report_of(server)
    answers = settled(list(iter_records(work)), traffic.rows)
    shutil.rmtree(work, ignore_errors=True)
    line = {
        **case.names,
        "status": "timeout" if rang else "ok",
        "error": f"ended after {traffic.limit_s:.0f} s" if rang else None,
        "started": started.isoformat(timespec="seconds"),
        "wall_s": round(wall_s, 2),
        "git_sha": git_sha(),
        "trace_sha256": traffic.sha256,
        "offered_rps": round(len(traffic.rows) / traffic.seconds, 4),
        "slo_ms": {k: None if v is None else round(v, 4) for k, v in traffic.slo_ms.items()},
        "others": round(others.share, 4),
        "lag_p99_ms": summary["sched_lag_ms"]["p99"],
        "invalid_reasons": summary["invalid_reasons"],  # of the load test
        **case_figures(answers),
        "server": server_figures(before, after),
    }
    return line, answers


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[list[bool]]:
    """Interrupts what runs inside, as Ctrl-C would; the list that it gives is then not empty."""
    rang: list[bool] = []

    def ring(*_: object) -> None:
        rang.append(True)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield rang
    except KeyboardInterrupt:
        if not rang:
            raise
        raise TimeoutError(f"the load test did not end within {seconds:.0f} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def host_load() -> dict[str, float]:
    """How busy the machine is before anything is sent."""
    others = HostContention()
    with others.watched():
        time.sleep(0.4)
    return {
        "busy": round(others.share, 3),
        "load1": round(os.getloadavg()[0], 2),
    }


def settled(answers: Sequence[RequestRecord], rows: Sequence[TraceRow]) -> list[RequestRecord]:
    """One record per planned request: what was cut off or never sent has failed."""
    found = {}
    for r in answers:
        late = replace(r, error="not answered in time", met_ttft=False, met_tpot=False)
        found[r.id] = r if r.judged else late
    for index, row in enumerate(rows):
        found.setdefault(
            str(index),
            RequestRecord(
                id=str(index),
                slo_class=row.slo_class or "default",
                slo_ttft_ms=row.slo_ttft_ms,
                slo_tpot_ms=row.slo_tpot_ms,
                scheduled_s=row.arrival_s,
                sent_s=row.arrival_s,
                error="not answered in time",
            ),
        )
    return sorted(found.values(), key=lambda r: int(r.id))


def case_figures(answers: Sequence[RequestRecord]) -> dict[str, Any]:
    """Duration, figures of all requests and per class."""
    duration_s = run_duration_s(answers)
    return {
        "duration_s": round(duration_s, 4),
        "all": _kept(class_summary(answers, duration_s)),
        "classes": {name: _kept(c) for name, c in class_summaries(answers, duration_s).items()},
    }


def _kept(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {k: summary[k] for k in _KEPT}


Report = Mapping[str, Any]


def _report_of(server: ServerProcess) -> Report | None:
    """The server's counters; None from SGLang without AdaServe."""
    try:
        return server.report()
    except KeyError:
        return None


def server_figures(before: Report | None, after: Report | None) -> dict[str, Any] | None:
    """What the worker did between two reports: seconds per part, and means per iteration.

    ``draft``, ``verify``: in the models' forwards of decode iterations; ``select``; ``other``: what else
    these iterations took; ``prefill``: prefill forwards of both models, or what is left of them after the
    ``mixed`` iterations whose verification read prompts. ``loop_s``: mean time from the end of an iteration
    to that of the next, without prefills; what it has beyond the parts is spent outside the worker, on
    streaming. None without an AdaServe server."""
    if before is None or after is None:
        return None
    times = {k: v - before["times"][k] for k, v in after["times"].items()}
    sums = _iteration_sums(after)
    sums.subtract(_iteration_sums(before))
    n, rows = sums["iterations"], sums["running"]
    parts = {"draft": times["draft_s"], "select": sums["select_s"], "verify": times["target_s"]}
    seconds = {
        **parts,
        "other": max(0.0, sums["total_s"] - sum(parts.values())),
        "prefill": times["prefill_s"],
    }

    def per(value: float, count: float) -> float | None:
        return round(value / count, 5) if count else None

    return {
        "loop_s": round(times["loop_s"] / times["loops"], 6) if times["loops"] else None,
        "seconds": {k: round(v, 4) for k, v in seconds.items()},
        "iterations": round(times["iterations"]),
        "prefills": round(times["prefills"]),
        "mixed": round(times["mixed"]),
        "tokens_per_verification": per(sums["new_tokens"], rows),
        "tree_nodes": per(sums["verify_tokens"] - rows, rows),
        "drafted_nodes": per(sums["drafted_tokens"], rows),
        "expected_tokens": per(sums["expected_tokens"], rows),
        "depth": per(sums["depth"], n),
        "width": per(sums["width"], n),
        "budget": per(sums["budget"], n),
        "running": per(rows, n),
    }


def _iteration_sums(report: Report) -> Counter[str]:
    """Over all iterations since the server's start."""
    total: Counter[str] = Counter()
    for bucket in (report["stats"]["older"], *report["stats"]["buckets"]):
        total.update(iterations=bucket["iterations"], **bucket["sums"])
    return total
