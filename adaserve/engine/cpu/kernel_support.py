"""Which models our kernels compute: those that differ in nothing from what they know."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from adaserve.checkpoints.draft_kind import MTP_TARGET
from adaserve.engine.trees.attention import Scores

_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", MTP_TARGET)
# SGLang wraps or replaces these classes for quantisation, LoRA and expert parallelism.
_PLAIN_LAYERS = (
    {"qkv_proj": "QKVParallelLinear", "o_proj": "RowParallelLinear"},  # attention
    {"gate_up_proj": "MergedColumnParallelLinear", "down_proj": "RowParallelLinear"},  # MLP
)


def obstacle(model: Any) -> str | None:
    """None when our own forward computes what `model` computes, else the reason why it cannot."""
    return next(_obstacles(model), None)


def _obstacles(model: Any) -> Iterator[str]:
    name = type(model).__name__
    if name not in _ARCHITECTURES:
        yield f"architecture {name} (known: {', '.join(_ARCHITECTURES)})"
        return
    inner, config = model.model, model.config
    if getattr(inner, "start_layer", 0) or inner.end_layer != config.num_hidden_layers:
        yield "pipeline parallelism"
    yield from _common_obstacles(model)


def head_obstacle(model: Any) -> str | None:
    """None when our own forward computes what SGLang's class of an EAGLE-3 head does, else the reason."""
    if model.model.is_mrope_enabled:
        return "multimodal rotary embedding"
    return next(_common_obstacles(model), None)


def mtp_obstacle(model: Any) -> str | None:
    """None when our own forward computes what SGLang's class of an MTP layer does, else the reason."""
    return next(_common_obstacles(mtp_as_model(model)), None)


def mtp_as_model(model: Any) -> SimpleNamespace:
    """Its only layer, between embedding and final norm, named as in a language model."""
    inner = model.model
    layers = SimpleNamespace(
        embed_tokens=inner.embed_tokens, layers=[inner.mtp_block], norm=inner.final_layernorm
    )
    ids = getattr(model, "hot_token_id", None)
    return SimpleNamespace(model=layers, lm_head=model.lm_head, config=model.config, hot_token_id=ids)


def _common_obstacles(model: Any) -> Iterator[str]:
    inner, config = model.model, model.config
    for module in (inner.embed_tokens, model.lm_head):
        if type(module).__name__ not in ("VocabParallelEmbedding", "ParallelLMHead"):
            yield f"{type(module).__name__} in place of a plain embedding or head"
        elif not module.weight.is_floating_point():
            yield "quantized embedding or head"
    if getattr(model.lm_head, "bias", None) is not None:
        yield "a bias on the LM head"
    for key in ("final_logit_softcapping", "logit_scale"):
        if getattr(config, key, None):
            yield f"{key} on the logits"
    for layer in inner.layers:
        for owner in (layer.self_attn, layer.mlp):
            yield from _linear_obstacles(owner)
        yield from _attention_obstacles(layer.self_attn)


def _linear_obstacles(owner: Any) -> Iterator[str]:
    for name, class_name in _PLAIN_LAYERS[type(owner).__name__.endswith("MLP")].items():
        module: Any = getattr(owner, name, None)
        if type(module).__name__ != class_name:
            yield f"{name} is a {type(module).__name__}"
        elif type(module.quant_method).__name__ != "UnquantizedLinearMethod":
            yield f"{name} is quantized"
        elif module.weight.shape != (module.output_size, module.input_size):
            yield "tensor parallelism"  # this rank's part of the matrix only
        elif name in ("gate_up_proj", "down_proj") and getattr(module, "bias", None) is not None:
            yield f"a bias on {name}"


def _attention_obstacles(attention: Any) -> Iterator[str]:
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    from adaserve.engine import model_support

    yield from model_support.obstacles(attention.attn)
    if not Scores.of(attention.attn).are_plain:
        yield "a sliding window or capped scores"
    rope = attention.rotary_emb
    cache = getattr(rope, "cos_sin_cache", None)
    # Classes with another forward (multimodal, dual chunk, long/short factors) do more than look up a row.
    plain = isinstance(rope, RotaryEmbedding) and type(rope).forward_native is RotaryEmbedding.forward_native
    if not plain or cache is None or cache.dim() != 2 or cache.shape[1] != rope.rotary_dim:
        yield f"rotary embedding {type(rope).__name__}"
    elif not rope.is_neox_style:
        yield "interleaved rotary embedding"
