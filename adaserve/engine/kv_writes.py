"""Writes keys and values into SGLang's KV pools, and says what 8-bit ones were divided by."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor


def write_kv(pool: Any, layer: RadixAttention, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Puts what a layer has made of some tokens at their ``slots``, int64 [T], of SGLang's ``pool``. In 8
    bits it is divided by scales that came with a checkpoint, as SGLang's own backends do it."""
    scales = (layer.k_scale, layer.v_scale) if pool.dtype.itemsize == 1 else (None, None)
    pool.set_kv_buffer(layer, KVWriteLoc(slots, None), keys, values, *scales)


def scales_of(pool: Any, layer: RadixAttention) -> tuple[float, float]:
    """What keys and values that ``write_kv`` has written are to be multiplied by."""
    if pool.dtype.itemsize > 1 or layer.k_scale_float is None:
        return 1.0, 1.0
    return layer.k_scale_float, layer.v_scale_float
