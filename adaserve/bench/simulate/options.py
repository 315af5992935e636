"""Options that several commands of ``adaserve simulate`` have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from adaserve.commands import new_file, panel

traffic_option, hardware_option, prefill_option, fleet_option, output_option = map(
    panel, ("Traffic", "Hardware", "Prefills", "Fleet", "Output")
)

TRACE = (
    "Trace file, or synthetic:N:RPS[:BURST]: N requests at RPS requests per second. BURST is the squared "
    "coefficient of variation of their gaps: 1 = Poisson, more = bursts."
)
"""Help of an option for traces."""

OneTrace = Annotated[str, typer.Option(metavar="TRACE", help=TRACE)]
PolicyName = Annotated[str, typer.Option(help="Scheduling policy, as in `adaserve serve`.")]
ModelName = Annotated[str, hardware_option("Target: llama-3.1-8b, llama-3.1-70b or qwen2.5-32b.")]
GpuName = Annotated[str, hardware_option("a100, h100, h200 or l40s.")]
TensorParallel = Annotated[int, hardware_option("GPUs per replica (tensor parallelism).", min=1)]
ProfileFile = Annotated[
    Path | None,
    hardware_option(
        "Latency profile written by `adaserve profile`, in place of a model and GPUs.", metavar="FILE"
    ),
]
CacheTokens = Annotated[
    int | None,
    hardware_option("Tokens that the KV cache of a replica holds.", min=1, show_default="from the hardware"),
]
Replicas = Annotated[int, fleet_option("Equal replicas behind the router.", min=1)]
RouterName = Annotated[
    Literal["round-robin", "least-work", "slo"],
    fleet_option("How requests are spread over replicas: round-robin, least-work or slo.", metavar="NAME"),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of every random choice.")]
Baseline = Annotated[
    float | None,
    hardware_option(
        "Milliseconds per token of an idle replica, which x_baseline SLOs multiply.",
        min=0.001,
        show_default="from the hardware",
    ),
]
SloConfig = Annotated[
    Path | None,
    traffic_option("YAML file with SLO classes.", metavar="FILE", show_default="coding, chat, summarization"),
]
EosShare = Annotated[
    float, traffic_option("Share of requests (0 to 1) that end before their output length.", min=0, max=1)
]
JsonFile = Annotated[Path | None, typer.Option(help="Write the result to this JSON file.", callback=new_file)]
