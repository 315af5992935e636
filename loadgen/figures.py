"""The figures of a report as plain data, drawn as SVG in the page and as PNG beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Line:
    """One curve. ``color``: index into the palette; ``dash``: 0 solid, then ever shorter dashes."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    color: int = 0
    dash: int = 0
    step: bool = False


@dataclass(frozen=True)
class Bars:
    """One bar per category. ``error``: half the height of the error bar; ``outline``: a taller,
    empty bar behind (goodput within throughput)."""

    label: str
    values: Sequence[float | None]
    error: Sequence[float | None] = ()
    outline: Sequence[float | None] = ()
    color: int = 0


@dataclass(frozen=True)
class Figure:
    """A chart: lines over x, or bars over categories."""

    name: str  # of the PNG file
    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line] = ()
    bars: Sequence[Bars] = ()
    categories: Sequence[str] = ()
    y_max: float | None = None
    x_max: float | None = None
    percent: bool = False  # y values are shares
    marks_x: Sequence[float] = ()  # vertical rules
    marks_y: Sequence[float | None] = ()  # per category (bars): a target
    note: str = ""
    legend: bool = field(default=True)


DASHES = ("", "7 4", "2 3", "10 3 2 3")


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from ``low`` to ``high``."""
    if high <= low:
        high = low + 1.0
    raw = (high - low) / count
    size = 10.0 ** _floor_log10(raw)
    step = next(s * size for s in (1, 2, 2.5, 5, 10) if s * size >= raw * 0.999)
    first = int(-(-low // step))
    return [round(k * step, 12) for k in range(first, int(high / step + 1e-9) + 1)]


def _floor_log10(value: float) -> int:
    exponent = 0
    while value >= 10:
        value, exponent = value / 10, exponent + 1
    while value < 1:
        value, exponent = value * 10, exponent - 1
    return exponent


def write_png(figure: Figure, folder: Path) -> Path:
    """Draws with matplotlib (only imported here). Light background, for documents."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import PercentFormatter

    colors = ("#2f6fde", "#d9730d", "#0d8f83", "#8a4fd0", "#b5316f", "#5d7a12")
    fig, ax = plt.subplots(figsize=(7.2, 4.0), dpi=150)
    width = 0.8 / max(1, len(figure.bars))
    for k, b in enumerate(figure.bars):
        at = [i + (k - (len(figure.bars) - 1) / 2) * width for i in range(len(b.values))]
        color = colors[b.color % len(colors)]
        if b.outline:
            ax.bar(at, [v or 0 for v in b.outline], width * 0.9, fill=False, edgecolor=color, linewidth=1)
        error = [e or 0 for e in b.error] if b.error else None
        ax.bar(at, [v or 0 for v in b.values], width * 0.9, yerr=error, color=color, label=b.label, capsize=2)
    for i, mark in enumerate(figure.marks_y):
        if mark is not None:
            ax.hlines(mark, i - 0.45, i + 0.45, colors="black", linestyles="dashed", linewidth=1)
    for line in figure.lines:
        style = ("-", "--", ":", "-.")[line.dash % 4]
        y = [float("nan") if v is None else v for v in line.y]
        draw = "steps-post" if line.step else "default"
        ax.plot(
            line.x, y, style, color=colors[line.color % 6], label=line.label, drawstyle=draw, linewidth=1.6
        )
    for x in figure.marks_x:
        ax.axvline(x, color="#c0342b", linestyle="--", linewidth=1)
    if figure.categories:
        ax.set_xticks(range(len(figure.categories)), figure.categories)
    ax.set(title=figure.title, xlabel=figure.x_label, ylabel=figure.y_label)
    ax.set_ylim(0, figure.y_max if figure.y_max is not None else ax.get_ylim()[1] or 1.0)
    if figure.x_max is not None:
        ax.set_xlim(0, figure.x_max)
    if figure.percent:
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.grid(True, axis="both" if figure.lines else "y", alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    if figure.legend and (figure.lines or len(figure.bars) > 1):
        columns = min(4, max(len(figure.lines), len(figure.bars)))
        ax.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=columns)
    fig.tight_layout()
    path = folder / f"{figure.name}.png"
    fig.savefig(path)
    plt.close(fig)
    return path
