"""The paper's mix of three classes against one server, at the same load for all servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from adaserve.host.cores import usable_cores
from adaserve.loadgen.arrivals import Arrivals
from adaserve.loadgen.bench import refuse_what_ended_early, run_bench
from adaserve.loadgen.config import BenchConfig, Endpoint, Length, default_classes
from adaserve.server import ServerProcess

KEPT = (
    "slo_attainment", "token_goodput", "output_throughput", "mean_tpot_ms", "p99_tpot_ms", "mean_ttft_ms",
    "p99_ttft_ms", "accept_length", "requests",
)  # fmt: skip
"""SLOs are of TPOT alone, so the rest says what they cost."""


def run_mixed(
    server: ServerProcess,
    out: Path,
    tokens_per_s: float,
    seconds: float,
    baseline_ms: float,
    seed: int,
    console: Console,
) -> dict[str, Any]:
    """Offers ``tokens_per_s`` output tokens for ``seconds``; the figures of its summary that are compared.
    ``baseline_ms``: what SLOs are multiples of, the same for all servers."""
    output = Length(median=64)
    # Milliseconds, too: classes are multiples of a baseline, and an AdaServe server measures its own.
    config = BenchConfig(
        server=Endpoint(url=server.url, api="generate", ignore_eos=True, slo_headers="both"),
        classes={n: c.changed(output_tokens=output) for n, c in default_classes().items()},
        arrivals=Arrivals(rps=tokens_per_s / output.median),
        duration_s=seconds,
        baseline_ms=baseline_ms,
        seed=seed,
    )
    # One process of the load generator reads about 10,000 chunks/s where it has a core to itself. A large GPU
    # makes as many tokens, and the server needs cores, too.
    cores = usable_cores()
    summary = run_bench(config, out, max(1, cores // 4, cores - 8), console)
    refuse_what_ended_early(summary)
    kept = {k: summary.get(k) for k in KEPT}
    by_class = {n: {k: c.get(k) for k in KEPT} for n, c in summary["by_class"].items()}
    return {**kept, "by_class": by_class, "invalid_reasons": summary["invalid_reasons"]}
