"""Options that several commands of ``adaserve simulate`` have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from adaserve.commands import new_file

TRAFFIC, HARDWARE, PREFILLS, FLEET, OUTPUT = "Traffic", "Hardware", "Prefills", "Fleet", "Output"
"""Groups of options."""

TRACE = (
    "Trace file, or synthetic:N:RPS[:BURST]: N requests at RPS requests per second. BURST is the squared "
    "coefficient of variation of their gaps: 1 = Poisson, more = bursts."
)
"""Help of an option for traces."""

OneTrace = Annotated[str, typer.Option(metavar="TRACE", help=TRACE)]
PolicyName = Annotated[str, typer.Option(help="Scheduling policy, as in `adaserve serve`.")]
ModelName = Annotated[
    str,
    typer.Option(help="Target: llama-3.1-8b, llama-3.1-70b or qwen2.5-32b.", rich_help_panel=HARDWARE),
]
GpuName = Annotated[str, typer.Option(help="a100, h100, h200 or l40s.", rich_help_panel=HARDWARE)]
TensorParallel = Annotated[
    int, typer.Option(min=1, help="GPUs per replica (tensor parallelism).", rich_help_panel=HARDWARE)
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Latency profile written by `adaserve profile`, in place of a model and GPUs.",
        rich_help_panel=HARDWARE,
    ),
]
CacheTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Tokens that the KV cache of a replica holds.",
        show_default="from the hardware",
        rich_help_panel=HARDWARE,
    ),
]
Replicas = Annotated[
    int, typer.Option(min=1, help="Equal replicas behind the router.", rich_help_panel=FLEET)
]
RouterName = Annotated[
    Literal["round-robin", "least-work", "slo"],
    typer.Option(
        metavar="NAME",
        help="How requests are spread over replicas: round-robin, least-work or slo.",
        rich_help_panel=FLEET,
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of every random choice.")]
Baseline = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        help="Milliseconds per token of an idle replica, which x_baseline SLOs multiply.",
        show_default="from the hardware",
        rich_help_panel=HARDWARE,
    ),
]
SloConfig = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="YAML file with SLO classes.",
        show_default="coding, chat, summarization",
        rich_help_panel=TRAFFIC,
    ),
]
EosShare = Annotated[
    float,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Share of requests (0 to 1) that end before their output length.",
        rich_help_panel=TRAFFIC,
    ),
]
JsonFile = Annotated[Path | None, typer.Option(help="Write the result to this JSON file.", callback=new_file)]
