"""SGLang's own small kernels that the checked servers use: compiled side by side, and compared with torch.

Left alone, a server compiles each when it first calls it, one after the other. And all servers use the same
ones, so that texts which agree do not show whether they are right.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

DTYPE, HEAD_DIM = torch.float16, 64
ROW_BYTES = (256, 1024, 2048)
"""Of a token's keys in one layer of the embedded models: of the small ones, the large draft and target."""

ROWS, HIDDEN, HEADS, SLOTS, EPSILON = 17, 4096, 8, 64, 1e-6
BOUND = 4e-3
"""Of a difference, divided by 1 plus what is right: a few roundings of fp16."""


@dataclass(frozen=True)
class Operators:
    """As SGLang's layers call them."""

    rmsnorm: Callable[..., Tensor]  # (x, weight, epsilon)
    fused_add_rmsnorm: Callable[..., None]  # (x, residual, weight, epsilon), in place
    silu_and_mul: Callable[..., Any]  # (x, out)
    rope: Callable[..., None]  # q, k, cos_sin_cache, positions, is_neox, in place


def operators(device: torch.device) -> tuple[float, list[dict[str, Any]]]:
    """Compiles and compares those that torch's operators can replace; seconds of compilers, and what was
    found. Raises RuntimeError with the compiler's words."""
    from sgl_kernel import fused_add_rmsnorm, rmsnorm
    from sglang.kernels.ops.activation.activation import activation_module, silu_and_mul
    from sglang.kernels.ops.attention.clamp_position import _jit_clamp_position_module
    from sglang.kernels.ops.attention.rope import (
        _jit_fused_rope_module,
        apply_rope_with_cos_sin_cache_inplace,
    )

    seconds = _compiled(
        partial(activation_module, DTYPE),
        partial(_jit_fused_rope_module, True, HEAD_DIM, DTYPE, DTYPE),
        partial(_jit_clamp_position_module, torch.int64),
    )
    served = Operators(rmsnorm, fused_add_rmsnorm, silu_and_mul, apply_rope_with_cos_sin_cache_inplace)
    return seconds, check(served, device)


def writes(device: torch.device) -> tuple[float, list[dict[str, Any]]]:
    """The same for the others: writes of keys and values, and STANDALONE's trees, which are compiled only."""
    from sglang.kernels.ops.kvcache.kvcache import _jit_kvcache_module, store_cache
    from sglang.kernels.ops.speculative.tree import _jit_tree_module

    by_size = (partial(_jit_kvcache_module, size, size, 0) for size in ROW_BYTES)
    return _compiled(*by_size, _jit_tree_module), [check_writes(store_cache, device)]


def prefill_graphs(device: torch.device) -> dict[str, Any]:
    """How SGLang captures a prefill: graphs, between which the host calls what depends on the requests."""
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
        BreakableCUDAGraph,
        BreakableCUDAGraphCapture,
        eager_on_graph,
    )

    random = partial(_random, torch.Generator().manual_seed(0), device)
    x, first, second, added = random(ROWS, SLOTS), random(SLOTS, SLOTS), random(SLOTS, SLOTS), [0.0]

    @eager_on_graph
    def between(x: Tensor) -> Tensor:
        return x + added[0]

    def forward() -> Tensor:
        return between(x @ first / 8) @ second / 8

    forward()
    torch.cuda.synchronize(device)
    graph = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph, torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)):
        out = forward()
    torch.cuda.synchronize(device)
    pairs = []
    for number in (1.0, 2.0):
        added[0] = number
        x.copy_(random(ROWS, SLOTS))
        graph.replay()
        pairs.append((out.clone(), (x.float() @ first.float() / 8 + number) @ second.float() / 8))
    return _found("prefills", *pairs)


def _compiled(*builders: Callable[[], Any]) -> float:
    """Seconds that it took; next to none for what is there. Raises RuntimeError with the compiler's words."""
    from sglang.kernels.jit.utils import parallel_compile

    start_s = time.perf_counter()
    parallel_compile(builders)
    return time.perf_counter() - start_s


def _random(generator: torch.Generator, device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator).to(device, DTYPE)


def _found(name: str, *pairs: tuple[Tensor, Tensor]) -> dict[str, Any]:
    worst = torch.stack([((a.float() - b).abs() / (1 + b.abs())).max() for a, b in pairs]).max().item()
    return {"name": name, "difference": worst, "right": worst < BOUND}


def check(operators: Operators, device: torch.device) -> list[dict[str, Any]]:
    """The largest difference of each operator from torch in fp32."""
    generator = torch.Generator().manual_seed(0)
    random = partial(_random, generator, device)
    x, residual, weight = random(ROWS, HIDDEN), random(ROWS, HIDDEN), random(HIDDEN)
    normed = operators.rmsnorm(x, weight, EPSILON)
    results = [_found("rmsnorm", (normed, _norm(x.float(), weight)))]
    total = x.float() + residual.float()
    operators.fused_add_rmsnorm(x, residual, weight, EPSILON)
    results.append(_found("fused_add_rmsnorm", (x, _norm(total, weight)), (residual, total)))

    wide = random(ROWS, 2 * HIDDEN)
    out = torch.empty(ROWS, HIDDEN, dtype=DTYPE, device=device)
    operators.silu_and_mul(wide, out)
    gate, up = wide.float().chunk(2, dim=-1)
    results.append(_found("silu_and_mul", (out, functional.silu(gate) * up)))

    # As a part of wider rows, which is how models compute them.
    q, k, _ = random(ROWS, 3 * HEADS, HEAD_DIM).split(HEADS, dim=1)
    angles = torch.rand(SLOTS, HEAD_DIM // 2, generator=generator).to(device) * 6
    positions = torch.randperm(SLOTS, generator=generator)[:ROWS].to(device)
    right = [_rotated(values.float(), angles[positions]) for values in (q, k)]
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    operators.rope(q=q, k=k, cos_sin_cache=table, positions=positions, is_neox=True)
    results.append(_found("rope", *zip((q, k), right, strict=True)))

    return results


def check_writes(store_cache: Callable[..., None], device: torch.device) -> dict[str, Any]:
    """The same for ``store_cache``: (k, v, k_cache, v_cache, slots)."""
    generator = torch.Generator().manual_seed(0)
    random = partial(_random, generator, device)
    # As a part of wider rows, which is how models compute them.
    k, v = random(ROWS, 2 * HEADS, HEAD_DIM).split(HEADS, dim=1)
    caches = random(SLOTS, HEADS * HEAD_DIM), random(SLOTS, HEADS * HEAD_DIM)
    slots = 1 + torch.randperm(SLOTS - 1, generator=generator)[:ROWS].to(device)
    rows = [values.reshape(ROWS, -1) for values in (k, v)]
    expected = [cache.index_copy(0, slots, new).float() for cache, new in zip(caches, rows, strict=True)]
    store_cache(*(values.flatten(1) for values in (k, v)), *caches, slots)
    return _found("store_cache", *zip(caches, expected, strict=True))


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * weight.float()


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    """fp32 [T, heads, D] turned by ``angles`` [T, D / 2], as GPT-NeoX pairs dimensions."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
