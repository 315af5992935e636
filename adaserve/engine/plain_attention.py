"""Which attention our code computes: tokens that see all earlier ones of their text, and no more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention


def obstacles(layer: RadixAttention) -> Iterator[str]:
    """What a layer asks for beyond that."""
    if layer.sliding_window_size > 0:
        yield "a sliding window"
    if layer.use_irope:
        yield "tokens that see their own chunk of the text only"
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


def require_no_state(model_config: Any) -> None:
    """Raises ValueError for SGLang's ``ModelConfig`` of a model with state-space, convolution or linear
    attention layers. Their state goes forward with every token, also those of candidates, and never back."""
    if mambaish_config(model_config) is not None:
        name = ", ".join(model_config.hf_config.architectures)
        raise ValueError(
            f"{name} is not supported: some of its layers keep a state, which would hold candidates that "
            "were not accepted. Choose another model, or serve it without --speculative-algorithm ADASERVE"
        )


def require_no_more(asked: Mapping[str, Any]) -> None:
    """Raises ValueError where a model gives its attention something that we don't compute with."""
    if wanted := sorted(name for name, value in asked.items() if value is not None):
        raise ValueError(f"attention with {', '.join(wanted)} is not supported")
