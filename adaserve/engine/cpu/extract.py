"""Reads the weights out of a model that SGLang has loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from adaserve.checkpoints.draft_kind import MTP_TARGET
from adaserve.engine.cpu.params import InputStage, LayerWeights, ModelConfig, ModelWeights
from adaserve.engine.trees.attention import Scores

_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", MTP_TARGET)
# SGLang wraps or replaces these classes for quantisation, LoRA and expert parallelism.
_PLAIN_LAYERS = (
    {"qkv_proj": "QKVParallelLinear", "o_proj": "RowParallelLinear"},  # attention
    {"gate_up_proj": "MergedColumnParallelLinear", "down_proj": "RowParallelLinear"},  # MLP
)


def obstacle(model: Any) -> str | None:
    """None when the lean forward computes what `model` computes, else the reason why it cannot."""
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
    """None when the lean forward computes what SGLang's class of an EAGLE-3 head does, else the reason."""
    if model.model.is_mrope_enabled:
        return "multimodal rotary embedding"
    return next(_common_obstacles(model), None)


def mtp_obstacle(model: Any) -> str | None:
    """None when the lean forward computes what SGLang's class of an MTP layer does, else the reason."""
    return next(_common_obstacles(_mtp_as_model(model)), None)


def _mtp_as_model(model: Any) -> SimpleNamespace:
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

    from adaserve.engine import plain_attention

    yield from plain_attention.obstacles(attention.attn)
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


def read_weights(model: Any) -> tuple[ModelWeights, ModelConfig]:
    """Weights and shape of a supported model; the tensors are the model's own (no copies)."""
    inner, attention = model.model, model.model.layers[0].self_attn
    q_norm = getattr(attention, "q_norm", None)
    config = ModelConfig(
        hidden_size=model.config.hidden_size,
        intermediate_size=inner.layers[0].mlp.down_proj.weight.shape[1],
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        rotary_dim=attention.rotary_emb.rotary_dim,
        vocab_size=model.config.vocab_size,
        norm_eps=inner.norm.variance_epsilon,
        qk_norm_eps=q_norm.variance_epsilon if q_norm is not None else 1e-6,
    )
    embed = _vocab_rows(inner.embed_tokens, config.vocab_size)
    head_rows = getattr(model.config, "draft_vocab_size", None) or config.vocab_size
    ids = getattr(model, "hot_token_id", None)  # of a draft that knows some tokens alone
    weights = ModelWeights(
        embed=embed,
        layers=tuple(_read_layer(layer) for layer in inner.layers),
        final_norm=inner.norm.weight.detach(),
        lm_head=_vocab_rows(model.lm_head, head_rows if ids is None else len(ids)),
        cos_sin=attention.rotary_emb.cos_sin_cache.detach(),
        token_ids=None if ids is None else ids.long().cpu(),
    )
    return weights, config


def read_head(model: Any) -> tuple[ModelWeights, ModelConfig]:
    """Weights and shape of SGLang's ``LlamaForCausalLMEagle3``, without its projection."""
    weights, config = read_weights(model)
    norms = [layer.hidden_norm.weight.detach() for layer in model.model.layers]
    first, *later = weights.layers
    # Behind the first layer there are no embeddings, and the norm of the hidden states is all there is.
    layers = (
        replace(first, hidden_norm=norms[0]),
        *(replace(layer, input_norm=norm) for layer, norm in zip(later, norms[1:], strict=True)),
    )
    return replace(weights, layers=layers, norm_output=model.model.norm_output), config


def read_mtp(model: Any) -> tuple[ModelWeights, ModelConfig]:
    """Weights and shape of SGLang's ``MiMoMTP``."""
    weights, config = read_weights(_mtp_as_model(model))
    inner = model.model
    of_hidden, of_token = inner.input_proj.weight.detach().chunk(2, dim=1)
    norms = (inner.token_layernorm.weight.detach(), inner.hidden_layernorm.weight.detach())
    return replace(weights, stage=InputStage(*norms, torch.cat((of_token, of_hidden), dim=1))), config


def _vocab_rows(module: Any, vocab_size: int) -> torch.Tensor:
    # SGLang pads the vocabulary; the padding rows must never win an argmax.
    return module.weight.detach()[:vocab_size]


def _read_layer(layer: Any) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp

    def optional(owner: Any, name: str) -> torch.Tensor | None:
        value = getattr(owner, name, None)
        return None if value is None else value.detach()

    return LayerWeights(
        input_norm=layer.input_layernorm.weight.detach(),
        qkv=attention.qkv_proj.weight.detach(),
        qkv_bias=optional(attention.qkv_proj, "bias"),
        q_norm=optional(getattr(attention, "q_norm", None), "weight"),
        k_norm=optional(getattr(attention, "k_norm", None), "weight"),
        o=attention.o_proj.weight.detach(),
        o_bias=optional(attention.o_proj, "bias"),
        post_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=mlp.gate_up_proj.weight.detach(),
        down=mlp.down_proj.weight.detach(),
    )
