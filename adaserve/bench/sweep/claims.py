"""``results/README.md``: what the paper says, what the simulator says, what this host measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaserve.bench import markdown
from adaserve.bench.jsonl import read_lines
from adaserve.bench.sweep.aggregate import Results
from adaserve.bench.sweep.intervals import Interval
from adaserve.bench.sweep.plan import Point, SweepError
from adaserve.bench.sweep.systems import PLAIN, is_baseline

BEGIN, END = "<!-- sweep: begin -->", "<!-- sweep: end -->"
Runs = list[dict[str, Any]]


@dataclass(frozen=True)
class Claim:
    """One row of the table. The functions return a cell, empty where there is nothing to say."""

    what: str
    host: Callable[[Results], str] = lambda _: ""
    simulator: Callable[[Runs], str] = lambda _: ""
    paper: str = "-"


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
    path.write_text(f"{head}{BEGIN}\n{table(results, simulated(path.parent))}\n{END}{tail}", encoding="utf-8")


def table(results: Results, runs: Runs) -> str:
    """The table in Markdown."""
    name = results.store.folder.name
    lines = [
        f"Simulator: Llama-70B on four A100s, `*-simulation/paper/runs.jsonl`. This host: "
        f"[{name}]({name}/README.md), {results.head['host']['cores']} cores, "
        f"{results.head['server']['model']}; `{results.default}` is the default policy.",
        "",
        markdown.table(
            ("", "paper", "simulator", "this host"),
            ((c.what, c.paper, c.simulator(runs) or "-", c.host(results) or "-") for c in CLAIMS),
        ),
    ]
    return "\n".join(lines)


def simulated(folder: Path) -> Runs:
    """Cases of the newest simulation beside the file, with the policies of its ``limit`` that are not among
    them; none when there is no simulation."""
    found = sorted(folder.glob("*-simulation/paper/runs.jsonl"))
    if not found:
        return []
    runs = read_lines(found[-1])
    known = {r["policy"] for r in runs}
    limit = read_lines(found[-1].parents[1] / "limit" / "runs.jsonl")
    return runs + [r for r in limit if r["policy"] not in known]


# -- the simulator's cells -------------------------------------------------------------------------


def _by_workload(runs: Runs) -> dict[str, dict[str, Mapping[str, float]]]:
    """workload -> policy -> mean violations and goodput over seeds."""
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for r in runs:
        cells.setdefault((r["workload"], r["policy"]), []).append(r)
    table: dict[str, dict[str, Mapping[str, float]]] = {}
    for (workload, policy), rs in cells.items():
        table.setdefault(workload, {})[policy] = {
            k: sum(r[k] for r in rs) / len(rs) for k in ("violations", "token_goodput", "accept_length")
        }
    return table


def _simulated_ratio(policy: str, key: str) -> Callable[[Runs], str]:
    """The largest ratio to the best baseline over workloads on which the policy misses 1% or more."""

    def cell(runs: Runs) -> str:
        ratios = []
        for workload, policies in _by_workload(runs).items():
            rivals = [v for n, v in policies.items() if is_baseline(n)]
            if policy not in policies or not rivals or policies[policy]["violations"] < 0.01:
                continue
            if key == "violations":
                ratio = min(r[key] for r in rivals) / policies[policy][key]
            else:
                ratio = policies[policy][key] / max(r[key] for r in rivals)
            ratios.append((ratio, workload))
        if not ratios:
            return ""
        best = max(ratios)
        return f"`{policy}` {best[0]:.2f}x ({best[1].removeprefix('adaserve_')})"

    return cell


def _simulated_between(mine: str, theirs: str) -> Callable[[Runs], str]:
    def cell(runs: Runs) -> str:
        ratios = [
            p[theirs]["violations"] / p[mine]["violations"]
            for p in _by_workload(runs).values()
            if {mine, theirs} <= set(p) and p[mine]["violations"] >= 0.01
        ]
        return f"{min(ratios):.2f}x to {max(ratios):.2f}x above light load" if ratios else ""

    return cell


def _simulated_limit(runs: Runs) -> str:
    """Violations with what no policy can know, where ``priced`` misses most."""
    found = [
        (p["priced"]["violations"], p["clairvoyant"]["violations"], w)
        for w, p in _by_workload(runs).items()
        if {"priced", "clairvoyant"} <= set(p)
    ]
    if not found:
        return ""
    ours, limit, workload = max(found)
    return f"`priced` {ours:.1%}, told every outcome {limit:.1%} ({workload.removeprefix('adaserve_')})"


def _simulated_plain(runs: Runs) -> str:
    shares = [p[PLAIN]["violations"] for p in _by_workload(runs).values() if PLAIN in p]
    return f"{min(shares):.0%} to {max(shares):.0%}" if shares else ""


# -- this host's cells -----------------------------------------------------------------------------


def _loads(results: Results) -> list[Point]:
    return [p for _, p in results.on("load")]


def _times(value: float) -> str:
    """Of a ratio of violations, or of goodput, which is nan where the rival had none."""
    if math.isnan(value):
        return "-"
    return "no violations left" if math.isinf(value) else f"{value:.2f}x"


def _between(value: Interval) -> str:
    ends = f" [{value.low:.2f}, {value.high:.2f}]" if math.isfinite(value.low) else ""
    return f"{_times(value.value)}{ends}"


def _at_highest(key: str) -> Callable[[Results], str]:
    """Ratio to the best baseline at the highest load, for the default and for the published policy."""

    def cell(results: Results) -> str:
        points = _loads(results)
        if not points:
            return ""
        shown = []
        for policy in dict.fromkeys((results.default, "adaserve")):
            c = results.against_best(points[-1], policy)
            if c is not None:
                value = c.violations if key == "violations" else c.goodput
                shown.append(f"`{policy}` {_between(value)}")
        return ", ".join(shown) + (f" at load {points[-1].load:g}" if shown else "")

    return cell


def _best_ratio(key: str) -> Callable[[Results], str]:
    """The largest ratio of the default policy over all points at which it misses 1% or more."""

    def cell(results: Results) -> str:
        found = []
        for point in results.points():
            o = results.get(point, results.default)
            c = results.against_best(point, results.default)
            if o is not None and c is not None and o.attainment().value <= 0.99:
                value = c.violations if key == "violations" else c.goodput
                if math.isfinite(value.value):
                    found.append((value.value, point.id, _between(value)))
        _, where, ratio = max(found, default=(0.0, "", ""))
        return f"{ratio} ({where})" if ratio else ""

    return cell


def _light_load(results: Results) -> str:
    points = _loads(results)
    if not points:
        return ""

    cells = [results.against_best(points[0], p) for p in dict.fromkeys((results.default, "adaserve"))]
    told = (
        f"`{c.policy}` {c.points.value:+.1f} points against {c.rival}: {c.verdict}"
        for c in cells
        if c is not None
    )
    return ", ".join(told) + f" at load {points[0].load:g}"


def _most_accepted(results: Results) -> str:
    points = _loads(results)
    if not points:
        return ""
    here = results.at(points[-1])
    counted = {n: v for n, o in here.items() if (v := o.served("tokens_per_verification")) is not None}
    if not counted:
        return ""
    most = max(counted, key=lambda n: counted[n])
    best = max(here, key=lambda n: here[n].attainment().value)

    def tell(name: str) -> str:
        return f"`{name}` {counted[name]:.2f} tokens, {here[name].attainment().value:.0%} attained"

    return f"most: {tell(most)}; best: {tell(best) if best in counted else best}"


def _published(results: Results) -> str:
    cells = []
    for point in _loads(results):
        c = results.against(point, results.default, "adaserve")
        if c is not None and results.default != "adaserve":
            cells.append(f"{_between(c.violations)} at load {point.load:g}")
    return ", ".join(cells)


def _plain_violations(results: Results) -> str:
    shares = [1 - o.attainment().value for p in _loads(results) if (o := results.get(p, PLAIN)) is not None]
    return f"{min(shares):.0%} to {max(shares):.0%}" if shares else ""


def _baseline(results: Results) -> str:
    return f"{results.head['baseline_ms']:.1f} ms"


def _selection(results: Results) -> str:
    points = _loads(results)
    o = results.get(points[-1], results.default) if points else None
    share = None if o is None else o.selection_share()
    return "" if share is None else f"{share:.2%} of a decode iteration"


def _idle_plugin(results: Results) -> str:
    cells = []
    for key, what in (("tpot_ms", "the time per token of one request"), ("saturated_rps", "its throughput")):
        if idle := results.idle(key):
            cells.append(f"{_between(idle[2])} {what}")
    return ", ".join(cells)


CLAIMS = (
    Claim(
        "Fewer SLO violations than the best baseline, largest ratio",
        _best_ratio("violations"),
        _simulated_ratio("priced", "violations"),
        "up to 4.3x (EuroSys version, abstract)",
    ),
    Claim(
        "The same at the highest load", _at_highest("violations"), _simulated_ratio("adaserve", "violations")
    ),
    Claim(
        "Goodput over the best baseline, largest ratio",
        _best_ratio("goodput"),
        _simulated_ratio("priced", "token_goodput"),
        "up to 1.9x (EuroSys version, abstract)",
    ),
    Claim(
        "The same at the highest load", _at_highest("goodput"), _simulated_ratio("adaserve", "token_goodput")
    ),
    Claim("Light load", _light_load, paper="loses to plain speculation"),
    Claim(
        "Accepting more tokens is not attaining more",
        _most_accepted,
        paper="Spec(8) accepts most and attains least (Fig. 12)",
    ),
    Claim("Violations of plain decoding, over the loads", _plain_violations, _simulated_plain),
    Claim(
        "Our policy against the published rules: fewer violations",
        _published,
        _simulated_between("priced", "adaserve"),
    ),
    Claim("Violations at the limit", simulator=_simulated_limit),
    Claim(
        "Unloaded latency per token",
        _baseline,
        lambda _: "30 ms",
        "30 ms (Llama-3.1-70B), 28 ms (Qwen2.5-32B)",
    ),
    Claim("Selection", _selection),
    Claim("`none` against SGLang without speculation", _idle_plugin),
)
