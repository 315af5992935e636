"""Latency and memory from data-sheet figures, for planning without a GPU at hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from adaserve.scheduler.costs.latency import ForwardCost, LatencyModel

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """Dense bf16 peak (not the sparse one), memory bandwidth and size of one GPU."""

    name: str
    flops: float
    bytes_per_s: float
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a forward reads and computes, in bf16."""

    name: str
    parameters: float
    layers: int
    kv_bytes_per_token: float
    heads_dim: int  # query heads x their dimension


GPUS = {
    "a100": GpuSpec("A100 80GB SXM", 312e12, 2.039e12, 80e9),
    "h100": GpuSpec("H100 80GB SXM", 989e12, 3.35e12, 80e9),
    "h200": GpuSpec("H200 141GB SXM", 989e12, 4.8e12, 141e9),
    "l40s": GpuSpec("L40S 48GB", 362e12, 0.864e12, 48e9),
}
MODELS = {
    "llama-3.1-8b": ModelSpec("Llama-3.1-8B", 8.03e9, 32, 2 * 2 * 32 * 8 * 128, 4096),
    "llama-3.1-70b": ModelSpec("Llama-3.1-70B", 70.6e9, 80, 2 * 2 * 80 * 8 * 128, 8192),
    "qwen2.5-32b": ModelSpec("Qwen2.5-32B", 32.8e9, 64, 2 * 2 * 64 * 8 * 128, 5120),
    "llama-3.2-1b": ModelSpec("Llama-3.2-1B", 1.24e9, 16, 2 * 2 * 16 * 8 * 64, 2048),
    "qwen2.5-0.5b": ModelSpec("Qwen2.5-0.5B", 0.49e9, 24, 2 * 2 * 24 * 2 * 64, 896),
}
DRAFT_OF = {"llama-3.1-8b": "llama-3.2-1b", "llama-3.1-70b": "llama-3.2-1b", "qwen2.5-32b": "qwen2.5-0.5b"}

BANDWIDTH_SHARE = 0.82  # of the data sheet, reached by weight streaming
COMPUTE_SHARE = 0.62  # of the dense peak; with it 70B on 4x A100 has the published 0.18 ms per token
LAYER_LAUNCH_S = 20e-6
ALL_REDUCE_S = 50e-6  # two per layer under tensor parallelism; small messages are latency-bound
DRAFT_SAMPLING_S = 0.3e-3
USABLE_MEMORY = 0.9


def forward_cost(model: ModelSpec, gpu: GpuSpec, tp: int) -> ForwardCost:
    """Seconds of a forward, additive in memory and compute time as the published table is (sharpness 1).

    A token's attention to a cached one is 2 FLOPs each for its score and its value, per layer and dimension.
    """
    layer = LAYER_LAUNCH_S + (2 * ALL_REDUCE_S if tp > 1 else 0.0)
    bandwidth = tp * gpu.bytes_per_s * BANDWIDTH_SHARE
    return ForwardCost(
        fixed_s=model.layers * layer,
        weights_s=2 * model.parameters / bandwidth,
        per_token_s=2 * model.parameters / (tp * gpu.flops * COMPUTE_SHARE),
        per_context_s=model.kv_bytes_per_token / bandwidth,
        per_pair_s=4 * model.layers * model.heads_dim / (tp * gpu.flops * COMPUTE_SHARE),
    )


def hardware_latency(model: str, gpu: str, tp: int) -> LatencyModel:
    """The target on ``tp`` GPUs, its usual draft on one. Raises ValueError, which lists what is known."""
    (target, drafter), device = _pair(model), _lookup(GPUS, gpu, "GPU")
    if tp < 1:
        raise ValueError(f"tensor parallel degree must be >= 1, got {tp}")
    base = forward_cost(drafter, device, 1)
    draft = replace(base, fixed_s=base.fixed_s + DRAFT_SAMPLING_S)
    return LatencyModel(draft, forward_cost(target, device, tp), 0.0, f"{target.name} on {tp}x {device.name}")


def kv_capacity_tokens(model: str, gpu: str, tp: int) -> int:
    """Tokens of KV cache that fit next to the weights. Raises ValueError when the weights don't fit."""
    (target, draft), device = _pair(model), _lookup(GPUS, gpu, "GPU")
    free = USABLE_MEMORY * tp * device.memory_bytes - 2 * (target.parameters + draft.parameters)
    if free <= 0:
        raise ValueError(
            f"{target.name} does not fit on {tp}x {device.name}; raise the tensor parallel degree"
        )
    return int(free / (target.kv_bytes_per_token + draft.kv_bytes_per_token))


def _pair(model: str) -> tuple[ModelSpec, ModelSpec]:
    """A target and its usual draft."""
    draft = _lookup(DRAFT_OF, model, "target model")
    return _lookup(MODELS, model, "model"), MODELS[draft]


def _lookup(table: dict[str, T], name: str, what: str) -> T:
    if name.lower() not in table:
        raise ValueError(f"unknown {what} {name!r}; known: {', '.join(table)}")
    return table[name.lower()]
