"""`python -m adaserve.bench.kernels`: what a forward costs here, against what memory and cores allow."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from adaserve.bench.options import counts, words
from adaserve.bench.terminal import progress, table
from adaserve.cores import usable_cores
from adaserve.engine.host.forward import LeanModel
from adaserve.engine.host.linear import Storage
from adaserve.engine.host.params import LayerWeights, ModelConfig, ModelWeights
from adaserve.engine.trees.plan import TreeAttentionPlan
from adaserve.loadgen.results import provenance

_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class Shape:
    """The widened embedded target unless told otherwise."""

    hidden: int = 256
    intermediate: int = 21_000
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    vocab: int = 4096

    @property
    def matrix_weights(self) -> int:
        """Weights that every forward reads, without the LM head."""
        attention = (2 * self.heads + 2 * self.kv_heads) * self.head_dim * self.hidden
        return self.layers * (attention + 3 * self.hidden * self.intermediate)


@dataclass(frozen=True)
class Host:
    """What the host can do at best, measured with kernels that do nothing else."""

    bytes_per_s: float
    fma_per_s: float

    def ideal_ms(self, shape: Shape, storage: str, tokens: int) -> float:
        """Reading all weights once, or multiplying them with every token: whichever takes longer."""
        read = shape.matrix_weights * _BYTES[storage] / self.bytes_per_s
        compute = shape.matrix_weights * tokens / self.fma_per_s
        return 1e3 * max(read, compute)


def random_model(shape: Shape, seed: int = 0) -> tuple[ModelWeights, ModelConfig]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(*size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) * 0.02).half()

    norm = torch.ones(shape.hidden)
    qkv_rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    layer = LayerWeights(
        norm, matrix(qkv_rows, shape.hidden), None, None, None,
        matrix(shape.hidden, shape.heads * shape.head_dim), None, norm,
        matrix(2 * shape.intermediate, shape.hidden), matrix(shape.hidden, shape.intermediate),
    )  # fmt: skip
    embed = matrix(shape.vocab, shape.hidden)
    angles = torch.arange(8192)[:, None] * 1e4 ** (-torch.arange(0, 1, 2 / shape.head_dim))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    config = ModelConfig(
        shape.hidden, shape.intermediate, shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim,
        shape.vocab, 1e-5,
    )  # fmt: skip
    # Each packed layer is memory of its own: sharing the source tensors changes nothing.
    return ModelWeights(embed, (layer,) * shape.layers, norm, embed, cos_sin), config


@dataclass(frozen=True)
class Load:
    """A forward of `rows` requests, each with `context` cached tokens and `tokens / rows` new ones."""

    rows: int
    tokens: int
    context: int


def forward_call(lean: LeanModel, shape: Shape, load: Load) -> Callable[[], object]:
    """A forward of that load over a pool of its own."""
    new = load.tokens // load.rows
    kv = load.context + new
    pool = (load.rows * kv, shape.kv_heads, shape.head_dim)
    k = [torch.zeros(pool) for _ in range(shape.layers)]
    v = [torch.zeros(pool) for _ in range(shape.layers)]
    slots = torch.arange(load.rows * kv, dtype=torch.int32)
    plan = TreeAttentionPlan(
        torch.arange(load.rows + 1, dtype=torch.int32) * new,
        torch.arange(load.rows + 1, dtype=torch.int32) * kv,
        slots,
    )
    ids = torch.arange(load.tokens) % shape.vocab
    positions = torch.arange(load.context, kv).repeat(load.rows)
    out = slots.view(load.rows, kv)[:, load.context :].flatten().long()
    return lambda: lean.forward(ids, positions, out, k, v, plan)


def measure_host() -> Host:
    """Read bandwidth of a sum over 256 MB, and the multiply-adds of a large product."""
    data = torch.ones(64 << 20)
    a, b = torch.randn(512, 2048), torch.randn(2048, 512)
    read_s = min(_seconds(data.sum) for _ in range(9))
    multiply_s = min(_seconds(lambda: a @ b) for _ in range(20))
    return Host(data.numel() * 4 / read_s, 512 * 2048 * 512 / multiply_s)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(
    shape: Shape, storages: Sequence[Storage], tokens: Sequence[int], context: int, rounds: int
) -> dict[str, dict[int, float]]:
    """Best milliseconds per forward. Storages and sizes take turns, so that a busy minute hits all alike."""
    weights, config = random_model(shape)
    models = {storage: LeanModel(weights, config, storage) for storage in storages}
    calls = {(s, n): forward_call(models[s], shape, Load(n, n, context)) for s in storages for n in tokens}
    best: dict[str, dict[int, float]] = {s: dict.fromkeys(tokens, float("inf")) for s in storages}
    with progress(Console(stderr=True)) as bar:
        for _ in bar.track(range(rounds), description="rounds"):
            for (storage, n), call in calls.items():
                best[storage][n] = min(best[storage][n], 1e3 * _seconds(call))
    return best


def report(shape: Shape, host: Host, best: dict[str, dict[int, float]], tokens: Sequence[int]) -> Table:
    size = f"{shape.matrix_weights / 1e6:.0f} M weights, {torch.get_num_threads()} threads"
    made = table(f"{size}: ms per forward (x ideal)", ("tokens", *best))
    for n in tokens:
        cells = [f"{best[s][n]:.1f} ({best[s][n] / host.ideal_ms(shape, s, n):.2f})" for s in best]
        made.add_row(str(n), *cells)
    made.caption = (
        f"host: {host.bytes_per_s / 1e9:.1f} GB/s read, {host.fma_per_s / 1e9:.0f} G multiply-adds/s"
    )
    return made


def main(
    tokens: Annotated[
        Any, typer.Option(parser=counts, metavar="A,B", help="tokens per forward")
    ] = "1,2,4,6,8,12,16,24,32,48,64",
    storages: Annotated[
        Any, typer.Option(parser=words, metavar="A,B", help="how weights are kept")
    ] = "fp16,fp32,bf16",
    context: Annotated[int, typer.Option(help="cached tokens of each request")] = 128,
    rounds: int = 20,
    threads: int = usable_cores(),
    layers: int = Shape.layers,
    intermediate: int = Shape.intermediate,
    out: Annotated[Path | None, typer.Option(help="JSON file for the numbers")] = None,
) -> None:
    """Milliseconds of a forward of the embedded target, against what memory and cores allow."""
    torch.set_num_threads(threads)
    shape = Shape(layers=layers, intermediate=intermediate)
    host = measure_host()
    best = measure(shape, storages, tokens, context, rounds)
    Console().print(report(shape, host, best, tokens))
    if out:
        result = {
            "made": provenance(),
            "threads": threads,
            "best": asdict(host),
            "shape": asdict(shape),
            "context": context,
            "ms": best,
        }
        out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
