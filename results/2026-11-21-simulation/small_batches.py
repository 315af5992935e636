"""Few requests on the embedded pair's latency: ``priced`` against every fixed depth, width and budget.

    python results/2026-11-21-simulation/small_batches.py [--requests 1] [--tokens 6000]

The latencies are those measured on two cores (AMD Zen 3): target 9.7 ms for one token, 13.7 for 4 to 8,
16.7 for 13, 21 for 16, 41 for 32; 0.6 ms a draft step, Python included. Acceptance per level is .72 (greedy)
and .48 (T = 0.7), as measured, and .25. About 3 s of one core per line.
"""

from __future__ import annotations

import numpy as np
import typer
from rich.progress import track

from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.interface import FloatArray
from adaserve.scheduler.latency import LatencyModel, TableCost
from adaserve.scheduler.policies import build_policy
from adaserve.scheduler.simulator.replica import Replica, ReplicaConfig, iteration_log
from adaserve.scheduler.simulator.trees import SyntheticChildren, TreeSampler
from adaserve.scheduler.simulator.workload import SimRequest

LATENCY = LatencyModel(
    draft=TableCost((1.0, 3.0, 8.0, 16.0, 32.0, 64.0), (6e-4, 6.2e-4, 7e-4, 8e-4, 1e-3, 1.5e-3)),
    verify=TableCost(
        (1.0, 4.0, 8.0, 13.0, 16.0, 32.0, 64.0), (9.7e-3, 13.7e-3, 13.7e-3, 16.7e-3, 21e-3, 41e-3, 82e-3)
    ),
    overhead_s=1e-3,
)
SHAPES = ((0, 1), (1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3), (4, 2), (5, 2), (5, 3), (6, 2))
COLUMNS = (
    "requests", "acceptance", "priced, tokens/s", "of the best fixed", "depth", "changes of depth",
    "verify tokens", "best fixed (d, w, B)", "its tokens/s", "plain",
)  # fmt: skip


def run(
    policy: str, n: int, acceptance: float, tokens: int, seed: int, **settings: int
) -> dict[str, FloatArray]:
    """The iterations of n requests that arrive together and write ``tokens`` each, less the first fifth."""
    children, control = np.random.default_rng([seed, 1]).spawn(2)
    config = PolicyConfig(latency=LATENCY, **settings)
    sampler = TreeSampler(SyntheticChildren(miscalibration=0.0, sibling_share=0.5), children)
    replica = Replica(build_policy(policy, config), ReplicaConfig(LATENCY, 1 << 20), sampler, control)
    for i in range(n):
        replica.submit(SimRequest(f"r{i}", "chat", 0.02, np.inf, 0.0, 64, tokens, tokens, acceptance, 0.0))
    while len(replica.rows) < n:
        replica.step()
    while len(replica.rows) == n:
        replica.step()
    log = iteration_log(replica)
    return {name: column[len(column) // 5 :] for name, column in log.items()}


def main(requests: int = 1, tokens: int = 3000, seed: int = 0) -> None:
    """Prints a table, a line per acceptance."""
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    for acceptance in (0.72, 0.48, 0.25):
        fixed: list[tuple[float, tuple[int, int, int]]] = []
        for d, w in track(SHAPES, description=f"acceptance {acceptance}", transient=True):
            for nodes in sorted({(d * w + d) // 2, d * w}):
                B = requests * (1 + nodes)
                settings = {"d_min": max(1, d), "d_max": max(1, d), "w_max": w, "B2": 1 << 20, "budget": B}
                log = run("global-greedy" if d else "none", requests, acceptance, tokens, seed, **settings)
                fixed.append((log["new"].sum() / log["seconds"].sum(), (d, w, B)))
        ours = run("priced", requests, acceptance, tokens, seed)
        speed = ours["new"].sum() / ours["seconds"].sum()
        best, shape = max(fixed)
        changes = float(np.mean(np.diff(ours["depth"]) != 0))
        cells = (
            requests, acceptance, f"{speed:.1f}", f"{speed / best:.3f}", f"{ours['depth'].mean():.2f}",
            f"{100 * changes:.0f}%", f"{ours['verify'].mean():.1f}", shape, f"{best:.1f}",
            f"{fixed[0][0]:.1f}",
        )  # fmt: skip
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    typer.run(main)
