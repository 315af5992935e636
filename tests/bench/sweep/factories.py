"""Finished sweeps without a server: made-up records in the real layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from adaserve.bench.jsonl import write_records
from adaserve.bench.sweep.measure import case_figures
from adaserve.bench.sweep.plan import Case, SweepPlan
from adaserve.bench.sweep.store import Store
from adaserve.bench.sweep.systems import family, with_length
from adaserve.slo.run_summary import RequestRecord

HEAD: dict[str, Any] = {
    "schema_version": 2,
    "kind": "bench sweep",
    "started": "2026-01-01T00:00:00+00:00",
    "commands": ["adaserve bench sweep --seconds 20"],
    "host": {"cpu": "a CPU", "cores": 2, "memory_gib": 24.0, "git_sha": "abc"},
    "server": {"model": "embedded pair", "max_depth": 6, "max_width": 3, "budget": None},
    "baseline_ms": 10.0,
    "capacity_rps": 5.0,
    "prefill": {"fixed_ms": 10.0, "per_token_ms": 1.0},
    "urgent": "coding",
    "prompts_that_do_not_loop": {"coding": 0.8, "chat": 1.0, "summarization": 0.9},
}
SLO_MS = {"coding": 12.0, "chat": 16.7, "summarization": 50.0}

TTFT_SLO_MS = 300.0

Tpot = Callable[[Case, int], float]


def request(
    index: int, at_s: float, name: str, tpot_ms: float, tokens: int = 41, ttft_s: float = 0.1
) -> RequestRecord:
    """An answered request; 41 tokens make the arithmetic easy."""
    last_s = at_s + ttft_s + tpot_ms / 1e3 * (tokens - 1)
    record = RequestRecord(
        id=str(index),
        slo_class=name,
        slo_ttft_ms=TTFT_SLO_MS,
        slo_tpot_ms=SLO_MS[name],
        scheduled_s=at_s,
        sent_s=at_s,
        first_token_s=at_s + ttft_s,
        last_token_s=last_s,
        prompt_tokens=20,
        output_tokens=tokens,
        end_s=last_s,
        accept_length=1.8,
    )
    record.judge()
    return record


def case_line(case: Case, records: list[RequestRecord], status: str = "ok") -> dict[str, Any]:
    return {
        **case.names,
        "setting": case.policy if family(case.policy) is None else with_length(case.policy, 4),
        "attempts": 1,
        "others": 0.01,
        "pace_ms": [10.0, 10.1],
        "slower": 0.01,
        "status": status,
        "error": None if status == "ok" else "because",
        "git_sha": "abc",
        "offered_rps": 5.0 * case.point.load,
        "slo_ms": SLO_MS,
        "lag_p99_ms": 1.0,
        **case_figures(records),
        "server": {
            "iterations": 300,
            "loop_s": 0.03,
            "seconds": {"draft": 1.0, "select": 0.01, "verify": 5.0, "other": 0.5, "prefill": 2.0},
            "tokens_per_verification": 1.5,
            "tree_nodes": 2.5,
            "depth": 2.0,
            "running": 3.0,
        },
    }


def finished_sweep(folder: Path, plan: SweepPlan, tpot_ms: Tpot, n: int = 60) -> Store:
    """A folder in which every case of the plan ran; ``tpot_ms(case, request)`` decides who is in time."""
    store = Store(folder)
    store.create()
    store.write_head({**HEAD, "plan": plan.to_json()})
    names = list(SLO_MS)
    (folder / "records").mkdir()
    for case in plan.cases():
        records = [
            request(i, plan.seconds * i / n, names[i % 3] if i % 5 > 2 else "coding", tpot_ms(case, i))
            for i in range(n)
        ]
        write_records(store.records_path(case.id), records)
        store.add(case_line(case, records))
    return store
