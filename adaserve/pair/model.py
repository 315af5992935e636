"""The pair's network for training: a Llama, written for speed on a CPU, that reads and writes HF folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from adaserve.checkpoints.tensors import save_tensors
from adaserve.host.files import write_json
from adaserve.pair.folders import PLAIN_NAME
from adaserve.pair.packed import read_weights
from adaserve.pair.shape import NORM_EPS, Shape, hf_config, require_family, shape_of


class Block(nn.Module):
    """Attention and MLP with fused inputs: a CPU prefers fewer, larger products."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        queries, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.attn_norm, self.mlp_norm = (nn.RMSNorm(shape.hidden, NORM_EPS) for _ in range(2))
        self.qkv = nn.Linear(shape.hidden, queries + 2 * kv, bias=False)
        self.out = nn.Linear(queries, shape.hidden, bias=False)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.mlp, bias=False)
        self.down = nn.Linear(shape.mlp, shape.hidden, bias=False)
        # Rows of what is fused for speed, and separate in checkpoints and for the optimizer.
        self.parts = {"qkv": [queries, kv, kv], "gate_up": [shape.mlp, shape.mlp]}

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.heads(self.attn_norm(x))
        k, v = self.for_all_heads(rotate(k, cos, sin), v)
        mixed = fn.scaled_dot_product_attention(rotate(q, cos, sin), k, v, is_causal=True)
        return self.finish(x, mixed)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, [rows, heads, length, head_dim], of tokens [rows, length, hidden]."""
        shape = self.shape
        qkv = self.qkv(x).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
        return qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)

    def for_all_heads(self, *kv: Tensor) -> list[Tensor]:
        """Keys or values, once for each query head that reads them."""
        return [t.repeat_interleave(self.shape.heads // self.shape.kv_heads, 1) for t in kv]

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The block's output from its input and what its heads have gathered, [rows, heads, length,
        head_dim]."""
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(fn.silu(gate) * up)


def most_used_columns(block: Block, mlp: int) -> tuple[Tensor, Tensor]:
    """The rows of a block's gate_up and the columns of its down that belong to the ``mlp`` columns of its MLP
    with the largest weights."""
    gate, up = block.gate_up.weight.detach().chunk(2)
    down = block.down.weight.detach()
    use = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    columns = use.topk(mlp).indices.sort().values
    return torch.cat((gate[columns], up[columns])), down[:, columns]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rope(length: int, shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position's angles, [length, half the head size] each."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    frequency = shape.rope_theta**-exponents
    angle = torch.arange(length, dtype=torch.float32)[:, None] * frequency
    return angle.cos(), angle.sin()


class TinyLlama(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, NORM_EPS)
        self._initialize()

    def _initialize(self) -> None:
        nn.init.normal_(self.embed.weight, std=0.02)
        for name, weight in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                nn.init.zeros_(weight)  # every block starts as the identity
            elif name.endswith(("qkv.weight", "gate_up.weight")):
                nn.init.normal_(weight, std=self.shape.hidden**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, [batch, length, vocab]."""
        cos, sin = rope(tokens.shape[1], self.shape)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return fn.linear(self.norm(x), self.embed.weight)


def _split_names(shape: Shape, layer: int) -> dict[str, list[tuple[str, int]]]:
    """For one block: our fused weight -> Hugging Face's names and their row counts."""
    prefix, kv = f"model.layers.{layer}.", shape.kv_heads * shape.head_dim
    own = f"blocks.{layer}."
    return {
        own + "attn_norm.weight": [(prefix + "input_layernorm.weight", shape.hidden)],
        own + "mlp_norm.weight": [(prefix + "post_attention_layernorm.weight", shape.hidden)],
        own + "qkv.weight": [
            (prefix + "self_attn.q_proj.weight", shape.heads * shape.head_dim),
            (prefix + "self_attn.k_proj.weight", kv),
            (prefix + "self_attn.v_proj.weight", kv),
        ],
        own + "out.weight": [(prefix + "self_attn.o_proj.weight", shape.hidden)],
        own + "gate_up.weight": [
            (prefix + "mlp.gate_proj.weight", shape.mlp),
            (prefix + "mlp.up_proj.weight", shape.mlp),
        ],
        own + "down.weight": [(prefix + "mlp.down_proj.weight", shape.hidden)],
    }


def _names(shape: Shape) -> dict[str, list[tuple[str, int]]]:
    names = {
        "embed.weight": [("model.embed_tokens.weight", shape.vocab)],
        "norm.weight": [("model.norm.weight", shape.hidden)],
    }
    for layer in range(shape.layers):
        names |= _split_names(shape, layer)
    return names


def save_hf(model: TinyLlama, folder: Path) -> None:
    """Writes config.json and float16 weights; values are the same when loaded as float32."""
    own = model.state_dict()
    tensors: dict[str, Tensor] = {}
    for name, parts in _names(model.shape).items():
        pieces = own[name].split([rows for _, rows in parts])
        tensors.update(zip([target for target, _ in parts], pieces, strict=True))
    save_checkpoint(tensors, hf_config(model.shape), folder)


def save_checkpoint(tensors: dict[str, Tensor], config: dict[str, Any], folder: Path) -> None:
    """Writes config.json, and the tensors in float16 unless they hold whole numbers. Raises ValueError for
    weights that are too large for it."""
    halves = {n: (t.half() if t.is_floating_point() else t).detach().contiguous() for n, t in tensors.items()}
    if not all(torch.isfinite(t).all() for t in halves.values()):
        raise ValueError("weights do not fit into float16")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    save_tensors(halves, folder / PLAIN_NAME)  # last: where it is, all is there


def load_hf(folder: Path) -> TinyLlama:
    """The model in a folder. Raises PairError for one of another family."""
    config = json.loads((folder / "config.json").read_text())
    require_family(config)
    shape = shape_of(config)
    tensors = read_weights(folder)
    model = TinyLlama(shape)
    state = {
        name: torch.cat([tensors[target].float() for target, _ in parts])
        for name, parts in _names(shape).items()
    }
    model.load_state_dict(state)
    return model
