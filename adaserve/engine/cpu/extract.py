"""Reads the weights out of a model that SGLang has loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from adaserve.engine.cpu.kernel_support import mtp_as_model
from adaserve.engine.cpu.params import InputStage, LayerWeights, ModelConfig, ModelWeights


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
    weights, config = read_weights(mtp_as_model(model))
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
