"""Cost of one selection and of whole iterations: ``python -m adaserve.bench.policy_cost [--out FILE.md]``.

First ``policy.select`` alone, on beams of 8 levels of 3 (24 candidates a request). The smallest of
many single calls is what the code costs; the median shows what a busy machine makes of it.

Then all that a policy does in an iteration of the embedded pair, with beams of up to 5 levels of up to 3.
Some of it is learned only now and then, so this is a mean of processor time: the smallest mean of 64
iterations in a row.

Last (``--cold``) iterations of ``priced`` in a loop and after a forward that has emptied the caches: before
each cold call 48 MB are written.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from adaserve.bench import markdown
from adaserve.host.description import describe_host
from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.costs.latency import LatencyModel, TabulatedCost
from adaserve.scheduler.interface import BoolArray, CandidateTrees, FloatArray, IterationOutcome, RunningBatch
from adaserve.scheduler.policies import build_policy
from adaserve.scheduler.selection import parent_kept

SIZES = ((8, 64), (16, 128), (32, 256), (64, 512), (128, 1024), (256, 2048), (512, 4096))
COLD_BATCHES = (1, 4, 8, 16, 32)
BATCHES = (1, 2, 4, 8, 24, 32)
PAIR = LatencyModel(
    draft=TabulatedCost((1.0, 8.0, 16.0, 32.0, 64.0), (6e-4, 7e-4, 8e-4, 1e-3, 1.5e-3)),
    verify=TabulatedCost(
        (1.0, 4.0, 8.0, 13.0, 16.0, 32.0), (9.7e-3, 13.7e-3, 13.7e-3, 16.7e-3, 21e-3, 41e-3)
    ),
    overhead_s=1e-3,
)
"""Latencies of the embedded pair on two cores."""
RUN = 64
PARTS = ("plan", "keep_drafting", "select", "observe")


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


def example_batch(n: int) -> RunningBatch:
    """n requests of which most are somewhat behind."""
    rng = np.random.default_rng(2)
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
    plan = chosen.plan(example_batch(n), 2.0)
    return best_us(lambda: chosen.select(plan, next(trees)), repeats)


def _accepted(trees: CandidateTrees, seed: int) -> BoolArray:
    """What a target would accept of the trees if all were verified: at most one child of every node."""
    draws = np.random.default_rng(seed).random(trees.n_nodes)
    row = trees.row
    above = np.where(trees.parent >= 0, trees.logprob[trees.parent + trees.row_start[row]], 0.0)
    keep: BoolArray = draws < np.exp(trees.logprob - above)
    for node in np.flatnonzero(keep):  # parents come first
        rivals = keep[:node] & (row[:node] == row[node]) & (trees.parent[:node] == trees.parent[node])
        keep[node] = parent_kept(trees, keep)[node] and not rivals.any()
    return keep


def measure_iteration(
    policy: str, n: int, repeats: int, before: Callable[[], object] = lambda: None
) -> FloatArray:
    """Microseconds of the ``PARTS`` of iterations of n requests, [repeats, 4]; it may stop drafting early.

    ``before`` is called before each part, untimed.
    """
    budget = None if policy == "priced" else 4 * n
    chosen = build_policy(policy, PolicyConfig(latency=PAIR, d_max=5, early_stop=True, budget=budget))
    shapes = itertools.product(range(1, 6), range(1, 4), range(8))
    pool = {(d, w, seed): example_trees(n, d, w, seed) for d, w, seed in shapes}
    accepted = {key: _accepted(trees, seed=key[2]) for key, trees in pool.items()}
    batch, now = replace(example_batch(n), max_depth=np.full(n, 5)), 2.0
    took: FloatArray = np.zeros((repeats, len(PARTS)))

    def timed(iteration: int, part: str, step: Callable[..., Any], *args: Any) -> Any:
        before()
        start = time.thread_time_ns()
        made = step(*args)
        spent = time.thread_time_ns() - start
        took[iteration, PARTS.index(part)] += spent
        return made

    for i in range(repeats):
        batch = replace(batch, decoded_tokens=20 + (batch.decoded_tokens - 17) % 40)
        plan = timed(i, "plan", chosen.plan, batch, now)
        depth, width = plan.draft.depth, plan.draft.width
        trees, right = CandidateTrees.empty(n), np.zeros(0, np.bool_)
        if depth:
            levels = pool[depth, width, i % 8].logprob.reshape(n, depth, width)
            for step in range(1, depth):
                if not timed(i, "keep_drafting", chosen.keep_drafting, plan, step, levels[:, step - 1]):
                    depth = step
                    break
            trees, right = replace(pool[depth, width, i % 8]), accepted[depth, width, i % 8]
        selection = timed(i, "select", chosen.select, plan, trees)
        right = right & selection.keep
        new = 1 + np.bincount(trees.row[right], minlength=n)
        draft, verify = PAIR.draft_s(n, depth, width), PAIR.verify_s(float(selection.verify_tokens))
        now += draft + verify
        times = (now, draft, 0.0, verify, draft + verify, draft + verify)
        outcome = IterationOutcome(plan, trees, selection, right, new, *times)
        timed(i, "observe", chosen.observe, outcome)
    return took / 1e3


def iteration_table(repeats: int) -> str:
    """Microseconds of whole iterations, the least mean of ``RUN`` in a row, as a Markdown table."""
    rows = []
    for policy, n in itertools.product(("adaserve", "priced"), BATCHES):
        took = measure_iteration(policy, n, max(2, repeats // RUN) * RUN).reshape(-1, RUN, len(PARTS))
        took = took.mean(axis=1)[1:]  # the first ones warm up
        best = took[took.sum(axis=1).argmin()]
        cells = [*best, best.sum()]
        rows.append([policy, str(n), *(f"{us:.0f}" for us in cells)])
    return markdown.table(["policy", "requests", *PARTS, "all"], rows)


def cold_table(repeats: int) -> str:
    """Iterations of ``priced`` in a loop and after a forward that empties the caches, in Markdown."""
    caches = np.zeros(6 << 20)  # more than a core's caches hold
    kinds: dict[str, Callable[[], object]] = {
        "warm": lambda: None,
        "cold": lambda: np.add(caches, 1.0, out=caches),
    }
    rows = []
    for n, (name, before) in itertools.product(COLD_BATCHES, kinds.items()):
        took = measure_iteration("priced", n, repeats, before)
        cells = np.median(took[repeats // 5 :], axis=0)  # the first ones warm up
        rows.append([str(n), name, *(f"{us:.0f}" for us in (*cells, cells.sum()))])
    return markdown.table(["requests", "caches", *PARTS, "all"], rows)


def table(repeats: int) -> str:
    """Cost of selections as a Markdown table."""
    rows = []
    for n, B in SIZES:
        cells = [measure("adaserve", n, B, repeats), measure("priced", n, B, repeats)]
        rows.append([f"{n} x 24", str(B), *(f"{a:.0f} / {b:.0f}" for a, b in cells)])
    return markdown.table(["n x candidates", "B", "adaserve, us (min / median)", "priced"], rows)


def main(
    out: Annotated[Path | None, typer.Option(help="Markdown file to write")] = None,
    repeats: int = 1000,
    cold: Annotated[bool, typer.Option(help="with empty caches too")] = False,
) -> None:
    """Prints the tables and writes them to --out."""
    host = describe_host()
    parts = [
        f"# Cost of one selection\n\n`python -m adaserve.bench.policy_cost --repeats {repeats}`, "
        f"single calls of `select`, one thread.\n{host['cpu']}, {host['cores']} cores shared (load "
        f"{os.getloadavg()[0]:.1f}), Python {host['python']}, numpy {host['packages']['numpy']}.",
        table(repeats),
        "Whole iterations, processor microseconds (smallest mean of 64 in a row):",
        iteration_table(repeats),
    ]
    if cold:
        parts += ["Iterations of `priced`, median microseconds:", cold_table(repeats)]
    text = "\n\n".join(parts) + "\n"
    if out:
        out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    typer.run(main)
