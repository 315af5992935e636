"""How every figure of AdaServe is drawn: matplotlib without pyplot, one look, equal data give equal bytes."""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

COLORS = ("#2f6fde", "#d9730d", "#0d8f83", "#8a4fd0", "#b5316f", "#5d7a12", "#8c8c8c")
STYLES = ("-", "--", ":", "-.")
LIMIT = "#c0342b"
"""Color of a line that should not be crossed."""
_CHARACTER, _HANDLE, _ROW = 0.065, 0.5, 0.17  # inches: a letter; what a legend has beside a name; its rows
_INK = "#667085"  # can be read on white and on black: a page shows its figures on both
_LOOK = {
    "font.size": 9.0,
    "text.color": _INK, "axes.labelcolor": _INK, "axes.edgecolor": _INK, "axes.titlecolor": _INK,
    "xtick.color": _INK, "ytick.color": _INK,
    "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.25,
    "legend.frameon": False, "legend.fontsize": 8.0,
    "svg.fonttype": "none", "svg.hashsalt": "adaserve",
}  # fmt: skip


def panels(columns: int = 1, width: float = 5.2, height: float = 3.9, rows: int = 1) -> tuple[Any, list[Any]]:
    """A figure and its panels, row by row; sizes of one panel in inches. Rows share their x axis."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams.update(_LOOK)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, sharex=rows > 1).flat)


def color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def as_it_is(name: str) -> str:
    """A name for a figure. Matplotlib would read formulas between dollars, and it leaves what begins with an
    underscore out of a legend."""
    return " " * name.startswith("_") + name.replace("$", r"\$")


def percent(axis: Any) -> None:
    """Has an axis (``ax.yaxis``) show shares as percentages."""
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0))


def legend(figure: Any, ax: Any, columns: int = 6) -> None:
    """One legend below all panels, with what ``ax`` shows, in as many columns as have room. If these are
    fewer than ``columns``, the figure becomes higher, not the panels lower."""
    handles, labels = ax.get_legend_handles_labels()
    if not labels:
        return

    def fits(n: int) -> bool:
        widest = [max(map(len, part)) for part in np.array_split(labels, n)]  # as matplotlib fills columns
        return sum(_HANDLE + _CHARACTER * length for length in widest) <= figure.get_figwidth()

    columns = min(columns, len(labels))
    ncols = next(filter(fits, range(columns, 1, -1)), 1)
    rows_more = math.ceil(len(labels) / ncols) - math.ceil(len(labels) / columns)
    figure.set_figheight(figure.get_figheight() + _ROW * rows_more)
    figure.legend(handles, labels, loc="outside lower center", ncols=ncols)


def bars(
    ax: Any,
    names: Sequence[str],
    series: Mapping[str, Sequence[tuple[float, float]]],
    text: str | Callable[[float], str],
    colors: Mapping[str, str] | None = None,
) -> None:
    """Groups of bars, one group per name and one bar per series: (height, half the error bar; NaN = none).

    ``text``: the number on each bar, as a format or a function. ``colors``: of the series that have one of
    their own."""
    own = colors or {}
    width = 0.85 / max(1, len(series))
    for k, (label, values) in enumerate(series.items()):
        at = [x + (k - (len(series) - 1) / 2) * width for x in range(len(names))]
        heights, errors = zip(*values, strict=True)
        drawn = ax.bar(
            at, heights, width * 0.94, yerr=errors, color=own.get(label, color(k)),
            label=as_it_is(label), capsize=2, ecolor=_INK,
        )  # fmt: skip
        if len(names) * len(series) <= 16:
            ax.bar_label(drawn, fmt=text, fontsize=7, padding=2)
    room = ax.get_position().width * ax.figure.get_figwidth() / len(names)
    slope = {"rotation": 25, "ha": "right"} if max(map(len, names)) * _CHARACTER > room else {}
    ax.set_xticks(range(len(names)), [as_it_is(name) for name in names], **slope)


@contextlib.contextmanager
def _font_as_it_is() -> Iterator[None]:
    """Without a warning for each letter that the font lacks: a page has the fonts of its browser, and in a
    PNG anybody sees the box."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield


def save(figure: Any, path: Path) -> Path:
    """Writes a PNG, with neither date nor version inside."""
    with _font_as_it_is():
        figure.savefig(path, dpi=140, metadata={"Software": None})
    return path


def svg(figure: Any) -> str:
    """The figure as an element of an HTML page, on the page's own background."""
    text = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with _font_as_it_is():
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    return text.getvalue().partition("<svg")[2].join(("<svg", ""))
