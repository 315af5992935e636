"""`adaserve bench kernels`: what forwards cost here by tokens and by context, against what memory allows.

With another folder of sources, old and new kernels are timed in turn and compared by the median of the ratios
within a round, so a busy minute slows down both alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil
import torch
from rich.console import Console

from adaserve.bench.display import progress
from adaserve.bench.markdown import table
from adaserve.engine.cpu import build
from adaserve.engine.cpu.linear import Storage
from adaserve.engine.cpu.native import NativeBackend
from adaserve.engine.cpu.params import Inputs, LayerWeights, ModelConfig, ModelWeights
from adaserve.engine.trees.attention import TreeAttentionPlan
from adaserve.errors import UserError
from adaserve.host.cores import usable_memory
from adaserve.host.files import write_json
from adaserve.loadgen.results import provenance
from adaserve.pair.model import rope
from adaserve.pair.shape import NORM_EPS, TARGET, Shape
from adaserve.pair.widen import Width, widened_shape
from adaserve.terminal import say

SETS = {4: "baseline", 8: "avx2", 16: "avx512"}
"""Lanes of the kernels' vectors -> the instruction set on x86."""
NEW, OLD = "new", "old"
Key = TypeVar("Key")


@dataclass(frozen=True)
class Case:
    """A forward of one request: ``tokens`` new ones after ``context`` cached ones."""

    tokens: int
    context: int


READ_MB = 256
"""What is read to measure how fast memory is."""

Kernels = dict[str, NativeBackend]
Times = dict[str, list[float]]
"""Kernels -> seconds of every round."""


def random_model(shape: Shape, positions: int) -> tuple[ModelWeights, ModelConfig]:
    generator = torch.Generator().manual_seed(0)

    def matrix(*size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) * 0.02).half()

    norm = torch.ones(shape.hidden)
    qkv_rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    layer = LayerWeights(
        norm, matrix(qkv_rows, shape.hidden), None, None, None,
        matrix(shape.hidden, shape.heads * shape.head_dim), None, norm,
        matrix(2 * shape.mlp, shape.hidden), matrix(shape.hidden, shape.mlp),
    )  # fmt: skip
    embed = matrix(shape.vocab, shape.hidden)
    config = ModelConfig(
        shape.hidden, shape.mlp, shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim,
        shape.vocab, NORM_EPS,
    )  # fmt: skip
    cos_sin = torch.cat(rope(positions, shape), -1)
    # Each packed layer is memory of its own: sharing the source tensors changes nothing.
    return ModelWeights(embed, (layer,) * shape.layers, norm, embed, cos_sin), config


def forward_inputs(requests: int, tokens: int, context: int, read: int, vocab: int) -> Inputs:
    """``tokens`` new ones of each request, which read the last ``read`` of its ``context`` cached ones. A
    request's slots follow each other, as in a fresh server, and requests lie side by side."""
    first = torch.arange(requests)[:, None] * (context + tokens)
    own = first + torch.arange(context, context + tokens)
    keys = torch.cat((first + torch.arange(context - read, context), own), dim=1)
    rows = torch.arange(requests + 1, dtype=torch.int32)
    plan = TreeAttentionPlan(rows * tokens, rows * (read + tokens), keys.flatten().int())
    positions = torch.arange(context, context + tokens).repeat(requests)
    return Inputs(torch.arange(requests * tokens) % vocab, positions, own.flatten(), plan)


def forward_calls(kernels: Kernels, shape: Shape, case: Case) -> dict[str, Callable[[], object]]:
    """A forward of that case by each set of kernels."""
    generator = torch.Generator().manual_seed(1)
    size = (case.context + case.tokens, shape.kv_heads, shape.head_dim)
    k, v = ([torch.randn(size, generator=generator) for _ in range(shape.layers)] for _ in range(2))
    inputs = forward_inputs(1, case.tokens, case.context, case.context, shape.vocab)
    return {name: partial(backend.forward, inputs, k, v) for name, backend in kernels.items()}


def in_turns(calls: Mapping[Key, Callable[[], object]], rounds: int) -> dict[Key, list[float]]:
    """Seconds of every call, round by round. The first round does not count; every other one runs in reverse
    order."""
    taken: dict[Key, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for number in range(rounds + 1):
        for name in order:
            seconds = _seconds(calls[name])
            if number:
                taken[name].append(seconds)
        order.reverse()
    return taken


def read_bandwidth() -> float:
    """Bytes per second of a plain sum over memory by all threads: the best of some rounds."""
    data = torch.ones(READ_MB << 18)
    return data.numel() * 4 / min(_seconds(data.sum) for _ in range(15))


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@dataclass(frozen=True)
class KernelPlan:
    tokens: Sequence[int]
    storages: Sequence[Storage]
    queries: Sequence[int]
    contexts: Sequence[int]
    rounds: int
    threads: int
    layers: int
    flags: tuple[str, ...]
    against: Path | None
    out: Path | None


@dataclass(frozen=True)
class Row:
    """Medians of a case. ``ratio``: old over new, the median over rounds; None without old kernels."""

    case: Case
    ms: dict[str, float]
    ratio: float | None


def _row(case: Case, taken: Times) -> Row:
    ratio = None
    if OLD in taken:
        ratio = statistics.median(o / n for o, n in zip(taken[OLD], taken[NEW], strict=True))
    return Row(case, {name: 1e3 * statistics.median(s) for name, s in taken.items()}, ratio)


def _compiled(plan: KernelPlan, shape: Shape, storage: Storage, positions: int) -> Kernels:
    weights, config = random_model(shape, positions)
    sources = {NEW: build.SOURCES} | ({OLD: plan.against} if plan.against else {})
    built = {name: build.build(*plan.flags, sources=path) for name, path in sources.items()}
    return {
        name: NativeBackend(build.load_library(path), weights, config, storage)
        for name, path in built.items()
    }


def _measure(
    plan: KernelPlan, shape: Shape, storage: Storage, cases: Sequence[Case], console: Console
) -> list[Row]:
    positions = max(case.context + case.tokens for case in cases)
    kernels = _compiled(plan, shape, storage, positions)
    with progress(console) as bar:
        return [
            _row(case, in_turns(forward_calls(kernels, shape, case), plan.rounds))
            for case in bar.track(cases, description=storage)
        ]


def run_kernels(plan: KernelPlan, console: Console) -> None:
    """Measures, prints the tables and writes ``<set>.json`` and ``<set>.md`` below ``plan.out``.

    Raises BuildError if the kernels cannot be compiled, and UserError if the longest context does not
    fit into memory.
    """
    made = provenance()
    torch.set_num_threads(plan.threads)
    batches = [Case(n, 64) for n in plan.tokens]
    cases = [Case(q, c) for c in plan.contexts for q in plan.queries]
    wide = replace(widened_shape(TARGET, Width()), layers=plan.layers)
    slim = replace(TARGET, mlp=32)
    require_memory(kv_bytes(slim, max(plan.contexts) + max(plan.queries)))
    products = {s: _measure(plan, wide, s, batches, console) for s in plan.storages}
    attention = _measure(plan, slim, "fp32", cases, console)
    bandwidth = read_bandwidth()
    lanes = build.load_library(build.build(*plan.flags)).ada_vector_lanes()
    title = f"# Kernels with {SETS[lanes]}, {plan.threads} threads"
    rounds = f"Medians of {plan.rounds} rounds{', old and new in turns' if plan.against else ''}."
    read = f"A plain read of {READ_MB} MB: {bandwidth / 1e9:.1f} GB/s."
    tables = (_product_table(plan, products), _attention_table(plan, attention, slim, bandwidth))
    text = "\n\n".join((title, f"{rounds} {read}", *tables)) + "\n"
    say(console, text)
    if plan.out is None:
        return
    plan.out.mkdir(parents=True, exist_ok=True)
    record = {
        "made": made, "set": SETS[lanes], "threads": plan.threads, "bytes_per_s": bandwidth,
        "shapes": {"products": asdict(wide), "attention": asdict(slim)},
        "products": {s: [asdict(row) for row in rows] for s, rows in products.items()},
        "attention": [asdict(row) for row in attention],
    }  # fmt: skip
    write_json(plan.out / f"{SETS[lanes]}.json", record)
    (plan.out / f"{SETS[lanes]}.md").write_text(text)


def _heads(plan: KernelPlan, first: int) -> list[str]:
    """``first``: tokens of the forward that others are compared with, the first one that was asked for."""
    compared = f"x {'one token' if first == 1 else f'{first} tokens'}"
    return ["ms", compared] + (["old ms", "old/new"] if plan.against else [])


def _product_table(plan: KernelPlan, products: dict[Storage, list[Row]]) -> str:
    heads = [f"{storage} {head}" for storage in products for head in _heads(plan, plan.tokens[0])]
    cells = [
        [str(tokens), *(c for rows in products.values() for c in _figures(rows[i], rows[0]))]
        for i, tokens in enumerate(plan.tokens)
    ]
    title = f"## One forward of the widened target ({plan.layers} layers), by tokens"
    return f"{title}\n\n{table(['tokens', *heads], cells, right=True)}"


def kv_bytes(shape: Shape, context: int) -> int:
    """Bytes that the fp32 keys and values of ``context`` tokens take."""
    return 2 * 4 * shape.layers * shape.kv_heads * shape.head_dim * context


def require_memory(kv: int) -> None:
    """Raises UserError if ``kv`` bytes of keys and values, and a quarter more for what comes with them, do
    not fit into free memory: Linux would end this program, or others."""
    free = min(psutil.virtual_memory().available, usable_memory())
    if kv * 5 // 4 > free:
        raise UserError(
            f"keys and values would take {kv / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB of memory are "
            "free: give shorter --contexts"
        )


def _attention_table(plan: KernelPlan, rows: Sequence[Row], shape: Shape, bandwidth: float) -> str:
    """The last column: the cached keys and values, read once, per second, over the read bandwidth."""
    heads = ["context", "queries", *_heads(plan, plan.queries[0]), "of read bandwidth"]
    cells = []
    for row in rows:
        one = next(r for r in rows if r.case.context == row.case.context)
        share = kv_bytes(shape, row.case.context) / (row.ms[NEW] / 1e3) / bandwidth
        case = [str(row.case.context), str(row.case.tokens)]
        cells.append([*case, *_figures(row, one), f"{share:.0%}"])
    title = f"## Attention: {shape.layers} layers with hardly any weights, fp32 KV, one request"
    return f"{title}\n\n{table(heads, cells, right=True)}"


def _figures(row: Row, one: Row) -> list[str]:
    cells = [f"{row.ms[NEW]:.2f}", f"{row.ms[NEW] / one.ms[NEW]:.2f}"]
    return cells if row.ratio is None else [*cells, f"{row.ms[OLD]:.2f}", f"{row.ratio:.2f}"]
