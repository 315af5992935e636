"""Which models are served, by the attention that our code computes: full or sliding-window causal
attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.rotary_embedding.rope_variant import Phi3LongRoPEScaledRotaryEmbedding

from adaserve.engine.trees.attention import Scores
from adaserve.errors import UnsupportedError


def obstacles(layer: RadixAttention) -> Iterator[str]:
    """What a layer asks for beyond that."""
    if layer.use_irope:
        yield "tokens that see only their own chunk of the text"
    if layer.xai_temperature_len > 0 or layer.pos_encoding_mode != "NONE":
        yield "scores that depend on positions"
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        yield f"scores that are capped by {layer.logit_capping_method}"
    if layer.v_head_dim != layer.qk_head_dim:
        yield "values of another width than keys"
    if layer.is_cross_attention or layer.attn_type is not AttentionType.DECODER:
        yield "tokens that see later ones or another text"


def plain_layers(model: torch.nn.Module) -> list[RadixAttention]:
    """Its attention layers. Raises UnsupportedError where it asks for more."""
    layers = [m for m in model.modules() if isinstance(m, RadixAttention)]
    if found := sorted({what for layer in layers for what in obstacles(layer)}):
        raise UnsupportedError(
            f"{type(model).__name__} is not supported: its attention has {', and '.join(found)}"
        )
    if len({(layer.tp_k_head_num, layer.qk_head_dim) for layer in layers}) > 1:
        raise UnsupportedError(
            f"{type(model).__name__} is not supported: its layers have keys of different sizes"
        )
    return layers


def require_supported_model(model_config: Any) -> None:
    """Raises UnsupportedError for SGLang's ``ModelConfig`` of a model with state-space, convolution or linear
    attention layers, whose state goes forward with every token, also those of candidates, and never back; or
    that writes what is no text (``RotaryShift``)."""
    reasons = {
        "some of its layers keep a state, which would hold candidates that were not accepted": (
            mambaish_config(model_config) is not None
        ),
        "it writes images, whose tokens have positions of their own": (
            "GlmImageForConditionalGeneration" in model_config.hf_config.architectures
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            name = ", ".join(model_config.hf_config.architectures)
            raise UnsupportedError(
                f"{name} is not supported: {reason}. Choose another model, or serve it without "
                "--speculative-algorithm ADASERVE"
            )


def require_own_positions(model: torch.nn.Module, context_len: int, deepest: int) -> None:
    """Raises UnsupportedError where other tokens may change how a position is read. ``deepest``: tokens of
    a candidate tree behind its root.

    Long RoPE has other factors beyond its first positions. In SGLang one token beyond them makes all that are
    computed with it, those of other requests too, be read by these.
    """
    ropes = (m for m in model.modules() if isinstance(m, Phi3LongRoPEScaledRotaryEmbedding))
    first = min((rope.original_max_position_embeddings for rope in ropes), default=None)
    if first is not None and context_len + deepest > first:
        raise UnsupportedError(
            f"{type(model).__name__} scales positions beyond {first} by other factors (longrope), and SGLang "
            f"then applies these to all requests of a batch: use --context-length {first - deepest} or less"
        )


def require_windows(model: torch.nn.Module, deepest: int, leaves_out: bool) -> None:
    """Raises UnsupportedError where a layer's sliding window is shorter than a candidate tree (``deepest``
    tokens behind its root), or where drafts leave out part of the context: ``attend`` counts windows by the
    places of keys in their list."""
    windows = [window for layer in plain_layers(model) if (window := Scores.of(layer).window)]
    name = type(model).__name__
    if windows and leaves_out:
        raise UnsupportedError(
            f"{name} has layers with sliding windows, which no draft window shortens further: use "
            "--draft-window 0, and not --drafts self"
        )
    if windows and min(windows) < deepest:
        raise UnsupportedError(
            f"{name} has layers that see {min(windows)} earlier tokens, fewer than candidate trees are deep: "
            f"use --max-depth {min(windows)} or less"
        )


def require_no_more(asked: Mapping[str, Any]) -> None:
    """Raises UnsupportedError where a model gives its attention something that we don't compute with."""
    if wanted := sorted(name for name, value in asked.items() if value is not None):
        raise UnsupportedError(f"attention with {', '.join(wanted)} is not supported")
