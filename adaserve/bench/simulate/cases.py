"""Grids of simulations: traces x loads x policies x seeds, with a table, bars and one record per request."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from adaserve.bench.jsonl import append_line, read_lines, write_records
from adaserve.bench.markdown import table
from adaserve.errors import why_not_new
from adaserve.loadgen.figures import bars, legend, panels, save
from adaserve.scheduler.simulator.played import iteration_log
from adaserve.scheduler.simulator.run import SimulationConfig, SimulationResult, simulate
from adaserve.scheduler.simulator.workload import TextModel, make_requests
from adaserve.slo.classes import SLOConfig
from adaserve.slo.run_summary import RequestRecord, summarize
from adaserve.slo.trace import Trace


@dataclass(frozen=True, slots=True)
class Case:
    """One simulation of a grid."""

    workload: str
    load: float  # arrivals per second
    policy: str  # label
    seed: int
    config: SimulationConfig
    trace: Trace

    @property
    def key(self) -> tuple[str, float, str, int]:
        """Its name in results, which its file of records has as well."""
        return self.workload, round(self.load, 3), self.policy, self.seed

    def settings(self, shared: Setting) -> str:
        """A hash of all that decides the outcome: two runs with the same one are equal."""
        with np.printoptions(threshold=sys.maxsize):
            text = repr((self.config, shared, self.trace.sha256))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Setting:
    """What all cases of a grid share."""

    slos: SLOConfig
    text: TextModel
    baseline_s: float


Row = dict[str, Any]
_ROWS = "runs.jsonl"
COMMAND = "command.txt"
"""The first file that is written into a folder of simulations."""


def run_case(
    case: Case, setting: Setting, progress: Callable[[int], None] | None = None
) -> tuple[Row, list[RequestRecord], SimulationResult]:
    """Simulates one case: a flat row of figures, the records, and the replicas with their logs. ``progress``
    gets how many requests have arrived."""
    requests = make_requests(case.trace, setting.slos, setting.baseline_s, setting.text, case.seed)
    result = simulate(requests, replace(case.config, seed=case.seed), progress)
    records = result.records()
    summary = summarize(
        records, meta={"seed": case.seed, "trace_sha256": case.trace.sha256, "policy": case.policy}
    )
    met_tpot = summary["slo_attainment_by_metric"]["tpot"]
    row: Row = {
        "workload": case.workload,
        "load_rps": round(case.load, 3),
        "policy": case.policy,
        "seed": case.seed,
        "settings": case.settings(setting),
        "violations": 1 - summary["slo_attainment"],
        "tpot_violations": 0.0 if met_tpot is None else 1 - met_tpot,
        **{f"violations_{name}": 1 - c["slo_attainment"] for name, c in summary["by_class"].items()},
        "mean_ttft_ms": summary["mean_ttft_ms"],
        "p99_ttft_ms": summary["p99_ttft_ms"],
        "mean_tpot_ms": summary["mean_tpot_ms"],
        "token_goodput": summary["token_goodput"],
        "output_throughput": summary["output_throughput"],
        "accept_length": summary["accept_length"],
        **_iteration_means(result),
        "summary": summary,
    }
    return row, records, result


def _iteration_means(result: SimulationResult) -> Row:
    logs = [iteration_log(r) for r in result.replicas]
    joined = {k: np.concatenate([log[k] for log in logs]) for k in logs[0]}
    if not len(joined["rows"]):
        return {"iterations": 0}
    means = {f"mean_{k}": float(joined[k].mean()) for k in ("rows", "depth", "verify", "seconds")}
    return {"iterations": len(joined["rows"]), **means}


def run_grid(
    cases: list[Case],
    setting: Setting,
    out: Path | None,
    progress: Callable[[int, Case], None],
    keep_records: bool,
) -> list[Row]:
    """Runs all cases one after the other; with ``out``, draws the first one, appends to ``runs.jsonl`` and
    skips what it holds. ``progress`` gets how many requests of all cases have arrived so far.

    The settings of those must be the same (``check_same_settings``)."""
    done = {_key(row): row for row in _known(out)}
    rows = []
    before = 0
    for i, case in enumerate(cases):
        say = partial(_say, progress, before, case)
        say(0)
        before += len(case.trace)
        if case.key not in done:
            row, records, result = run_case(case, setting, say)
            done[case.key] = row
            if out:
                if keep_records:
                    name = "-".join(map(str, case.key))
                    write_records(out / f"requests-{name}.jsonl.gz", records)
                if i == 0:
                    plot_timeline(result, out / "timeline.png")
                    plot_reliability(result, out / "reliability.png")
                append_line(out / _ROWS, row)  # last: it says that the case is done
        rows.append(done[case.key])
    return rows


def _say(progress: Callable[[int, Case], None], before: int, case: Case, arrived: int) -> None:
    progress(before + arrived, case)


def check_same_settings(cases: list[Case], setting: Setting, out: Path | None) -> None:
    """Results are not overwritten, and figures of other settings not taken for those of ``cases``. Raises
    ValueError if the folder, or the cases themselves, have a case of the same name that differs, and if
    the folder holds anything other than simulations."""
    if out and not (out / COMMAND).exists() and (why := why_not_new(out)) is not None:
        raise ValueError(why)
    known = {_key(row): row.get("settings") for row in _known(out)}
    for case in cases:
        if known.setdefault(case.key, settings := case.settings(setting)) != settings:
            workload, load, policy, seed = case.key
            raise ValueError(
                f"there are results of {workload} at {load:g} requests/s with {policy} and seed {seed} that "
                "have other settings: give another --out, or the policy another name, as in NAME=priced"
            )


def _known(out: Path | None) -> list[Row]:
    """The rows that the folder holds already."""
    return read_lines(out / _ROWS) if out else []


def _key(row: Row) -> tuple[Any, ...]:
    return row["workload"], row["load_rps"], row["policy"], row["seed"]


def aggregate(
    rows: list[Row], key: str = "violations"
) -> dict[tuple[str, float, str], tuple[float, float, int]]:
    """(mean, half the range over seeds, seeds) of ``key`` by workload, load and policy; nan if a seed lacks
    it."""
    groups: dict[tuple[str, float, str], list[float]] = {}
    for row in rows:
        groups.setdefault((row["workload"], row["load_rps"], row["policy"]), []).append(
            math.nan if row.get(key) is None else float(row[key])
        )
    return {k: (float(np.mean(v)), (max(v) - min(v)) / 2, len(v)) for k, v in groups.items()}


def markdown(rows: list[Row]) -> str:
    """Violations and TTFT per workload, load and policy as Markdown."""
    policies = list(dict.fromkeys(r["policy"] for r in rows))
    places = list(dict.fromkeys((r["workload"], r["load_rps"]) for r in rows))
    if len(places) == 1 and len(policies) > 6:
        return _one_place(rows, policies)
    lines: list[str] = []
    titles = {
        "violations": ("SLO violations, %", 100.0),
        "mean_ttft_ms": ("Mean TTFT, ms", 1.0),
        "p99_ttft_ms": ("p99 TTFT, ms", 1.0),
        "token_goodput": ("Goodput, tokens/s of requests that attained", 1.0),
    }
    for key, (title, scale) in titles.items():
        means = aggregate(rows, key)
        cells = [
            [workload, f"{load:g}", *(_cell(means.get((workload, load, p)), scale) for p in policies)]
            for workload, load in places
        ]
        lines += [f"### {title} (mean +- half range over seeds; no bar = one seed)", ""]
        lines += [table(["workload", "requests/s", *policies], cells), ""]
    return "\n".join(lines)


def _cell(found: tuple[float, float, int] | None, scale: float) -> str:
    """What ``aggregate`` found, times ``scale``; empty if there is nothing."""
    if found is None or math.isnan(found[0]):
        return ""
    mean, half, seeds = found
    return f"{mean * scale:.1f}" + (f" +- {half * scale:.1f}" if seeds > 1 else "")


def _one_place(rows: list[Row], policies: list[str]) -> str:
    """Many policies on one workload: a policy a line, mean +- half range over seeds."""
    names = sorted({name for row in rows for name in row["summary"]["by_class"]})  # a seed may lack one
    columns = {
        "violations": ("violations, %", 100.0),
        **{f"violations_{name}": (f"{name}, %", 100.0) for name in names},
        "mean_ttft_ms": ("mean TTFT, ms", 1.0),
        "p99_ttft_ms": ("p99 TTFT, ms", 1.0),
        "mean_tpot_ms": ("mean TPOT, ms", 1.0),
        "mean_verify": ("verify tokens", 1.0),
        "mean_depth": ("depth", 1.0),
    }
    means = {key: aggregate(rows, key) for key in columns}
    place = rows[0]["workload"], rows[0]["load_rps"]
    cells = [
        [
            policy,
            str(means["violations"][(*place, policy)][2]),
            *(_cell(means[key][(*place, policy)], scale) for key, (_, scale) in columns.items()),
        ]
        for policy in policies
    ]
    title = f"{place[0]}, {place[1]:g} requests/s; mean +- half range over the seeds"
    heads = ["policy", "seeds", *(head for head, _ in columns.values())]
    return f"{title}\n\n{table(heads, cells)}\n"


def plot_violations(rows: list[Row], path: Path) -> None:
    """Violations over load, one panel per workload (bars if each has one load); bars span the seeds."""
    means = aggregate(rows)
    places = list(dict.fromkeys((r["workload"], r["load_rps"]) for r in rows))
    workloads = list(dict.fromkeys(w for w, _ in places))
    policies = list(dict.fromkeys(r["policy"] for r in rows))
    if len(places) == len(workloads):
        figure, axes = panels(width=max(6.0, 0.45 * len(places) * len(policies)))
        none = (math.nan, math.nan, 0)
        series = {
            p: [(100 * v[0], 100 * v[1]) for place in places for v in [means.get((*place, p), none)]]
            for p in policies
        }
        bars(axes[0], [f"{w}\n{load:g} requests/s" for w, load in places], series, "%.0f")
    else:
        figure, axes = panels(len(workloads), width=4.2, height=3.6)
        for ax, workload in zip(axes, workloads, strict=True):
            for policy in policies:
                points = sorted((x, *v) for (w, x, p), v in means.items() if (w, p) == (workload, policy))
                if points:
                    x, mean, half, _ = map(np.array, zip(*points, strict=True))
                    ax.errorbar(x, 100 * mean, 100 * half, marker="o", ms=3, capsize=2, label=policy)
            ax.set(title=workload, xlabel="requests/s")
    axes[0].set_ylabel("SLO violations, %")
    legend(figure, axes[0])
    save(figure, path)


def plot_timeline(result: SimulationResult, path: Path) -> None:
    """Running requests, verify tokens, depth and seconds of each iteration of the first replica."""
    log = iteration_log(result.replicas[0])
    figure, axes = panels(width=8, height=1.75, rows=4)
    for ax, key in zip(axes, ("rows", "verify", "depth", "seconds"), strict=True):
        ax.plot(log["now_s"], log[key], lw=0.6)
        ax.set_ylabel(key)
    axes[-1].set_xlabel("simulated seconds")
    save(figure, path)


def plot_reliability(result: SimulationResult, path: Path) -> None:
    """Observed acceptance against the draft's claim, per class: on the diagonal it is calibrated."""
    calibrator = getattr(result.replicas[0].policy, "calibrator", None)
    figure, (ax,) = panels(width=4, height=4)
    ax.plot([0, 1], [0, 1], "k:", lw=0.8)
    for name, curve in (calibrator.reliability() if calibrator else {}).items():
        claimed, observed, tests = zip(*curve, strict=True)
        ax.scatter(claimed, observed, s=np.sqrt(np.asarray(tests)), label=name)
    ax.set(xlabel="draft probability", ylabel="accepted", title="one-step reliability")
    legend(figure, ax)
    save(figure, path)
