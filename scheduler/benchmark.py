"""Cost of one selection: ``python -m adaserve.scheduler.benchmark [--out FILE.md]``.

Times ``policy.select`` alone, on beams of 8 levels of 3 (24 candidates a request). The smallest of
many single calls is what the code costs; the median shows what a busy machine makes of it.
"""

from __future__ import annotations

import itertools
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.interface import CandidateTrees, FloatArray, RunningBatch
from adaserve.scheduler.order import NeedOrder, token_deadline
from adaserve.scheduler.policies import build_policy

SIZES = ((8, 64), (16, 128), (32, 256), (64, 512), (128, 1024), (256, 2048), (512, 4096))


def example_trees(n: int, d: int, w: int, seed: int) -> CandidateTrees:
    """n beams with decaying probabilities; parents drawn from the level above."""
    rng = np.random.default_rng(seed)
    parent, log = np.full((n, d, w), -1), np.log(rng.beta(3, 1.5, (n, d, w)))
    for level in range(1, d):
        above = rng.integers(0, w, (n, w))
        parent[:, level] = above + (level - 1) * w
        log[:, level] += np.take_along_axis(log[:, level - 1], above, axis=1)
    depth = np.tile(np.repeat(np.arange(1, d + 1), w), n)
    m = n * d * w
    return CandidateTrees(np.arange(n + 1) * d * w, np.zeros(m, np.int64), parent.ravel(), depth, log.ravel())


def example_batch(n: int, seed: int) -> RunningBatch:
    """n requests of which most are somewhat behind."""
    rng = np.random.default_rng(seed)
    full = np.full
    return RunningBatch(
        rids=tuple(f"r{i}" for i in range(n)),
        slo_class=("chat",) * n,
        tpot_slo_s=rng.choice([0.036, 0.05, 0.15], n),
        decode_start_s=rng.uniform(0, 1, n),
        decoded_tokens=rng.integers(20, 60, n),
        context_tokens=full(n, 400),
        remaining_tokens=full(n, 200),
        max_depth=full(n, 16),
        temperature=np.zeros(n),
    )


def best_us(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """(smallest, median) microseconds of single calls."""
    took: FloatArray = np.empty(repeats)
    for i in range(repeats):
        start = time.perf_counter_ns()
        call()
        took[i] = time.perf_counter_ns() - start
    return float(took.min()) / 1e3, float(np.median(took)) / 1e3


def measure(policy: str, n: int, B: int, repeats: int) -> tuple[float, float]:
    """Microseconds of one ``select`` at n requests x 24 candidates and budget B."""
    chosen = build_policy(policy, PolicyConfig(budget=B))
    # Other trees in every call: a policy may remember what it worked out for the last ones.
    trees = itertools.cycle([example_trees(n, 8, 3, seed) for seed in range(8)])
    plan = chosen.plan(example_batch(n, seed=2), 2.0)
    return best_us(lambda: chosen.select(plan, next(trees)), repeats)


def measure_order(n: int, repeats: int, moved: int) -> tuple[float, float]:
    """Microseconds to keep the need order of n requests up to date when ``moved`` produced tokens."""
    batch, order = example_batch(n, seed=3), NeedOrder()
    deadline = token_deadline(batch)
    order.refresh(batch.rids, deadline)
    step = np.zeros(n)
    step[np.random.default_rng(0).permutation(n)[:moved]] = 0.05

    def once() -> None:
        nonlocal deadline
        deadline = deadline + step
        order.refresh(batch.rids, deadline)
        order.behind(2.0)

    return best_us(once, repeats)


def table(repeats: int) -> str:
    """The Markdown table."""
    lines = [
        "| n x candidates | B | adaserve, us (min / median) | priced | need order, 1 moved | all moved |",
        "|---|---|---|---|---|---|",
    ]
    for n, B in SIZES:
        cells = [measure("adaserve", n, B, repeats), measure("priced", n, B, repeats)]
        cells += [measure_order(n, repeats, 1), measure_order(n, repeats, n)]
        lines.append(f"| {n} x 24 | {B} | " + " | ".join(f"{a:.0f} / {b:.0f}" for a, b in cells) + " |")
    return "\n".join(lines)


def main(
    out: Annotated[Path | None, typer.Option(help="Markdown file to write")] = None, repeats: int = 1000
) -> None:
    """Prints the table and writes it to --out."""
    numpy_version, load = np.__version__, os.getloadavg()[0]
    head = (
        "# Cost of one selection\n\n`python -m adaserve.scheduler.benchmark --repeats "
        f"{repeats}`, single calls of `select`, one thread.\n"
        f"{platform.machine()}, {os.cpu_count()} cores shared (load {load:.1f}), "
        f"Python {platform.python_version()}, numpy {numpy_version}.\n\n"
    )
    text = head + table(repeats) + "\n"
    print(text)
    if out:
        out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
