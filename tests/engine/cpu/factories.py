"""Tiny random models, their Hugging Face twins, and a paged pool to run them over."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from adaserve.engine.cpu import (
    Inputs,
    LayerWeights,
    LlamaModel,
    ModelConfig,
    ModelWeights,
)
from adaserve.engine.trees.attention import TreeAttentionPlan

MAX_POSITIONS = 512


def hf_model(kind: str = "llama", seed: int = 0, **overrides: Any) -> Any:
    """A random Hugging Face model in fp32; `kind` is llama, qwen2 or qwen3."""
    shape: dict[str, Any] = dict(
        vocab_size=131, hidden_size=96, intermediate_size=150, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=24, max_position_embeddings=MAX_POSITIONS, tie_word_embeddings=True,
        initializer_range=0.2, attn_implementation="eager",
    )  # fmt: skip
    shape.update(overrides)
    if kind == "qwen2":
        shape.pop("head_dim")
    torch.manual_seed(seed)
    config = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}[kind]
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**shape))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            parameter.copy_(parameter.half())  # every storage but bf16 is then exact
    return model.float().eval()


def read_hf(model: Any) -> tuple[ModelWeights, ModelConfig]:
    c, inner = model.config, model.model
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    positions = torch.arange(c.max_position_embeddings)[None]
    cos, sin = inner.rotary_emb(torch.zeros(1), positions)
    half = cos.shape[-1] // 2
    config = ModelConfig(
        c.hidden_size, c.intermediate_size, c.num_attention_heads, c.num_key_value_heads, head_dim,
        2 * half, c.vocab_size, c.rms_norm_eps, c.rms_norm_eps,
    )  # fmt: skip
    weights = ModelWeights(
        inner.embed_tokens.weight.data,
        tuple(_read_layer(layer) for layer in inner.layers),
        inner.norm.weight.data,
        model.lm_head.weight.data,
        torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1).contiguous(),
    )
    return weights, config


def _read_layer(layer: Any) -> LayerWeights:
    a, mlp = layer.self_attn, layer.mlp
    projections = (a.q_proj, a.k_proj, a.v_proj)
    biased = a.q_proj.bias is not None
    q_norm, k_norm = (getattr(getattr(a, name, None), "weight", None) for name in ("q_norm", "k_norm"))
    return LayerWeights(
        layer.input_layernorm.weight.data,
        torch.cat([p.weight.data for p in projections]),
        torch.cat([p.bias.data for p in projections]) if biased else None,
        q_norm, k_norm, a.o_proj.weight.data, getattr(a.o_proj, "bias", None),
        layer.post_attention_layernorm.weight.data,
        torch.cat([mlp.gate_proj.weight.data, mlp.up_proj.weight.data]), mlp.down_proj.weight.data,
    )  # fmt: skip


@dataclass
class Pool:
    """A paged KV pool whose slots are handed out in a shuffled order."""

    config: ModelConfig
    layers: int
    slots: int = 1024
    dtype: torch.dtype = torch.float32
    k: list[torch.Tensor] = field(init=False)
    v: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        shape = (self.slots, self.config.num_kv_heads, self.config.head_dim)
        self.k = [torch.zeros(shape, dtype=self.dtype) for _ in range(self.layers)]
        self.v = [torch.zeros(shape, dtype=self.dtype) for _ in range(self.layers)]
        self._free = torch.randperm(self.slots, generator=torch.Generator().manual_seed(3)).tolist()

    def take(self, count: int) -> list[int]:
        taken, self._free = self._free[:count], self._free[count:]
        return taken


@dataclass
class Chunk:
    """One request's share of a forward: new tokens, their positions and slots, and the slots before them."""

    tokens: list[int]
    positions: list[int]
    slots: list[int]
    prefix: list[int]
    mask: torch.Tensor | None = None  # bool [len(tokens), len(prefix) + len(tokens)]


def run(llama: LlamaModel, pool: Pool, chunks: list[Chunk], masked: bool | None = None) -> torch.Tensor:
    """Hidden states of all chunks in one forward."""
    qo, kv, indices = [0], [0], []
    for chunk in chunks:
        qo.append(qo[-1] + len(chunk.tokens))
        kv.append(kv[-1] + len(chunk.prefix) + len(chunk.tokens))
        indices += chunk.prefix + chunk.slots
    use_mask = masked if masked is not None else any(c.mask is not None for c in chunks)
    mask = torch.cat([_mask(c).flatten() for c in chunks]) if use_mask else None
    plan = TreeAttentionPlan(
        torch.tensor(qo, dtype=torch.int32), torch.tensor(kv, dtype=torch.int32),
        torch.tensor(indices, dtype=torch.int32), mask,
    )  # fmt: skip

    def flat(name: str) -> torch.Tensor:
        return torch.tensor([x for c in chunks for x in getattr(c, name)], dtype=torch.int64)

    inputs = Inputs(flat("tokens"), flat("positions"), flat("slots"), plan)
    return llama.forward(inputs, pool.k, pool.v).clone()


def _mask(chunk: Chunk) -> torch.Tensor:
    if chunk.mask is not None:
        return chunk.mask
    q, kv = len(chunk.tokens), len(chunk.prefix) + len(chunk.tokens)
    return torch.ones(q, kv, dtype=torch.bool).tril(kv - q)


def tree_mask(parents: list[int], prefix: int) -> torch.Tensor:
    """Node i of the tree sees the prefix, its ancestors and itself; the root's parent is -1."""
    mask = torch.zeros(len(parents), prefix + len(parents), dtype=torch.bool)
    mask[:, :prefix] = True
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
        mask[node, prefix + node] = True
    return mask


def path_to(node: int, parents: list[int]) -> list[int]:
    """Nodes from the root down to `node`."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]
