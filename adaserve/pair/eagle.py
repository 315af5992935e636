"""An EAGLE-3 head for training: one layer over the target's hidden states, unrolled over its own guesses.

The head reads a token's embedding and a hidden state of the token before: the target's, projected from some
of its layers, or its own last output when it drafts further (EAGLE-3, section 3.1).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from adaserve.checkpoints.draft_kind import EAGLE3
from adaserve.pair.folders import PairError
from adaserve.pair.model import Block, TinyLlama, most_used_columns, rope, rotate, save_checkpoint
from adaserve.pair.packed import read_weights
from adaserve.pair.shape import HEAD_KV_HEADS, HEAD_MLP, HEAD_VOCABULARY, NORM_EPS, Shape, hf_config


@dataclass(frozen=True)
class HeadShape:
    """``layers``: rising numbers of the target's layers whose inputs are read. ``vocab``: tokens that the
    head can propose. ``kv_heads``: at most the target's, each with as many query heads as there. The rest is
    as in ``Shape``."""

    layers: tuple[int, ...] = (1, 2, 3)
    vocab: int = HEAD_VOCABULARY
    mlp: int = HEAD_MLP
    kv_heads: int = HEAD_KV_HEADS

    def over(self, target: Shape) -> Shape:
        """The shape of the head's layer and output matrix."""
        return replace(
            target,
            vocab=self.vocab,
            layers=1,
            mlp=self.mlp,
            heads=self.kv_heads * target.heads // target.kv_heads,
            kv_heads=self.kv_heads,
            head_width=target.head_dim,
            tied=False,
        )

    def require_target(self, target: Shape) -> None:
        """Raises PairError for a target that has less than the head takes from it."""
        for what, taken, has in (
            ("layers", max(self.layers) + 1, target.layers),
            ("tokens", self.vocab, target.vocab),
            ("MLP columns", self.mlp, target.mlp),
            ("KV heads", self.kv_heads, target.kv_heads),
        ):
            if taken > has:
                raise PairError(
                    f"the head takes {taken} {what} from its target, which has {has}: give a smaller head or "
                    "a larger target"
                )

    def parameters(self, target: Shape) -> int:
        """How many the whole head has; the embedding is the target's and does not count."""
        own = self.over(target)
        one_table = replace(own, tied=True).parameters
        read_besides = own.hidden * own.head_dim * (own.heads + 2 * own.kv_heads)
        projection = len(self.layers) * own.hidden**2
        return one_table + read_besides + projection + own.hidden


class HeadLayer(Block):
    """A decoder layer that reads an embedding and a hidden state side by side; the latter is its residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.qkv = nn.Linear(2 * shape.hidden, self.qkv.out_features, bias=False)
        self.hidden_norm = nn.RMSNorm(shape.hidden, NORM_EPS)

    def project(self, embedded: Tensor, before: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, [rows, heads, length, head_dim], of tokens [rows, length, hidden]."""
        q, k, v = self.heads(torch.cat((self.attn_norm(embedded), self.hidden_norm(before)), -1))
        q, k = rotate(q, cos, sin).to(q.dtype), rotate(k, cos, sin).to(k.dtype)
        return q, *self.for_all_heads(k, v)


class EagleHead(nn.Module):
    """``token_ids``: int64 [vocab], ascending, the tokens of the rows of its output matrix. The embedding
    is the target's and is not trained."""

    def __init__(self, target: TinyLlama, shape: HeadShape, token_ids: Tensor) -> None:
        super().__init__()
        if len(token_ids) != shape.vocab:
            raise ValueError(f"{len(token_ids)} tokens for a head that knows {shape.vocab}")
        self.shape, self.target_shape, own = shape, target.shape, shape.over(target.shape)
        hidden = own.hidden
        self.embed = nn.Embedding.from_pretrained(target.embed.weight.detach(), freeze=True)
        self.fc = nn.Linear(len(shape.layers) * hidden, hidden, bias=False)
        self.layer, self.norm = HeadLayer(own), nn.RMSNorm(hidden, NORM_EPS)
        self.lm_head = nn.Linear(hidden, own.vocab, bias=False)
        self.token_ids: Tensor
        self.register_buffer("token_ids", token_ids)
        self._start_from(target)

    @torch.no_grad()
    def _start_from(self, target: TinyLlama) -> None:
        """The target's last layer with its most used heads and MLP columns, and its output rows; it reads the
        last of the hidden states only."""
        source, hidden, layer = target.blocks[-1], self.target_shape.hidden, self.layer
        assert isinstance(source, Block)
        nn.init.zeros_(self.fc.weight)
        self.fc.weight[:, -hidden:] = torch.eye(hidden)
        qkv, out = most_used_heads(source, layer.shape.kv_heads)
        layer.qkv.weight.copy_(qkv.repeat(1, 2) / 2)
        layer.out.weight.copy_(out)
        gate_up, down = most_used_columns(source, self.shape.mlp)
        layer.gate_up.weight.copy_(gate_up)
        layer.down.weight.copy_(down)
        for mine, name in ((layer.attn_norm, "attn_norm"), (layer.hidden_norm, "attn_norm"),
                           (layer.mlp_norm, "mlp_norm")):  # fmt: skip
            mine.load_state_dict(source.get_submodule(name).state_dict())
        self.norm.load_state_dict(target.norm.state_dict())
        self.lm_head.weight.copy_(target.embed.weight[self.token_ids])

    def logits(self, states: Tensor) -> Tensor:
        """[..., vocab] of the head."""
        out: Tensor = self.lm_head(self.norm(states))
        return out

    def unroll(self, tokens: Tensor, layers: Tensor, steps: int) -> list[Tensor]:
        """Its states [rows, length - 1, hidden] of ``tokens`` [rows, length] but the first, for every step.

        At step k a token is read as the k-th of a draft: the tokens up to k before it as the target has read
        them, the others with the head's own states (EAGLE-3, section 3.2, training-time test). Of step k the
        first k - 1 tokens mean nothing. ``layers``: of the target, as in ``TargetOutputs``.
        """
        own, length = self.layer.shape, tokens.shape[1] - 1
        cos, sin = rope(length, own)
        embedded = self.embed(tokens[:, 1:])
        before = self.fc(layers[:, :-1].flatten(2)).float()
        return unrolled(self.layer, embedded, before, cos, sin, steps)


def most_used_heads(layer: Block, kv_heads: int) -> tuple[Tensor, Tensor]:
    """The rows of a layer's qkv and the columns of its output that belong to ``kv_heads`` of its KV heads,
    those whose values weigh most in its output."""
    own = layer.shape
    parts = layer.qkv.weight.split(layer.parts["qkv"])
    by_head = [rows.view(own.kv_heads, -1, rows.shape[1]) for rows in parts]
    out = layer.out.weight.view(own.hidden, own.kv_heads, -1)
    use = by_head[2].norm(dim=(1, 2)) * out.norm(dim=(0, 2))
    kept = use.topk(kv_heads).indices.sort().values
    return torch.cat([rows[kept].flatten(0, 1) for rows in by_head]), out[:, kept].flatten(1)


class Unrollable(Protocol):
    """A head's layer, which reads an embedding and a hidden state side by side."""

    def project(self, embedded: Tensor, before: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values [rows, heads, length, head_dim]."""
        ...

    def finish(self, before: Tensor, mixed: Tensor) -> Tensor:
        """Its output from what its heads have gathered, [rows, heads, length, head_dim]."""
        ...


def unrolled(
    layer: Unrollable, embedded: Tensor, before: Tensor, cos: Tensor, sin: Tensor, steps: int
) -> list[Tensor]:
    """States [rows, length, hidden] of every step: at step k a token is read as the k-th of a draft."""
    keys, values, found = list[Tensor](), list[Tensor](), list[Tensor]()
    for _ in range(steps):
        q, k, v = layer.project(embedded, before, cos, sin)
        keys.append(k)
        values.append(v)
        found.append(layer.finish(before, attend(q, keys, values)))
        before = shifted(found[-1], 1)
    return found


def shifted(x: Tensor, by: int) -> Tensor:
    """``x`` [..., length, width] moved to later places, zeros first."""
    return x if by == 0 else fn.pad(x, (0, 0, by, 0))[..., : x.shape[-2], :]


def attend(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of the newest step of an unrolled head, all [rows, heads, length, head_dim].

    At step k (``keys`` has k entries) token p sees the tokens up to p - k + 1 as the first step read them,
    and after those token p - i as step k - i read it.
    """
    scale, own = q.shape[-1] ** -0.5, len(keys) - 1
    length = q.shape[-2]
    if own == 0:
        return fn.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True)
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1 - own)
    scores = [((q * scale) @ keys[0].transpose(-1, -2)).masked_fill(hidden, -torch.inf)]
    later = [(keys[own - i], values[own - i], i) for i in range(own)]
    scores += [(q * scale * shifted(k, i)).sum(-1, keepdim=True) for k, _, i in later]
    weights = torch.cat(scores, -1).softmax(-1).to(q.dtype)
    mixed = weights[..., :length] @ values[0]
    for place, (_, v, i) in enumerate(later, length):
        mixed = mixed + weights[..., place : place + 1] * shifted(v, i)
    return mixed


HEAD_LAYER = "midlayer."
"""What the names of its layer's weights begin with."""


def _split(head: EagleHead) -> dict[str, Tensor]:
    """Weights by the names of public checkpoints."""
    layer = head.layer
    q, k, v = layer.qkv.weight.split(layer.parts["qkv"])
    gate, up = layer.gate_up.weight.chunk(2)
    attention, mlp = HEAD_LAYER + "self_attn.", HEAD_LAYER + "mlp."
    return {
        "fc.weight": head.fc.weight,
        HEAD_LAYER + "input_layernorm.weight": layer.attn_norm.weight,
        HEAD_LAYER + "hidden_norm.weight": layer.hidden_norm.weight,
        HEAD_LAYER + "post_attention_layernorm.weight": layer.mlp_norm.weight,
        attention + "q_proj.weight": q,
        attention + "k_proj.weight": k,
        attention + "v_proj.weight": v,
        attention + "o_proj.weight": layer.out.weight,
        mlp + "gate_proj.weight": gate,
        mlp + "up_proj.weight": up,
        mlp + "down_proj.weight": layer.down.weight,
        "norm.weight": head.norm.weight,
        "lm_head.weight": head.lm_head.weight,
    }


def head_config(shape: HeadShape, target: Shape) -> dict[str, Any]:
    """``config.json`` as SGLang reads it."""
    config = hf_config(shape.over(target))
    config |= {
        "architectures": [EAGLE3],
        "vocab_size": target.vocab,
        "draft_vocab_size": shape.vocab,
        # SGLang counts the outputs of layers, so that layer i's input is i - 1.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in shape.layers]},
    }
    return config


def head_shape_of(config: dict[str, Any]) -> HeadShape:
    """The shape that ``head_config`` was made from."""
    return HeadShape(
        tuple(i + 1 for i in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]),
        config["draft_vocab_size"],
        config["intermediate_size"],
        config["num_key_value_heads"],
    )


def save_head(head: EagleHead, folder: Path) -> None:
    """Writes config.json and float16 weights in the format of public EAGLE-3 checkpoints: no embedding, one
    ``midlayer``, tokens as differences to their rows (d2t)."""
    ids = head.token_ids
    known = torch.zeros(head.target_shape.vocab, dtype=torch.bool)
    known[ids] = True
    tensors = {**_split(head), "d2t": ids - torch.arange(len(ids)), "t2d": known}
    save_checkpoint(tensors, head_config(head.shape, head.target_shape), folder)


def load_head(folder: Path, target: TinyLlama) -> EagleHead:
    """A head that ``save_head`` wrote, or its shipped form."""
    shape = head_shape_of(json.loads((folder / "config.json").read_text()))
    stored = read_weights(folder)
    head = EagleHead(target, shape, stored["d2t"] + torch.arange(shape.vocab))
    with torch.no_grad():
        for name, weight in _split(head).items():
            weight.copy_(stored[name])
    return head


@torch.no_grad()
def narrowed(head: EagleHead, target: TinyLlama, kv_heads: int) -> EagleHead:
    """``head`` with its ``kv_heads`` most used KV heads only."""
    if kv_heads == head.shape.kv_heads:
        return head
    narrow = EagleHead(target, replace(head.shape, kv_heads=kv_heads), head.token_ids)
    qkv, out = most_used_heads(head.layer, kv_heads)
    kept = {**head.state_dict(), "layer.qkv.weight": qkv, "layer.out.weight": out}
    narrow.load_state_dict(kept)
    return narrow
