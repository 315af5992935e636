"""The figures of a GPU check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adaserve.loadgen.figures import legend, panels, save


def draw(report: dict[str, Any], folder: Path) -> list[Path]:
    """TPOT by batch, and goodput by load where it was measured; the files written."""
    figure, (ax,) = panels(width=7)
    for name, by_batch in report["tpot_ms"].items():
        ax.plot(list(map(int, by_batch)), list(by_batch.values()), marker="o", label=name)
    ax.set(xlabel="concurrent requests", ylabel="ms per output token", ylim=(0, None), title="TPOT, greedy")
    ax.set_xscale("log", base=2)
    legend(figure, ax)
    files = [save(figure, folder / "tpot.png")]
    if report["mixed"]:
        figure, (ax,) = panels(width=7)
        loads = sorted(report["mixed"], key=float)
        for name in sorted({n for load in loads for n in report["mixed"][load]}):
            points = [(float(x), report["mixed"][x][name]["token_goodput"]) for x in loads
                      if name in report["mixed"][x]]  # fmt: skip
            ax.plot(*zip(*points, strict=True), marker="o", label=name)
        ax.set(xlabel="load (1 = capacity of plain decoding)", ylabel="goodput, tokens/s within SLO",
               ylim=(0, None), title="mixed SLOs")  # fmt: skip
        legend(figure, ax)
        files.append(save(figure, folder / "goodput.png"))
    return files
