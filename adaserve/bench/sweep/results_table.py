"""``results/README.md``: what the paper says, what the simulator says, what this host measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from adaserve.bench import markdown
from adaserve.bench.jsonl import read_lines
from adaserve.bench.sweep.aggregate import Comparison, Results
from adaserve.bench.sweep.intervals import Interval
from adaserve.bench.sweep.plan import Point, SweepError
from adaserve.bench.sweep.systems import PLAIN, PUBLISHED, is_baseline
from adaserve.slo.run_summary import percent

BEGIN, END = "<!-- sweep: begin -->", "<!-- sweep: end -->"
Simulated = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Workload -> policy -> violations and goodput, means over the seeds."""


def fill_readme(path: Path, results: Results) -> None:
    """Writes the table between the marks of the file. Raises SweepError when they are missing."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SweepError(f"cannot read {path}: {error}") from error
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise SweepError(f"{path} needs the two lines {BEGIN} and {END}: the table goes between them")
    table = _table(results, simulated(path.parent))
    path.write_text(f"{head}{BEGIN}\n{table}\n{END}{tail}", encoding="utf-8")


def simulated(folder: Path) -> Simulated:
    """What the newest simulation in the folder found, with the policies that only its ``limit`` has; empty if
    there is none."""
    found = sorted(folder.glob("*-simulation/paper/runs.jsonl"))
    if not found:
        return {}
    runs = read_lines(found[-1])
    known = {r["policy"] for r in runs}
    limit = read_lines(found[-1].parents[1] / "limit" / "runs.jsonl")
    cells: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for r in (*runs, *(r for r in limit if r["policy"] not in known)):
        cells.setdefault(r["workload"], {}).setdefault(r["policy"], []).append(r)
    return {
        workload.removeprefix("adaserve_"): {
            policy: {key: sum(r[key] for r in rs) / len(rs) for key in ("violations", "token_goodput")}
            for policy, rs in policies.items()
        }
        for workload, policies in cells.items()
    }


def _table(results: Results, sim: Simulated) -> str:
    """In Markdown. Cells are empty if there is nothing to say."""
    name = results.store.folder.name
    loads = [p for _, p in results.on("load")]
    lowest, highest = loads[:1], loads[-1:]
    mine, rules = results.default, PUBLISHED[0]
    published = [(p, c) for p in loads if mine != rules and (c := results.against(p, mine, rules))]
    idle = (("tpot_ms", "the time per token of one request"), ("saturated_rps", "its throughput"))
    rows = (
        ("Fewer SLO violations than the best baseline, largest ratio",
         "up to 4.3x (EuroSys version, abstract)",
         _simulated_ratio(sim, "violations"),
         _largest(results, lambda c: c.violations)),
        ("The same at the highest load", "", "",
         _against_best(results, highest, lambda c: _shown(c.violations))),
        ("Goodput over the best baseline, largest ratio",
         "up to 1.9x (EuroSys version, abstract)",
         _simulated_ratio(sim, "token_goodput"),
         _largest(results, lambda c: c.goodput)),
        ("The same at the highest load", "", "",
         _against_best(results, highest, lambda c: _shown(c.goodput))),
        ("Light load", "loses to plain speculation", "",
         _against_best(results, lowest,
                       lambda c: f"{c.points.value:+.1f} points against {c.rival}: {c.verdict}")),
        ("Accepting more tokens is not attaining more",
         "Spec(8) accepts most and attains least (Fig. 12)", "",
         _most_accepted(results, highest)),
        ("Violations of plain decoding, over the loads", "",
         _range([p[PLAIN]["violations"] for p in sim.values() if PLAIN in p], ".0%"),
         _range([1 - o.attainment().value for p in loads if (o := results.get(p, PLAIN))], ".0%")),
        ("Our policy against the published rules: fewer violations", "",
         _simulated_published(sim),
         ", ".join(f"{_shown(c.violations)} at load {p.load:g}" for p, c in published)),
        ("Violations at the limit", "", _simulated_limit(sim), ""),
        ("Unloaded latency per token", "30 ms (Llama-3.1-70B), 28 ms (Qwen2.5-32B)", "30 ms",
         f"{results.head['baseline_ms']:.1f} ms"),
        ("Selection", "", "", _selection(results, highest)),
        (f"`{PLAIN}` against SGLang without speculation", "", "",
         ", ".join(f"{_shown(found[2])} {what}" for key, what in idle if (found := results.idle(key)))),
    )  # fmt: skip
    return (
        f"Simulator: Llama-70B on four A100s, `*-simulation/paper/runs.jsonl`. This host: "
        f"[{name}]({name}/README.md), {results.head['host']['cores']} cores, "
        f"{results.head['server']['model']}; `{mine}` is the default policy.\n\n"
    ) + markdown.table(("", "paper", "simulator", "this host"), ([c or "-" for c in row] for row in rows))


# -- the simulator's cells -------------------------------------------------------------------------


def _simulated_ratio(sim: Simulated, key: str) -> str:
    """The largest ratio to the best baseline that `priced` and the published rules have, over workloads on
    which they miss 1% or more."""
    told = []
    for policy in ("priced", "adaserve"):
        found = []
        for workload, policies in sim.items():
            rivals = [v[key] for n, v in policies.items() if is_baseline(n)]
            if rivals and policy in policies and policies[policy]["violations"] >= 0.01:
                mine = policies[policy][key]
                found.append((min(rivals) / mine if key == "violations" else mine / max(rivals), workload))
        if found:
            ratio, workload = max(found)
            told.append(f"`{policy}` {ratio:.2f}x ({workload})")
    return ", ".join(told)


def _simulated_published(sim: Simulated) -> str:
    pairs = [(p["priced"], p["adaserve"]) for p in sim.values() if {"priced", "adaserve"} <= set(p)]
    ratios = [b["violations"] / a["violations"] for a, b in pairs if a["violations"] >= 0.01]
    return f"{_range(ratios, '.2f', 'x')} above light load" if ratios else ""


def _simulated_limit(sim: Simulated) -> str:
    """Violations with what no policy can know, where ``priced`` misses most."""
    found = [
        (p["priced"]["violations"], p["clairvoyant"]["violations"], w)
        for w, p in sim.items()
        if {"priced", "clairvoyant"} <= set(p)
    ]
    ours, limit, workload = max(found, default=(0.0, 0.0, ""))
    return f"`priced` {ours:.1%}, told every outcome {limit:.1%} ({workload})" if found else ""


# -- this host's cells -----------------------------------------------------------------------------


def _range(values: Sequence[float], digits: str, unit: str = "") -> str:
    return f"{min(values):{digits}}{unit} to {max(values):{digits}}{unit}" if values else ""


def _shown(v: Interval) -> str:
    """A ratio of violations, or of goodput, which is nan if the rival had none."""
    if math.isnan(v.value):
        return "-"
    return "no violations left" if math.isinf(v.value) else f"{v.value:.2f}x{v.brackets('.2f')}"


def _against_best(results: Results, at: Sequence[Point], tell: Callable[[Comparison], str]) -> str:
    """The default and the published policy against the best baseline, at the one point that is given."""
    policies = dict.fromkeys((results.default, "adaserve"))
    found = [c for point in at for p in policies if (c := results.against_best(point, p))]
    told = ", ".join(f"`{c.policy}` {tell(c)}" for c in found)
    return f"{told} at load {at[0].load:g}" if found else ""


def _largest(results: Results, ratio: Callable[[Comparison], Interval]) -> str:
    """The default policy's largest ratio, over all points at which it misses 1% or more."""
    found = []
    for point in results.points():
        o, c = results.get(point, results.default), results.against_best(point, results.default)
        if o and c and o.attainment().value <= 0.99 and math.isfinite(ratio(c).value):
            found.append((ratio(c).value, point.id, _shown(ratio(c))))
    _, where, shown = max(found, default=(0.0, "", ""))
    return f"{shown} ({where})" if found else ""


def _most_accepted(results: Results, at: Sequence[Point]) -> str:
    here = results.at(at[0]) if at else {}
    counted = {n: v for n, o in here.items() if (v := o.served("tokens_per_verification")) is not None}
    if not counted:
        return ""
    most = max(counted, key=lambda n: counted[n])
    best = max(here, key=lambda n: here[n].attainment().value)

    def tell(name: str) -> str:
        return f"`{name}` {counted[name]:.2f} tokens, {percent(here[name].attainment().value, 0)}% attained"

    return f"most: {tell(most)}; best: {tell(best) if best in counted else best}"


def _selection(results: Results, at: Sequence[Point]) -> str:
    o = results.get(at[0], results.default) if at else None
    share = None if o is None else o.selection_share()
    return "" if share is None else f"{share:.2%} of a decode iteration"
