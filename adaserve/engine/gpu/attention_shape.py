"""The attention heads of a model, as SGLang has built it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from adaserve.engine.model_support import plain_layers
from adaserve.engine.trees.attention import Scores
from adaserve.errors import UnsupportedError

KEPT = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)
"""Types of keys and values in a KV cache."""


@dataclass(frozen=True)
class AttentionShape:
    """Attention heads of one rank, and types."""

    q_heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    plain_scores: bool = True

    @staticmethod
    def of(runner: Any) -> AttentionShape:
        """Of a ``ModelRunner``. Raises UnsupportedError for attention that a plain mask doesn't describe."""
        layers = plain_layers(runner.model)
        shapes = {(a.tp_q_head_num, a.tp_k_head_num, a.qk_head_dim, a.scaling) for a in layers}
        if len(shapes) != 1:
            raise UnsupportedError(f"layers with different attention are not supported: {sorted(shapes)}")
        q_heads, kv_heads, dim, scaling = shapes.pop()
        if getattr(runner.token_to_kv_pool, "use_hnd", False):
            raise UnsupportedError(
                "a KV cache with heads before pages is not supported: unset SGLANG_USE_HND_KVCACHE"
            )
        pool = runner.token_to_kv_pool
        if pool.dtype not in KEPT or getattr(pool, "k_scale_buffer", None) is not None:
            raise UnsupportedError(
                f"a KV cache of {runner.kv_cache_dtype_str} is not supported: use --kv-cache-dtype auto, "
                "bf16, fp8_e4m3 or fp8_e5m2"
            )
        plain_scores = all(Scores.of(layer).are_plain for layer in layers)
        return AttentionShape(q_heads, kv_heads, dim, scaling, runner.dtype, pool.dtype, plain_scores)

    @property
    def needs_own_kernel(self) -> bool:
        """Whether FlashInfer, given a mask and one scaling for all layers, computes something else."""
        return not self.plain_scores or self.kv_dtype.itemsize == 1
