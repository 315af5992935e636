"""Figure 5 of the AdaServe paper as data: two requests, budget 8.

``python -m adaserve.bench.figure5 docs/figure5.png`` draws it. The paper's numbers are the budget
(8 = 2 roots + 3 nodes for the SLOs + 3 for throughput), the targets (0.6 and 0.8 beyond the token that
every iteration yields) and what reaches them (0.7, and 0.5 + 0.4). The remaining candidates are ours,
chosen so that plain greed would fail the second request.
"""

from __future__ import annotations

import math

import numpy as np

from adaserve.scheduler.interface import CandidateTrees, Selection
from adaserve.scheduler.selection import best_anywhere, path_probability, two_phase

BUDGET = 8
TARGETS = (0.6, 0.8)
PARENT = ((-1, 0, 1, 2, 3), (-1, -1, 0))
PATH = ((0.70, 0.63, 0.57, 0.51, 0.46), (0.50, 0.40, 0.30))


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


def select(slo_phase: bool = True) -> Selection:
    """AdaServe's choice, or plain greed's."""
    t = trees()
    f = path_probability(t)
    if not slo_phase:
        return best_anywhere(t, f, BUDGET)
    return two_phase(t, f, 1.0 + np.array(TARGETS), 5, BUDGET, None)
