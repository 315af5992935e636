"""Figures of a sweep, after the paper's: one PNG each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from adaserve.bench.sweep.aggregate import Outcome, Results
from adaserve.bench.sweep.intervals import Interval
from adaserve.bench.sweep.plan import Point
from adaserve.bench.sweep.systems import GATE, PLAIN, default_policy, slo_aware
from adaserve.loadgen.figures import bars, color, legend, panels, percent, save
from adaserve.scheduler.interface import FloatArray
from adaserve.slo.run_summary import percent as as_percent

Curve = Callable[[Outcome], Interval]

_COLORS = {
    "none": "#8c8c8c", "sglang": "#8c8c8c", "sglang-priority": "#4d4d4d", "chain": "#67a9cf",
    "adaptive-verify": "#2f6fde", "urgency": "#b8a25a", "equal-greedy": "#c9a0dc", "global-greedy": "#8a4fd0",
    "turbospec": "#d9730d", "adaserve-v1": "#86c5a4", "adaserve": "#0d8f63", "priced": "#c0342b",
}  # fmt: skip
_MARKERS = "osv^D<>pPXh"
_PARTS = ("verify", "draft", "select", "prefill", "other")
_PART_COLORS = ("#2f6fde", "#67a9cf", "#c0342b", "#b8a25a", "#8c8c8c")
AXIS_LABELS = {
    "load": "offered requests/s",
    "share": "share of urgent requests",
    "scale": "SLO of urgent requests / baseline latency",
}


def draw_all(results: Results, folder: Path) -> dict[str, str]:
    """Writes every figure that has results; returns their titles, by file name."""
    makers: dict[str, tuple[str, Callable[[Results], Any]]] = {
        "attainment-load": (
            "Attainment of both SLOs, goodput and TTFT against request rate",
            partial(_against_x, axis="load"),
        ),
        "attainment-gate": (
            "The same, with the same gate and prefills for all",
            partial(_against_x, axis="load", gated=True),
        ),
        "objectives": ("Each SLO alone", _objectives),
        "attainment-kinds": ("Other kinds of traffic", _kinds),
        "attainment-share": ("Against the share of urgent requests", partial(_against_x, axis="share")),
        "attainment-scale": ("Against the SLO of urgent requests", partial(_against_x, axis="scale")),
        "violations-load": ("Violations per class", _violations),
        "accepted-tokens": ("Accepted tokens per verification", _accepted),
        "peaks": ("Classes that peak in turn", _peaks),
        "time-breakdown": ("Where the time goes", _breakdown),
        "ablation": ("All policies at the highest load", _ablation),
    }
    titles = {}
    for name, (title, make) in makers.items():
        figure = make(results)
        if figure is not None:
            titles[save(figure, folder / f"{name}.png").name] = title
    return titles


def color_of(policy: str, number: int) -> str:
    return _COLORS.get(policy.removesuffix(GATE), color(number))


def _bars(values: Sequence[Interval]) -> FloatArray:
    """Lengths of error bars, below and above; 0 without an interval."""
    ends = np.array([(v.value - v.low, v.high - v.value) for v in values]).T
    return np.nan_to_num(ends).clip(0)


def _lines(
    results: Results, axis: str, policies: Sequence[str], curves: Sequence[Curve], width: float
) -> Any:
    """A figure with a panel per curve, and its panels: in each a line per system over an axis."""
    figure, axes = panels(len(curves), width=width)
    for ax, of in zip(axes, curves, strict=True):
        for k, policy in enumerate(policies):
            found = [(x, o) for x, p in results.on(axis) if (o := results.get(p, policy)) is not None]
            values, aware = [of(o) for _, o in found], slo_aware(policy)
            ax.errorbar(
                [(o.mean("offered_rps") or x) if axis == "load" else x for x, o in found],
                [v.value for v in values], yerr=_bars(values), label=policy, color=color_of(policy, k),
                marker=_MARKERS[k % len(_MARKERS)], markersize=5, capsize=2, elinewidth=0.8,
                linewidth=2.2 if aware else 1.2, linestyle="-" if aware else "--", zorder=3 if aware else 2,
            )  # fmt: skip
        ax.set_xlabel(AXIS_LABELS[axis])
        if axis == "scale":
            ax.invert_xaxis()
    legend(figure, axes[0])
    return figure, axes


def _against_x(results: Results, axis: str, gated: bool = False) -> Any:
    """Attainment of both SLOs, goodput, and what they cost in TTFT; systems as they are, or with our gate."""
    policies = [p for p in results.policies(axis) if _shown(p, gated)]
    if not policies or (gated and not any(p.endswith(GATE) for p in policies)):
        return None
    curves = (Outcome.attainment, Outcome.goodput, _mean_ttft)
    figure, (left, middle, right) = _lines(results, axis, policies, curves, 4.6)
    left.set(ylabel="attainment of both SLOs", ylim=(0, 1.02))
    percent(left.yaxis)
    middle.set_ylabel("goodput (tokens/s of requests in time)")
    middle.set_ylim(bottom=0)
    right.set(ylabel="mean TTFT (ms)", yscale="log")
    return figure


def _shown(policy: str, gated: bool) -> bool:
    """Ours paces prefills anyway, so it is in both figures."""
    return policy == default_policy() or policy.endswith(GATE) == gated


def _mean_ttft(outcome: Outcome) -> Interval:
    return Interval(outcome.summary["mean_ttft_ms"] or math.nan)


def _objectives(results: Results) -> Any:
    """Each SLO alone and both, against load, for systems as they are."""
    policies = [p for p in results.policies("load") if _shown(p, False)]
    if not policies:
        return None
    titles = {"attained": "both", "met_tpot": "TPOT alone", "met_ttft": "TTFT alone"}
    curves = [partial(Outcome.attainment, objective=objective) for objective in titles]
    figure, axes = _lines(results, "load", policies, curves, 4.6)
    for ax, title in zip(axes, titles.values(), strict=True):
        ax.set(title=title, ylim=(0, 1.02))
        percent(ax.yaxis)
    axes[0].set_ylabel("attainment")
    return figure


def _kinds(results: Results) -> Any:
    """Attainment by kind of traffic and by trace."""
    points = [p for axis in ("kinds", "traces") for _, p in results.on(axis)]
    if not points:
        return None
    policies = list(dict.fromkeys(n for p in points for n in results.at(p)))
    figure, (ax,) = panels(1, width=max(6.0, 0.4 * len(points) * len(policies)))
    series = {
        n: [(math.nan if (o := results.get(p, n)) is None else 100 * o.attainment().value, math.nan)
            for p in points]
        for n in policies
    }  # fmt: skip
    colors = {n: color_of(n, k) for k, n in enumerate(policies)}
    bars(ax, [str(p.kind) for p in points], series, lambda v: as_percent(v / 100, 0), colors)
    ax.set_ylabel("attainment of both SLOs, %")
    legend(figure, ax)
    return figure


def _violations(results: Results) -> Any:
    """Violations per class against load."""
    policies = results.policies("load")
    names = sorted({n for o in results.outcomes.values() for n in o.class_attainment()})
    if not policies or not names:
        return None
    figure, axes = _lines(results, "load", policies, [partial(_missed, name=n) for n in names], 4.2)
    for ax, name in zip(axes, names, strict=True):
        ax.set(title=name, ylim=(-0.02, 1.02))
        percent(ax.yaxis)
    axes[0].set_ylabel("SLO violations")
    return figure


def _missed(outcome: Outcome, name: str) -> Interval:
    return Interval(1.0 - outcome.class_attainment().get(name, math.nan))


def _accepted(results: Results) -> Any:
    """Tokens per request and verification, and nodes of the verified trees, against load."""
    policies = [p for p in results.policies("load") if p != PLAIN]
    drafted = [o for _, p in results.on("load") for n, o in results.at(p).items() if n in policies]
    if all(o.served("tokens_per_verification") is None for o in drafted):
        return None
    labels = {
        "tokens_per_verification": "tokens per verification (bonus included)",
        "tree_nodes": "verified nodes per request (root left out)",
    }
    figure, axes = _lines(results, "load", policies, [partial(_served, key=k) for k in labels], 5.2)
    for ax, label in zip(axes, labels.values(), strict=True):
        ax.set_ylabel(label)
    return figure


def _served(outcome: Outcome, key: str) -> Interval:
    value = outcome.served(key)
    return Interval(math.nan if value is None else value)


def _peaks(results: Results) -> Any:
    """Arrivals and attainment over time while the classes peak in turn: `none`, the best baseline, ours."""
    if not (found := results.on("peaks")):
        return None
    point = found[0][1]
    here = results.at(point)
    rival = results.against_best(point, results.default)
    names = (PLAIN, rival.rival if rival else PLAIN, results.default)
    if not (shown := [n for n in dict.fromkeys(names) if n in here]):
        return None  # they have not played it yet, or are not among its systems
    figure, axes = panels(1 + len(shown), width=4.4)
    _timeline(results, point, shown[0], axes[0], arrivals=True)
    axes[0].set(title="arrivals", ylabel="requests/s")
    for ax, policy in zip(axes[1:], shown, strict=True):
        _timeline(results, point, policy, ax, arrivals=False)
        met = as_percent(here[policy].attainment().value, 0)
        ax.set(title=f"{policy}: {met}% in time", ylim=(0, 1.02))
        percent(ax.yaxis)
    axes[1].set_ylabel("attainment, by arrival")
    legend(figure, axes[0])
    return figure


def _timeline(results: Results, point: Point, policy: str, ax: Any, arrivals: bool) -> None:
    """Per class, over parts of a seed's blocks in their order."""
    plan, cases = results.plan, results.at(point)[policy].cases
    records = [
        (c["block"] * plan.seconds + r.scheduled_s, r) for c in cases for r in results.store.records(c["id"])
    ]
    parts = max(6, min(20, len(records) // 8))
    edges = np.linspace(0, plan.seconds * plan.blocks_of(point), parts + 1)
    # Of each part as many seconds as were played of it, by all seeds: a sweep may lack blocks.
    starts = [c["block"] * plan.seconds for c in cases]
    played_s = sum(np.diff(np.clip(edges, at_s, at_s + plan.seconds)) for at_s in starts)
    middle = (edges[1:] + edges[:-1]) / 2
    for k, name in enumerate(sorted({r.slo_class for _, r in records})):
        at = np.array([at_s for at_s, r in records if r.slo_class == name])
        met = np.array([r.attained for _, r in records if r.slo_class == name], float)
        count = np.histogram(at, edges)[0]
        with np.errstate(invalid="ignore", divide="ignore"):
            y = count / played_s if arrivals else np.histogram(at, edges, weights=met)[0] / count
        ax.plot(middle, y, label=name, color=color(k), marker="." if not arrivals else None)
    ax.set_xlabel("time (s)")


def _busiest(results: Results) -> Point | None:
    """The point of the highest load on the load axis that has results."""
    found = results.on("load")
    return found[-1][1] if found else None


def _breakdown(results: Results) -> Any:
    """Where the worker's time goes, per policy at the highest load."""
    point = _busiest(results)
    if point is None:
        return None
    spent = {n: s for n, o in results.at(point).items() if sum((s := o.seconds()).values()) > 0}
    if not spent:
        return None
    figure, (ax,) = panels(1, width=7.2)
    left = np.zeros(len(spent))
    for part, fill in zip(_PARTS, _PART_COLORS, strict=True):
        share = np.array([s.get(part, 0.0) / sum(s.values()) for s in spent.values()])
        ax.barh(list(spent), share, left=left, label=part, color=fill)
        left += share
    ax.set(xlabel=f"share of the worker's busy time, load {point.load:g}", xlim=(0, 1))
    ax.invert_yaxis()
    percent(ax.xaxis)
    legend(figure, ax)
    return figure


def _ablation(results: Results) -> Any:
    """Attainment of every policy at the highest load: what each part of the method brings."""
    point = _busiest(results)
    if point is None:
        return None
    here = results.at(point)
    figure, (ax,) = panels(1, width=7.6)
    values = [o.attainment() for o in here.values()]
    colors = [color_of(n, k) for k, n in enumerate(here)]
    ax.bar(list(here), [v.value for v in values], color=colors, yerr=_bars(values), capsize=3)
    for k, v in enumerate(values):
        ax.annotate(f"{as_percent(v.value, 0)}%", (k, 0.01), ha="center", fontsize=8, color="white")
    ax.set(ylabel="SLO attainment", title=f"load {point.load:g}", ylim=(0, 1.02))
    ax.tick_params(axis="x", labelrotation=35)
    percent(ax.yaxis)
    return figure
