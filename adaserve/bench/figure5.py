"""Draws Figure 5 of the AdaServe paper: ``python -m adaserve.bench.figure5 docs/figure5.png``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import typer

from adaserve.loadgen.figures import panels, save
from adaserve.scheduler import figure5
from adaserve.scheduler.interface import Selection


def draw(path: Path) -> None:
    """Both selections side by side: blue for the SLO phase, orange for throughput, grey left out."""
    figure, axes = panels(2, width=4.5, height=3.8)
    for ax, slo_phase in zip(axes, (True, False), strict=True):
        _draw_one(ax, figure5.select(slo_phase))
        ax.set_title("SLO phase, then throughput" if slo_phase else "throughput only: r1 misses its 0.8")
    path.parent.mkdir(parents=True, exist_ok=True)
    save(figure, path)


def _draw_one(ax: Any, chosen: Selection) -> None:
    t = figure5.trees()
    for r, (parents, path) in enumerate(zip(figure5.PARENT, figure5.PATH, strict=True)):
        first = int(t.row_start[r])
        ranks = {int(i): k for k, i in enumerate(np.argsort(-np.array(path), kind="stable"))}
        spots: dict[int, tuple[float, float]] = {-1: (3.0 * r, 0.0)}
        seen: dict[int, int] = {}
        for i, above in enumerate(parents):
            x, y = spots[above]
            spots[i] = (x + seen.get(above, 0), y - 1)
            seen[above] = seen.get(above, 0) + 1
            ax.plot([x, spots[i][0]], [y, y - 1], "k-", lw=0.6, zorder=1)
        for i, (x, y) in spots.items():
            kept = i < 0 or bool(chosen.keep[first + i])
            by_slo = i >= 0 and ranks[i] < int(chosen.slo_counts[r])
            color = "white" if i < 0 else "tab:blue" if by_slo else "tab:orange" if kept else "lightgrey"
            label = f"r{r}" if i < 0 else f"{path[i]:.2f}"
            ax.scatter([x], [y], s=900, c=color, edgecolors="k", zorder=2)
            ax.text(x, y, label, ha="center", va="center", fontsize=8, color="black")
    ax.set(xlim=(-0.8, 4.8), ylim=(-5.6, 0.6))
    ax.axis("off")


if __name__ == "__main__":
    typer.run(draw)
