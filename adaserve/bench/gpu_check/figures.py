"""The figures of a GPU check."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """TPOT by batch, and goodput by load where it was measured; the files written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    files = []
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, by_batch in report["tpot_ms"].items():
        axes.plot(list(map(int, by_batch)), list(by_batch.values()), marker="o", label=name)
    axes.set(xlabel="concurrent requests", ylabel="ms per output token", ylim=(0, None), title="TPOT, greedy")
    axes.set_xscale("log", base=2)
    files.append(_save(figure, axes, folder / "tpot.png"))
    if report["mixed"]:
        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        loads = sorted(report["mixed"], key=float)
        for name in sorted({n for load in loads for n in report["mixed"][load]}):
            points = [
                (float(x), report["mixed"][x][name]["token_goodput"])
                for x in loads
                if name in report["mixed"][x]
            ]
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.set(xlabel="load (1 = capacity of plain decoding)", ylabel="goodput, tokens/s within SLO",
                 ylim=(0, None), title="mixed SLOs")  # fmt: skip
        files.append(_save(figure, axes, folder / "goodput.png"))
    pyplot.close("all")
    return files


def _save(figure: Any, axes: Any, path: Path) -> Path:
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return path
