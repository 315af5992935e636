"""Figure 5 of the AdaServe paper as data and as a picture: two requests, budget 8.

``python -m adaserve.scheduler.example docs/figure5.png`` draws it. The paper's numbers are the budget
(8 = 2 roots + 3 nodes for the SLOs + 3 for throughput), the targets (0.6 and 0.8 beyond the token that
every iteration yields) and what reaches them (0.7, and 0.5 + 0.4). The remaining candidates are ours,
chosen so that plain greed would fail the second request.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np

from adaserve.scheduler.interface import CandidateTrees, FloatArray, RunningBatch, Selection
from adaserve.scheduler.selection import path_probability, two_phase

BUDGET = 8
TARGETS = (0.6, 0.8)
PARENT = ((-1, 0, 1, 2, 3), (-1, -1, 0))
PATH = ((0.70, 0.63, 0.57, 0.51, 0.46), (0.50, 0.40, 0.30))
TPOT_S = 0.05
T_SPEC_S = 0.02


def trees() -> CandidateTrees:
    """The candidate trees; path probabilities as in ``PATH``."""
    depth: list[int] = []
    for parents in PARENT:
        own: list[int] = []
        for above in parents:
            own.append(1 if above < 0 else own[above] + 1)
        depth += own
    flat_parent = [p for parents in PARENT for p in parents]
    log = [math.log(f) for path in PATH for f in path]
    start = np.cumsum([0, *map(len, PARENT)])
    return CandidateTrees(start, np.arange(len(log)), np.array(flat_parent), np.array(depth), np.array(log))


def batch(now_s: float) -> RunningBatch:
    """Two requests whose A(r) at ``now_s`` is 1 + TARGETS."""
    elapsed: FloatArray = (1.0 + np.array(TARGETS) + 10) * TPOT_S - T_SPEC_S
    return RunningBatch(
        rids=("r0", "r1"),
        slo_class=("chat", "chat"),
        tpot_slo_s=np.full(2, TPOT_S),
        decode_start_s=now_s - elapsed,
        decoded_tokens=np.full(2, 10),
        context_tokens=np.full(2, 100),
        remaining_tokens=np.full(2, 50),
        max_depth=np.full(2, 8),
        temperature=np.zeros(2),
    )


def select(slo_phase: bool = True) -> Selection:
    """AdaServe's choice, or plain greed's."""
    t = trees()
    need = 1.0 + np.array(TARGETS)
    return two_phase(t, path_probability(t), need, 5, BUDGET, None, slo_phase=slo_phase)


def draw(path: Path) -> None:
    """Both selections side by side: blue for the SLO phase, orange for throughput, grey left out."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8))
    for axis, slo_phase in zip(axes, (True, False), strict=True):
        _draw_one(axis, select(slo_phase))
        axis.set_title("SLO phase, then throughput" if slo_phase else "throughput only: r1 misses its 0.8")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_one(axis: object, chosen: Selection) -> None:
    t = trees()
    for r, (parents, path) in enumerate(zip(PARENT, PATH, strict=True)):
        first = int(t.row_start[r])
        ranks = {int(i): k for k, i in enumerate(np.argsort(-np.array(path), kind="stable"))}
        spots: dict[int, tuple[float, float]] = {-1: (3.0 * r, 0.0)}
        seen: dict[int, int] = {}
        for i, above in enumerate(parents):
            x, y = spots[above]
            spots[i] = (x + seen.get(above, 0), y - 1)
            seen[above] = seen.get(above, 0) + 1
            axis.plot([x, spots[i][0]], [y, y - 1], "k-", lw=0.6, zorder=1)  # type: ignore[attr-defined]
        for i, (x, y) in spots.items():
            kept = i < 0 or bool(chosen.keep[first + i])
            by_slo = i >= 0 and ranks[i] < int(chosen.slo_counts[r])
            colour = "white" if i < 0 else "tab:blue" if by_slo else "tab:orange" if kept else "lightgrey"
            label = f"r{r}" if i < 0 else f"{path[i]:.2f}"
            axis.scatter([x], [y], s=900, c=colour, edgecolors="k", zorder=2)  # type: ignore[attr-defined]
            axis.text(x, y, label, ha="center", va="center", fontsize=8)  # type: ignore[attr-defined]
    axis.set(xlim=(-0.8, 4.8), ylim=(-5.6, 0.6))  # type: ignore[attr-defined]
    axis.axis("off")  # type: ignore[attr-defined]


if __name__ == "__main__":
    draw(Path(sys.argv[1] if len(sys.argv) > 1 else "figure5.png"))
