"""The requests of a sweep: those of its blocks, and some like them for measurements outside of load tests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from adaserve.bench.client import Ask
from adaserve.bench.sweep.measure import Traffic
from adaserve.bench.sweep.plan import Case, Point, SweepPlan
from adaserve.bench.sweep.prompts import PromptPool
from adaserve.bench.sweep.systems import STOCK_PRIORITY
from adaserve.bench.sweep.ttft import PrefillTime
from adaserve.bench.sweep.workload import Workload, block_of, build_rows, seconds_of_work, with_slos
from adaserve.slo.classes import SLOConfig
from adaserve.slo.trace import TraceRow, write_jsonl
from adaserve.slo.trace_formats import read_trace

_SAMPLE = 300
"""Requests that say how much work a kind of traffic is."""

_read_trace = lru_cache(maxsize=16)(read_trace)


def load_workload(plan: SweepPlan, point: Point | None = None) -> Workload:
    """Classes, SLOs and trace of a plan, or of one of its points. Raises SLOError, TraceError."""
    slos = SLOConfig() if plan.slo_config is None else SLOConfig.load(plan.slo_config)
    path = plan.trace if point is None else plan.trace_of(point)
    trace = None if path is None else _read_trace(path)
    return Workload(slos, trace, plan.prompt_scale, plan.output_scale, plan.temperature)


@dataclass(frozen=True)
class Requests:
    """The requests of all blocks of a sweep."""

    plan: SweepPlan
    workload: Workload
    pool: PromptPool
    prefill: PrefillTime
    head: Mapping[str, Any]  # of the sweep: baseline, urgent class, capacity once it is known
    work: Path  # folder for schedules

    def asks(self, n: int) -> list[Ask]:
        """Requests as in the sweep, for measurements outside of load tests."""
        point = Point(self.plan.at)
        slos = self.workload.slo_ms(point, self.head["baseline_ms"])
        return [
            Ask(
                r.text or "",
                r.output_tokens,
                self.workload.temperature,
                r.slo_class,
                slos[r.slo_class or ""],
                stated_max_tokens=self.plan.stated_max_tokens,
            )
            for r in self._mix(point, n / 10.0, 10.0, 0x5EED)
        ]

    def _rows(self, point: Point, seed: int) -> tuple[TraceRow, ...]:
        """Requests of all blocks of a seed, with both SLOs."""
        blocks = self.plan.blocks_of(point)
        seconds = self.plan.seconds * blocks
        rate_rps = point.load * self.head["capacity_rps"] / self._work_of(point)
        rows = self._mix(point, rate_rps, seconds, seed, blocks)
        return with_slos(self._workload(point), rows, point, self.head["baseline_ms"], self.prefill)

    def _work_of(self, point: Point) -> float:
        """How much more a request of this kind of traffic takes than one of those that capacity was measured
        with: load is work, not requests."""
        if point.kind is None:
            return 1.0
        usual = self._mix(Point(point.load), 1.0, _SAMPLE, 0)
        outputs = sum(r.output_tokens for r in usual) / len(usual)
        token_s = (1.0 / self.head["capacity_rps"] - seconds_of_work(usual, self.prefill, 0.0)) / outputs
        here, there = (
            seconds_of_work(rows, self.prefill, max(0.0, token_s))
            for rows in (self._mix(point, 1.0, _SAMPLE, 0), usual)
        )
        return here / there

    def _workload(self, point: Point) -> Workload:
        return load_workload(self.plan, point) if point.kind else self.workload

    def _mix(
        self, point: Point, rate_rps: float, seconds: float, seed: int, blocks: int = 1
    ) -> tuple[TraceRow, ...]:
        return build_rows(
            self._workload(point), self.pool, point, rate_rps, seconds, seed, self.head["urgent"], blocks
        )

    def traffic(self, case: Case) -> Traffic:
        """The requests of a block, as a file."""
        rows = block_of(self._rows(case.point, case.seed), case.block, self.plan.seconds)
        path = self.work / "schedules" / f"{case.point.id}.s{case.seed}.b{case.block}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(rows, path)
        slo_ms = self._workload(case.point).slo_ms(case.point, self.head["baseline_ms"])
        return Traffic(
            path=path,
            rows=rows,
            slo_ms=slo_ms,
            temperature=self.workload.temperature,
            seconds=self.plan.seconds,
            priorities=by_urgency(slo_ms) if case.policy == STOCK_PRIORITY else None,
            stated_max_tokens=self.plan.stated_max_tokens,
        )


def by_urgency(tpot_slo_ms: Mapping[str, float | None]) -> dict[str, int]:
    """Priorities for SGLang's scheduling: the tighter the TPOT SLO of a class, the higher."""
    loosest_first = sorted(tpot_slo_ms, key=lambda n: -(tpot_slo_ms[n] or math.inf))
    return {name: k for k, name in enumerate(loosest_first)}
