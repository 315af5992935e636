"""The attention heads of a model, as SGLang has built it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from adaserve.engine.plain_attention import plain_layers
from adaserve.engine.trees.attention import Scores
from adaserve.errors import UnsupportedError


@dataclass(frozen=True)
class HeadShape:
    """Attention heads of one rank, and types."""

    q_heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    plain_scores: bool = True

    @staticmethod
    def of(runner: Any) -> HeadShape:
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
        dtype = runner.token_to_kv_pool.dtype
        if dtype.itemsize == 1:
            raise UnsupportedError("an 8-bit KV cache is not supported: remove --kv-cache-dtype")
        plain_scores = all(Scores.of(layer).are_plain for layer in layers)
        return HeadShape(q_heads, kv_heads, dim, scaling, runner.dtype, dtype, plain_scores)
