"""What a selection of ``priced`` costs in a loop, and behind a forward that has emptied the caches.

    python scripts/selection_cold.py

In Python and in C, median microseconds; before each cold call 48 MB are written.
"""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from adaserve.bench.selection import PAIR, example_batch, example_trees
from adaserve.engine.host.pricing import native_pricing
from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.interface import IterationOutcome
from adaserve.scheduler.policies import build_policy
from adaserve.scheduler.pricing import Pricing

SHAPES = ((1, 4, 2), (4, 4, 2), (8, 3, 1), (8, 4, 3), (16, 4, 2), (32, 2, 1))
REPEATS = 300
CACHES = np.zeros(6 << 20)


def selection_us(shape: tuple[int, int, int], pricing: Pricing | None, cold: bool) -> float:
    """Median microseconds of ``select`` on trees of (requests, depth, width), learning in between."""
    n, depth, width = shape
    policy = build_policy("priced", PolicyConfig(latency=PAIR, d_max=5, pricing=pricing))
    plan = replace(
        policy.plan(example_batch(n, 2), 2.0), depth=depth, width=width, budget=n * (1 + depth * width)
    )
    pool = [example_trees(n, depth, width, seed) for seed in range(8)]
    took = []
    for i in range(REPEATS):
        trees, now = replace(pool[i % 8]), replace(plan, iteration=i)
        if cold:
            np.add(CACHES, 1.0, out=CACHES)
        start = time.perf_counter()
        selection = policy.select(now, trees)
        took.append(time.perf_counter() - start)
        nothing, one = np.zeros(trees.n_nodes, np.bool_), np.ones(n, np.int64)
        times = (2.0, 2e-3, 0.0, 2e-2, 2.2e-2, 2.2e-2)
        policy.observe(IterationOutcome(now, trees, selection, nothing, one, *times))
    return median(took) * 1e6


def main() -> None:
    table = Table(title="microseconds per selection")
    kinds = {"Python": None, "C": native_pricing()}
    for column in ("requests x depth x width", *(f"{k}, {c}" for c in ("warm", "cold") for k in kinds)):
        table.add_column(column, justify="right")
    for shape in track(SHAPES, description="selecting"):
        cells = [selection_us(shape, pricing, cold) for cold in (False, True) for pricing in kinds.values()]
        table.add_row(" x ".join(map(str, shape)), *(f"{us:.0f}" for us in cells))
    Console().print(table)


if __name__ == "__main__":
    main()
