"""Tables of a sweep: ``summary.json``, ``README.md`` in its folder, a table for the terminal."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from adaserve.bench import markdown
from adaserve.bench.display import table
from adaserve.bench.host_contention import BUSY, SLOW
from adaserve.bench.sweep.aggregate import Comparison, Key, Outcome, Results
from adaserve.bench.sweep.figures import draw_all
from adaserve.bench.sweep.intervals import Interval
from adaserve.bench.sweep.plan import Point
from adaserve.bench.sweep.results_table import fill_readme
from adaserve.bench.sweep.store import Store
from adaserve.bench.sweep.systems import (
    GATE,
    PLAIN,
    PUBLISHED,
    STOCK,
    default_policy,
    is_rival,
    slo_aware,
)
from adaserve.bench.sweep.ttft import OTHER_RULE, TTFT_RULES
from adaserve.bench.sweep.tuning import chosen_text
from adaserve.config import PREFILLS
from adaserve.host.files import write_json
from adaserve.slo.run_summary import percent

_TIMES = (
    "mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms", "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms",
)  # fmt: skip


def write_all(store: Store, readme: Path | None, console: Console) -> list[str]:
    """Everything that follows from the records; returns what was written. Raises SweepError."""
    results = Results(store)
    write_json(store.folder / "summary.json", summary(results))
    figures = draw_all(results, store.folder)
    (store.folder / "README.md").write_text(_page(results, figures), encoding="utf-8")
    if readme is not None:
        fill_readme(readme, results)
    if (verdicts := _verdict_table(results)).row_count:  # the default policy may not have played yet
        console.print(verdicts)
    return ["README.md", "summary.json", *figures, *([str(readme)] if readme is not None else [])]


def summary(results: Results) -> dict[str, Any]:
    """One row per point and policy, comparisons, host; JSON values."""
    rows = []
    for point in results.points():
        for name, o in results.at(point).items():
            c = results.against_best(point, name)
            rows.append(
                {
                    "point": point.id,
                    "policy": name,
                    "seeds": list(o.seeds),
                    "requests": o.summary["requests"],
                    "offered_rps": o.mean("offered_rps"),
                    "attainment": o.attainment().to_json(),
                    "violations": round(1 - o.attainment().value, 5),
                    "attainment_tpot": o.attainment("met_tpot").to_json(),
                    "attainment_ttft": o.attainment("met_ttft").to_json(),
                    "attainment_by_class": {k: round(v, 5) for k, v in o.class_attainment().items()},
                    "goodput": o.goodput().to_json(),
                    "design_effect": [round(s.factor, 3) for s in (o.alone["attained"], o.apart)],
                    **{k: o.summary[k] for k in ("output_throughput", *_TIMES)},
                    "times_by_class": {n: {k: c[k] for k in _TIMES} for n, c in o.by_class.items()},
                    **{
                        k: o.served(k)
                        for k in ("tokens_per_verification", "tree_nodes", "depth", "running")
                    },
                    "seconds": {k: round(v, 3) for k, v in o.seconds().items()},
                    "timeouts": sum(case["status"] == "timeout" for case in o.cases),
                    "settings": sorted({case["setting"] for case in o.cases}),
                    "other_programs": o.mean("others"),
                    "against_best_baseline": None if c is None else _comparison(c),
                }
            )  # fmt: skip
    return {"schema_version": 2, "default_policy": results.default, "rows": rows}


def _comparison(c: Comparison) -> dict[str, Any]:
    return {
        "rival": c.rival,
        "points": c.points.to_json(),
        "violations_ratio": c.violations.to_json(),
        "goodput_ratio": c.goodput.to_json(),
        "verdict": c.verdict,
    }


_VERDICT = ("point", "attained", "best baseline", "points", "fewer violations", "goodput", "verdict")


def _verdicts(results: Results) -> list[tuple[str, ...]]:
    """The default policy against the best of the others as they are, point by point."""
    return [
        (p.id, _share(o.attainment()), c.rival, *_cells(c))
        for p in results.points()
        if (o := results.get(p, results.default)) is not None
        and (c := results.against_best(p, results.default)) is not None
    ]


def _verdict_table(results: Results) -> Table:
    """Without the intervals, for which a terminal is too narrow."""
    title = f"{results.default} against the best of the others, as they are"
    heads = [head.replace(" ", "\n") for head in _VERDICT]
    made = table(title, heads, left=("point", "best\nbaseline"))
    for cells in _verdicts(results):
        made.add_row(*(cell.partition(" [")[0] for cell in cells))
    return made


def _cells(c: Comparison) -> tuple[str, str, str, str]:
    return _points(c.points), _ratio(c.violations), _ratio(c.goodput), c.verdict


def _share(v: Interval) -> str:
    return f"{percent(v.value)}%"


def _points(v: Interval) -> str:
    return f"{v.value:+.1f}{v.brackets('+.1f')}"


def _ratio(v: Interval) -> str:
    if not math.isfinite(v.value):
        return "all" if math.isinf(v.value) else "-"
    return f"{v.value:.2f}x{v.brackets('.2f')}"


def _page(results: Results, figures: Mapping[str, str]) -> str:
    """``README.md`` of the folder: what was run, the verdicts, the numbers, the figures."""
    head = results.head
    every = {c.id for c in results.plan.cases()}
    finished, planned = len(every & set(results.lines)), len(every)
    host = head["host"]
    parts = [
        "# Sweep of policies on a real server",
        _intro(results),
        "```\n" + "\n".join(head["commands"]) + "\n```",
        f"Drawn again from the records by `adaserve bench sweep --plot-only FOLDER`. {finished} of {planned} "
        f"blocks are there. Host: {host['cpu']}, {host['cores']} cores, {host['memory_gib']} GiB; commit "
        f"{', '.join(_commits(results)) or host['git_sha']}; started {head['started']}.",
        "## Verdict",
        _verdict_text(results),
        *([markdown.table(_VERDICT, verdicts)] if (verdicts := _verdicts(results)) else []),
        *_judged(results, gated=False),
        *_judged(results, gated=True),
        *_one_by_one(results),
        *_stock(results),
        "## Figures",
        *(f"### {title}\n\n![{title}]({name})" for name, title in figures.items()),
        "## Numbers",
        *(
            f"### {_point_title(results, p)}\n\n{_numbers(results, p)}\n\n{_times_table(results, p)}"
            for p in results.points()
        ),
        *_troubles(results),
    ]
    return "\n\n".join(parts) + "\n"


def _commits(results: Results) -> list[str]:
    return list(dict.fromkeys(str(c["git_sha"]) for c in results.lines.values()))


def _intro(results: Results) -> str:
    head, plan = results.head, results.plan
    slos = next(iter(results.lines.values()))["slo_ms"]
    listed = ", ".join(f"{n} {'none' if v is None else f'{v:.1f} ms'}" for n, v in slos.items())
    rules = "; ".join(f"{n} {TTFT_RULES.get(n, OTHER_RULE)}" for n in slos)
    loops = ", ".join(f"{n} {v:.0%}" for n, v in head["prompts_that_do_not_loop"].items())
    source = f"Arrivals, lengths and classes of {plan.trace}" if plan.trace else "Poisson arrivals"
    server, seeds, prefill = head["server"], ", ".join(map(str, plan.seeds)), head["prefill"]
    lengths = chosen_text(results.lines)
    sentences = (
        f"{server['model']}; trees up to {server['max_depth']} deep.",
        f"Baseline {head['baseline_ms']:.2f} ms per token{_rounds(head, 'baseline_ms')}: one request, plain",
        "decoding, seen by its client.",
        f"Load 1 is {head['capacity_rps']:.2f} requests/s{_rounds(head, 'capacity_rps')}: what plain",
        "decoding serves here of 64 requests, at most 16 at a time.",
        "A request attains when it meets **both SLOs**.",
        f"TPOT: {listed} (first point). TTFT: {rules}; the prefill of a prompt takes",
        f"{prefill['fixed_ms']:.1f} ms + {prefill['per_token_ms']:.2f} ms per token on the idle host.",
        f"{source}; prompts {plan.prompt_scale:g} and",
        f"outputs {plan.output_scale:g} times as long as the paper's or the trace's.",
        f"Requests state max_tokens {plan.max_tokens}; answers end earlier, at lengths that no system knows."
        if plan.max_tokens
        else "Requests state exactly how long the answer is, and only `priced` and the gate look at it.",
        f"Blocks of {plan.seconds:g} s of arrivals, seeds {seeds}; all systems play a block, in random",
        "order, before the next one. Prompts are held-out text whose plain continuation does not loop",
        f"(share that passed: {loops}). Without +gate, only `{default_policy()}` has our prefills and gate.",
        f"Lengths, chosen on another seed: {lengths}." if lengths else "",
    )
    return " ".join(s for s in sentences if s)


def _rounds(head: Mapping[str, Any], name: str) -> str:
    """The range of the rounds whose median a figure is; empty if they do not differ, or there is one."""
    values = sorted(set(head.get("set_up_rounds", {}).get(name, ())))
    return f" ({values[0]:.2f} to {values[-1]:.2f} while it was measured)" if len(values) > 1 else ""


def _verdict_text(results: Results) -> str:
    found = [c for p in results.points() if (c := results.against_best(p, results.default)) is not None]
    sentences = (
        f"`{results.default}` against the best of the other systems as they are, chosen at each point by "
        "what it attained (so its luck counts for it)."
        if found
        else "",
        "Brackets are 90% intervals. A verdict says where the whole bracket of `points` lies: above 0 is",
        "better, below 0 is below, anything else is unclear.",
        _counted(found) if found else "",
        "`fewer violations`: the baseline's over ours.",
        "`goodput`: ours over that of the baseline with the highest goodput.",
        *(
            f"`{theirs}`, the published rules, is not among the others: {_counted(rows)}"
            for theirs in PUBLISHED
            if theirs != results.default
            and (rows := [c for p in results.points() if (c := results.against(p, results.default, theirs))])
        ),
    )
    return " ".join(filter(None, sentences))


def _counted(found: Sequence[Comparison]) -> str:
    count = {v: sum(c.verdict == v for c in found) for v in ("better", "unclear", "below")}
    return f"Of {len(found)} points: " + ", ".join(f"{n} {v}" for v, n in count.items()) + "."


def _judged(results: Results, gated: bool) -> list[str]:
    """Every rival at the highest load at which the best of them still attains a third."""
    point = results.judged(gated)
    if point is None:
        return []
    here, mine = results.at(point), results.default
    rows = [
        (n, *_objectives(o), *_cells(c)[:3])
        for n, o in here.items()
        if is_rival(n, gated) and (c := results.against(point, mine, n)) is not None
    ]
    if not rows or mine not in here or (gated and mine != default_policy()):  # which alone has our gate
        return []
    title = "with the same gate and prefills for all" if gated else "as they are"
    heads = ("system", "both SLOs", "TPOT alone", "TTFT alone", "points", "fewer violations", "goodput")
    return [
        f"Systems {title}, at {point.id}, the highest load at which the best of them attains a third:",
        markdown.table(heads, [(f"**{mine}**", *_objectives(here[mine]), "", "", ""), *rows]),
    ]


def _objectives(o: Outcome) -> tuple[str, str, str]:
    both, tpot, ttft = (_share(o.attainment(k)) for k in ("attained", "met_tpot", "met_ttft"))
    return both, tpot, ttft


def _one_by_one(results: Results) -> list[str]:
    """Ours against the published rules, as they are and with our gate, and against itself with other modes of
    prefills."""
    mine, parts = results.default, []
    for theirs in (*PUBLISHED, *(n + GATE for n in PUBLISHED), *(f"{mine}+{mode}" for mode in PREFILLS)):
        if theirs == mine:
            continue
        rows = [
            (p.id, *_cells(c))
            for p in results.points()
            if (c := results.against(p, mine, theirs)) is not None
        ]
        if rows:
            parts += [
                f"`{mine}` against `{theirs}`:",
                markdown.table(("point", "points", "fewer violations", "goodput", "verdict"), rows),
            ]
    return parts


def _stock(results: Results) -> list[str]:
    """What `none` costs beyond SGLang without speculation."""
    rows: list[tuple[str, ...]] = []
    for key, label in (("tpot_ms", "one request, ms per token"), ("saturated_rps", "saturated, requests/s")):
        if idle := results.idle(key):
            rows.append((label, f"{idle[0]:.2f}", f"{idle[1]:.2f}", _ratio(idle[2])))
    for point in results.plan.check_points:
        ours, stock = results.get(point, PLAIN), results.get(point, STOCK)
        if ours is not None and stock is not None:
            for key, label in (("mean_tpot_ms", "mean TPOT, ms"), ("mean_ttft_ms", "mean TTFT, ms")):
                x, y = (_mean(o, key, set(ours.blocks) & set(stock.blocks)) for o in (ours, stock))
                if x and y:
                    rows.append((f"{point.id}, {label}", f"{x:.1f}", f"{y:.1f}", f"{x / y:.2f}x"))
    if not rows:
        return []
    return [
        f"What the plugin costs when it does not speculate (`{PLAIN}` against SGLang without speculation on "
        "the same platform; idle and saturated: rounds in turns, medians; under load: blocks in turns on two "
        "servers):",
        markdown.table(("", PLAIN, "SGLang", "ratio"), rows),
    ]


def _mean(o: Outcome, name: str, keys: Collection[Key]) -> float | None:
    """The mean of a figure over the blocks with these ``keys``; None if there are none."""
    found = [v for c in o.cases if (c["seed"], c["block"]) in keys and (v := c["all"][name]) is not None]
    return sum(found) / len(found) if found else None


def _point_title(results: Results, point: Point) -> str:
    rates = [o.mean("offered_rps") or 0.0 for o in results.at(point).values()]
    return f"{point.id} ({rates[0]:.2f} requests/s)"


def _numbers(results: Results, point: Point) -> str:
    here = results.at(point)
    names = sorted({n for o in here.values() for n in o.class_attainment()})
    rows = []
    for policy, o in here.items():
        by_class = o.class_attainment()
        a, g = o.attainment(), o.goodput()
        rows.append(
            (
                f"**{policy}**" if slo_aware(policy) else policy,
                f"{percent(a.value)}{a.brackets('.0f', 100.0)}",
                *(percent(o.attainment(k).value, 0) for k in ("met_tpot", "met_ttft")),
                *("-" if n not in by_class else percent(by_class[n], 0) for n in names),
                f"{g.value:.0f}",
                *(_number(o.served(k), 2) for k in ("tokens_per_verification", "tree_nodes", "depth")),
                "-" if (share := o.selection_share()) is None else f"{share:.2%}",
            )
        )
    return markdown.table(
        (
            "system", "both %", "TPOT", "TTFT", *names, "goodput", "tokens/verify", "nodes", "depth",
            "selection",
        ),
        rows,
    )  # fmt: skip


def _times_table(results: Results, point: Point) -> str:
    """Milliseconds of all blocks together: the mean, and p99 of each class."""
    here = results.at(point)
    names = sorted({n for o in here.values() for n in o.by_class})
    rows = []
    for policy, o in here.items():
        cells = [f"**{policy}**" if slo_aware(policy) else policy]
        for kind, digits in (("tpot", 1), ("ttft", 0)):
            latest = (o.by_class.get(n, {}).get(f"p99_{kind}_ms") for n in names)
            cells += [_number(v, digits) for v in (o.summary[f"mean_{kind}_ms"], *latest)]
        rows.append(cells)
    late = [f"p99 {n}" for n in names]
    return markdown.table(("system", "TPOT ms", *late, "TTFT ms", *late), rows)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _troubles(results: Results) -> list[str]:
    """Cases that failed, were cut short or ran while the machine was busy or slow."""
    lines = []
    for case in results.store.cases().values():
        if case["status"] != "ok":
            lines.append(f"- {case['id']}: {case['status']}: {case['error']}")
            continue
        busy, lag, failed = case["others"], case["lag_p99_ms"] or 0.0, case["all"]["failed"]
        late = [f"requests left up to {lag:.0f} ms late (p99)"] if lag > 10 else []
        if failed:
            lines.append(f"- {case['id']}: {failed} of {case['all']['requests']} requests failed")
        if busy > BUSY:
            lines.append(
                f"- {case['id']}: other programs used {busy:.0%} of the machine, in the least disturbed of "
                f"{case['attempts']} attempts"
            )
        if case["slower"] > SLOW:
            lines.append(
                f"- {case['id']}: the machine was {case['slower']:.0%} slower than usual, in the least "
                f"disturbed of {case['attempts']} attempts"
            )
        # Older sweeps kept only the lag.
        lines += [f"- {case['id']}: {reason}" for reason in case.get("invalid_reasons", late)]
    return ["## Troubles", "\n".join(lines)] if lines else []
