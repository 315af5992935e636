"""``report``: one self-contained HTML page, and PNGs, from the folders of one or several runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adaserve.loadgen import figures
from adaserve.loadgen.comparison_table import comparison_rows, flip_rows
from adaserve.loadgen.errors import LoadgenError
from adaserve.loadgen.run_folder import FloatArray, Run, value_or
from adaserve.slo.run_summary import attainment_stderr, percent


@dataclass(frozen=True)
class Group:
    """Runs with the same label (different seeds)."""

    label: str
    runs: Sequence[Run]

    def parts(self, name: str | None = None) -> list[Mapping[str, Any]]:
        """The summary of every run, or its part of one class; empty if a run does not have it."""
        return [r.summary if name is None else r.summary["by_class"].get(name, {}) for r in self.runs]

    def mean(self, key: str, name: str | None = None) -> float | None:
        """Mean over runs of a summary figure, of a class when ``name`` is given."""
        return _mean(part.get(key) for part in self.parts(name))

    def met(self, objective: str, name: str | None = None) -> float | None:
        """Mean over runs of the share that met one objective, ``tpot`` or ``ttft``."""
        return _mean(part.get("slo_attainment_by_metric", {}).get(objective) for part in self.parts(name))

    def error(self, key: str, name: str | None = None) -> float | None:
        """Standard error: over seeds if there are several. That of a share is at least the one that it has
        if requests are independent: two seeds may agree by chance."""
        found = [p for p in self.parts(name) if isinstance(p.get(key), int | float)]
        errors = []
        if len(found) > 1:
            errors.append(statistics.stdev(float(p[key]) for p in found) / math.sqrt(len(found)))
        if key == "slo_attainment" and found:
            met, n = (sum(p[what] for p in found) for what in ("attained", "requests"))
            errors.append(attainment_stderr(met, n) or 0.0)
        return max(errors, default=None)

    def percentile_ms(self, key: str, percent: float, name: str | None = None) -> float | None:
        """A percentile of ``tpot`` or ``ttft`` over the answered requests of all runs together."""
        names = class_names([self]) if name is None else [name]
        values = np.concatenate([np.zeros(0), *(self.pooled(n, key) for n in names)])
        finite = values[np.isfinite(values)]
        return 1e3 * float(np.percentile(finite, percent)) if len(finite) else None

    def pooled(self, name: str, key: str) -> FloatArray:
        return np.concatenate([r.arrays[name][key] for r in self.runs if name in r.arrays] or [np.zeros(0)])


def _mean(values: Iterable[Any]) -> float | None:
    """The mean of those values that are numbers; None if there are none."""
    known = [float(v) for v in values if isinstance(v, int | float)]
    return statistics.fmean(known) if known else None


def group_runs(runs: Sequence[Run]) -> list[Group]:
    labels = list(dict.fromkeys(r.label for r in runs))
    return [Group(label, [r for r in runs if r.label == label]) for label in labels]


def class_names(groups: Sequence[Group]) -> list[str]:
    return sorted({n for g in groups for r in g.runs for n in r.summary["by_class"]})


@dataclass(frozen=True)
class Chart:
    """One figure of the page."""

    name: str  # of the PNG file
    title: str
    figure: Any  # of matplotlib
    note: str = ""


def build_charts(groups: Sequence[Group]) -> list[Chart]:
    """All figures of the report."""
    names = class_names(groups)
    charts = [
        _attainment(groups, names),
        _goodput(groups, names),
        _cdf(groups, names, "ratio"),
        _cdf(groups, names, "ttft"),
        *(_timeline(g, names, number, len(groups) == 1) for number, g in enumerate(groups)),
    ]
    for chart in charts:
        chart.figure.suptitle(figures.as_it_is(chart.title))
    return charts


def _series(groups: Sequence[Group], names: Sequence[str | None], key: str) -> dict[str, list[Any]]:
    """Label -> (value, error) per class; None = all classes together."""
    nan = math.nan
    return {
        g.label: [(value_or(g.mean(key, n), nan), value_or(g.error(key, n), nan)) for n in names]
        for g in groups
    }


def _attainment(groups: Sequence[Group], names: Sequence[str]) -> Chart:
    targets = groups[0].runs[0].summary.get("class_targets", {})
    figure, (ax,) = figures.panels(width=7.2)
    shares = {k: [(100 * v, 100 * e) for v, e in row] for k, row in
              _series(groups, [*names, None], "slo_attainment").items()}  # fmt: skip
    figures.bars(ax, [*names, "all"], shares, lambda v: f"{percent(v / 100)}%")
    for i, name in enumerate(names):
        if name in targets:
            ax.hlines(100 * targets[name], i - 0.45, i + 0.45, linestyles="dashed", linewidth=1)
    ax.set(ylabel="requests that met all SLOs, %", ylim=(0, 108))
    figures.legend(figure, ax)
    several = any(len(g.runs) > 1 for g in groups)
    note = f"Error bars: standard error{' over seeds' if several else ', as if requests were independent'}."
    return Chart("attainment", "SLO attainment", figure, note + (" Dashed: target." if targets else ""))


def _goodput(groups: Sequence[Group], names: Sequence[str]) -> Chart:
    figure, (ax,) = figures.panels(width=7.2)
    figures.bars(ax, names, _series(groups, names, "token_goodput"), "%.1f")
    for bar, whole in zip(
        ax.patches, [g.mean("output_throughput", n) for g in groups for n in names], strict=True
    ):
        ax.plot([bar.get_x(), bar.get_x() + bar.get_width()], [whole, whole], color=bar.get_facecolor(), lw=1)
    ax.set(ylabel="tokens/s")
    figures.legend(figure, ax)
    return Chart(
        "goodput", "Goodput", figure, "Bars: tokens of requests that met all their SLOs. Lines: all tokens."
    )


def _cdf(groups: Sequence[Group], names: Sequence[str], key: str) -> Chart:
    """Cumulative distribution of TPOT / SLO ("ratio") or TTFT ("ttft"), per class and setting."""
    ratio = key == "ratio"
    figure, (ax,) = figures.panels(width=7.2)
    highest = [1.0] if ratio else [0.0]
    for k, g in enumerate(groups):
        for c, name in enumerate(names):
            values = np.sort(g.pooled(name, key))
            values = values[~np.isnan(values)]
            finite = values[np.isfinite(values)]
            if not len(finite):
                continue
            share = np.arange(len(finite) + 1) / len(values)
            line = k if len(groups) > 1 else c
            style = {"color": figures.color(c), "linestyle": figures.STYLES[line % len(figures.STYLES)]}
            label = name if len(groups) == 1 else f"{g.label}, {name}"
            shown = figures.as_it_is(label)
            ax.plot([finite[0], *finite], share, drawstyle="steps-post", label=shown, **style)
            highest.append(float(np.percentile(finite, 99.5)))
    ax.set(xlabel="TPOT / SLO" if ratio else "time to first token (s)", ylabel="share of requests",
           xlim=(0, max(highest) * 1.1 or 1.0), ylim=(0, 1.02))  # fmt: skip
    figures.percent(ax.yaxis)
    figures.legend(figure, ax, columns=3)
    if not ratio:
        return Chart("ttft", "Time to first token", figure)
    ax.axvline(1.0, color=figures.LIMIT, linestyle="--", linewidth=1)
    note = (
        "Left of the red line is in time. A curve ends below 100% when requests failed. "
        "Answers of one chunk count as 0, and requests without a TPOT SLO are left out."
    )
    return Chart("tpot-ratio", "TPOT against its SLO", figure, note)


def _timeline(group: Group, names: Sequence[str], number: int, single: bool) -> Chart:
    """Arrivals and attainment in equal slices of the run, of the group's first run."""
    run = group.runs[0]
    everything = np.concatenate([run.arrays[n]["scheduled"] for n in run.arrays])
    end = float(everything.max(initial=0.0)) or 1.0
    edges = np.linspace(0, end, int(min(40, max(5, len(everything) // 12))) + 1)
    middle, width = (edges[1:] + edges[:-1]) / 2, edges[1]
    figure, (ax,) = figures.panels(width=7.2)
    for c, name in enumerate(n for n in names if n in run.arrays):
        at, met = run.arrays[name]["scheduled"], run.arrays[name]["attained"]
        with np.errstate(invalid="ignore"):
            share = np.histogram(at, edges, weights=met)[0] / np.histogram(at, edges)[0]
        style = {"color": figures.color(c), "linestyle": figures.STYLES[c % len(figures.STYLES)]}
        ax.plot(middle, share, label=figures.as_it_is(f"{name} attainment"), marker=".", **style)
    arrivals = np.histogram(everything, edges)[0]
    peak = max(1, int(arrivals.max()))
    ax.plot(middle, arrivals / peak, drawstyle="steps-mid", lw=1, label="arrivals", color=figures.COLORS[-1])
    ax.set(xlabel="planned time (s)", ylabel="attainment", xlim=(0, end), ylim=(0, 1.02))
    figures.percent(ax.yaxis)
    figures.legend(figure, ax, columns=4)
    of_run = f" Of {run.folder.name}, the first of {len(group.runs)} runs." if len(group.runs) > 1 else ""
    return Chart(
        "timeline" if single else f"timeline-{number + 1}",
        "Timeline" if single else f"Timeline of {group.label}",
        figure,
        f"Slices of {width:.1f} s. Arrivals: 100% = {peak / width:.2f} requests/s.{of_run}",
    )


def write_report(runs: Sequence[Run], out: Path, png: bool = True) -> Path:
    """Writes ``report.html`` and the PNGs into ``out``; returns the page's path. Raises LoadgenError when
    that folder cannot be written."""
    groups = group_runs(runs)
    charts = build_charts(groups)
    page = _page(runs, groups, charts)
    path = out / "report.html"
    try:
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8", errors="replace")
        if png:
            for chart in charts:
                figures.save(chart.figure, out / f"{chart.name}.png")
    except OSError as e:
        raise LoadgenError(f"cannot write the report to {out} ({e.strerror or e}): give another --out") from e
    return path


def _page(runs: Sequence[Run], groups: Sequence[Group], charts: Sequence[Chart]) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("adaserve.loadgen", "")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    page: str = environment.get_template("report.html.j2").render(
        groups=groups,
        percent=percent,
        names=class_names(groups),
        having=lambda name: [g for g in groups if any(g.parts(name))],
        charts=[{"title": c.title, "note": c.note, "svg": figures.svg(c.figure)} for c in charts],
        runs=runs,
        models=list(dict.fromkeys(str(r.summary["model"]) for r in runs if r.summary.get("model"))),
        unsent=any(r.summary.get("never_sent") for r in runs),
        drafts=[(r.label, name, d) for r in runs for name, d in r.summary.get("learning", {}).items()],
        agreement=[row for r in runs for row in comparison_rows(r)],
        flips=[row for r in runs for row in flip_rows(r)],
        title=" against ".join(g.label for g in groups) if len(groups) <= 4 else f"{len(groups)} settings",
    )
    return page
