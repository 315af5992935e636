"""The record of a soak: JSON for programs, one page of Markdown for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from adaserve.bench.markdown import table
from adaserve.bench.soak.invariants import GROWTH_MIB, Growth, MemorySample, memory_growth
from adaserve.bench.soak.tally import Tally
from adaserve.host.files import write_json

INVARIANTS = {
    "exact text": "greedy answers equal those of the unloaded server without speculation, byte for byte",
    "answers": "every answer is complete and well-formed, and its stream adds up",
    "statuses": "every status is the expected one",
    "slots": "at quiet points nothing runs, and the whole KV pool can be used and emptied",
    "counters": "Prometheus and /slo count the requests and tokens that clients counted, by class",
    "memory": f"no process grows by more than {GROWTH_MIB:.0f} MiB after its warm-up",
    "hang": "every probe and every request is answered within the deadline",
    "log": "the log shows no exception and no leak",
    "server": "the server and each of its processes live",
    "clients": "the soak's own clients live",
}


Record = dict[str, Any]
"""All that is written down; JSON values."""


def record_of(
    *,
    made: Mapping[str, Any],
    plan: Mapping[str, Any],
    tally: Tally,
    samples: Sequence[MemorySample],
    seconds: float,
    extra: Mapping[str, Any],
    interrupted: bool,
) -> Record:
    return {
        **made,
        "plan": dict(plan),
        "interrupted": interrupted,
        "seconds": round(seconds, 1),
        "requests": tally.total,
        "requests_per_s": round(tally.total / max(seconds, 1e-9), 1),
        "by_kind": dict(tally.requests.most_common()),
        "statuses": {str(k): n for k, n in sorted(tally.statuses.items())},
        "ends": dict(tally.ends.most_common()),
        "streams": tally.streams,
        "compared_with_reference": tally.compared,
        "sequences_by_class": dict(tally.served),
        "tokens_by_class": dict(tally.served_tokens),
        "unknown_ends_by_class": dict(tally.maybe),
        "slowest_answer_s": round(tally.slowest_s, 2),
        **extra,
        "memory": [_growth(g) for g in memory_growth(samples)],
        "memory_samples": len(samples),
        "violations": dict(tally.violated),
        "violation_details": [asdict(v) for v in tally.violations],
    }


def held(record: Record) -> bool:
    """Whether no invariant was violated."""
    return not record["violations"]


def _growth(growth: Growth) -> dict[str, Any]:
    return {k: round(v, 1) if isinstance(v, float) else v for k, v in asdict(growth).items()}


def write(record: Record, out: Path) -> None:
    """``soak.json`` and ``README.md`` in the folder."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "soak.json", record)
    (out / "README.md").write_text(markdown(record), encoding="utf-8")


def markdown(d: Record) -> str:
    """One page."""
    verdict = "All invariants held." if held(d) else "**Invariants were violated**; see below."
    stopped = " It was stopped before its time." if d["interrupted"] else ""
    lines = [
        "# Soak",
        "",
        f"{d['requests']:,} requests in {d['seconds'] / 60:.1f} minutes ({d['requests_per_s']}/s), seed "
        f"{d['plan']['seed']}, commit `{d['git_sha']}`, {d['cpu']}, {d['usable_cores']} cores.{stopped}",
        "",
        verdict,
        "",
        table(
            ("invariant", "what it says", "violations"),
            [(name, says, str(d["violations"].get(name, 0))) for name, says in INVARIANTS.items()],
        ),
        "",
        f"{d['compared_with_reference']:,} answers were compared with a reference; {d['streams']:,} were "
        f"streams. {d['quiet_points']} quiet points, {d['probes']} probes (longest {d['longest_probe_s']} s"
        f"), {d['policy_changes']} changes of policy or prefills, {d.get('retractions', 'unknown')} "
        f"retractions. Slowest answer: {d['slowest_answer_s']} s.{_learned(d.get('learning'))}",
        "",
        "## Requests",
        "",
        table(("kind", "requests"), [(k, f"{n:,}") for k, n in d["by_kind"].items()]),
        "",
        "Statuses: " + _counts(d["statuses"]) + ". Ends of sequences: " + _counts(d["ends"]) + ".",
        "",
        "## Memory after the warm-up",
        "",
        table(
            ("process", "first MiB", "last MiB", "MiB per hour", "judged"),
            [
                (
                    m["role"],
                    *(str(m[k]) for k in ("first_mib", "last_mib", "mib_per_hour")),
                    "yes" if m["judged"] else "too short",
                )
                for m in d["memory"]
            ],
        ),
        "",
        *_violations(d["violation_details"]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _learned(learning: Mapping[str, Any] | None) -> str:
    if learning is None:
        return ""
    last = f", the last time in {learning['swap_ms']:.1f} ms" if learning["swaps"] else ""
    return (
        f" The draft learned from {learning['requests']:,} requests and was swapped {learning['swaps']} times"
        f"{last}; {learning['rejected']} candidates were rejected."
    )


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def _violations(details: Sequence[Mapping[str, Any]]) -> list[str]:
    if not details:
        return []
    shown = [f"- **{v['invariant']}** {json.dumps(v['text'])[:900]}" for v in details[:20]]
    return ["## Violations", "", *shown, ""]
