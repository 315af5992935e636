"""Which attention our code computes: tokens that see all earlier ones of their text, and no more."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention


def obstacles(layer: RadixAttention) -> Iterator[str]:
    """What a layer asks for beyond that."""
    if layer.sliding_window_size > 0:
        yield "a sliding window"
    if layer.logit_cap or layer.xai_temperature_len > 0 or layer.pos_encoding_mode != "NONE":
        yield "scores that are capped or depend on positions"
    if layer.v_head_dim != layer.qk_head_dim:
        yield "values of another width than keys"
    if layer.is_cross_attention or layer.attn_type is not AttentionType.DECODER:
        yield "tokens that see later ones or another text"


def plain_layers(model: torch.nn.Module) -> list[RadixAttention]:
    """Its attention layers. Raises ValueError where it asks for more."""
    layers = [m for m in model.modules() if isinstance(m, RadixAttention)]
    if found := sorted({what for layer in layers for what in obstacles(layer)}):
        raise ValueError(f"{type(model).__name__} is not supported: its attention has {', and '.join(found)}")
    return layers
