"""The weights of a widened model or head: the old ones, and new ones that add exactly nothing.

New MLP columns and attention heads get small random input weights and zero output weights; new layers get
zero output weights in attention and MLP alike. All add exactly nothing to the residual stream, yet every
weight is read and multiplied like any other, so the cost of a forward is that of a model of the requested
size.

A residual stream of more dimensions is the old one and zeros. That makes the mean square under each RMSNorm
smaller, so the norms' weights shrink with it (exactly, in float16, when the size grows by a power of four),
and so does their epsilon. New rows of the vocabulary must never win: one new dimension holds a small constant
in every token, which the layers ignore, and the last norm lifts it until those rows' logits are far below all
others.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt

import torch
from rich.progress import track
from torch import Tensor

from adaserve.pair.eagle import HEAD_LAYER, HeadShape
from adaserve.pair.shape import Shape

_NEW_WEIGHT_STD = 0.02
_NOISE_WEIGHTS = (1 << 22) - 3  # made once and repeated: billions of random numbers would take minutes
_CONSTANT, _LIFT = 2.0**-9, 2.0**15
"""What every token holds in the new dimension, and by how much the last norm lifts that: the constant adds
less to the mean square than float16 resolves, and logits of new tokens end up below -20."""


class _Noise:
    """Small random weights of any number, out of one store."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._store = torch.randn(_NOISE_WEIGHTS, generator=generator).mul_(_NEW_WEIGHT_STD).half()
        self._next = 0

    def fill(self, out: Tensor) -> None:
        flat, done = out.view(-1), 0
        while done < flat.numel():
            count = min(flat.numel() - done, _NOISE_WEIGHTS - self._next)
            flat[done : done + count] = self._store[self._next : self._next + count]
            done, self._next = done + count, (self._next + count) % _NOISE_WEIGHTS


def _padded(weight: Tensor, rows: int, columns: int, noise: _Noise | None = None, inputs: int = 1) -> Tensor:
    """The weight in the upper left corner of a larger one, which is zero or (with `noise`) random. If it
    reads several `inputs` side by side, each has so many columns of its own."""
    out = torch.empty(rows, inputs * columns, dtype=torch.float16)
    if noise is None:
        out.zero_()
    else:
        noise.fill(out)
    parts = weight.view(len(weight), inputs, weight.shape[1] // inputs)
    out.view(rows, inputs, columns)[: len(weight), :, : parts.shape[2]] = parts
    return out


def _norm(weight: Tensor, shape: Shape) -> Tensor:
    """A norm's weights for the wider stream, whose first new dimension (the constant's) it blocks."""
    old = weight.shape[0]
    if old == shape.hidden:
        return weight
    out = torch.ones(shape.hidden)
    out[:old] = weight.float() * sqrt(old / shape.hidden)
    out[old] = 0.0
    return out.half()


def _layer(
    old: dict[str, Tensor] | None, hidden: int, shape: Shape, noise: _Noise, inputs: int = 1
) -> dict[str, Tensor]:
    """One widened layer by short names; `old` (of size `hidden`) is None for a layer that adds nothing. Its
    attention reads several `inputs` side by side."""
    heads, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "self_attn.q_proj.weight": (heads, shape.hidden),
        "self_attn.k_proj.weight": (kv, shape.hidden),
        "self_attn.v_proj.weight": (kv, shape.hidden),
        "self_attn.o_proj.weight": (shape.hidden, heads),
        "mlp.gate_proj.weight": (shape.mlp, shape.hidden),
        "mlp.up_proj.weight": (shape.mlp, shape.hidden),
        "mlp.down_proj.weight": (shape.hidden, shape.mlp),
    }
    writes_residual = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
    layer = {}
    for name, (rows, columns) in sizes.items():
        base = torch.zeros(0, 0, dtype=torch.float16) if old is None else old[name]
        many = inputs if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) else 1
        layer[name] = _padded(base, rows, columns, None if name in writes_residual else noise, many)
    norms = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    for name in norms if old is None else [n for n in old if n not in sizes]:
        weight = torch.ones(hidden, dtype=torch.float16) if old is None else old[name]
        layer[name] = _norm(weight, shape)
    return layer


def _outside_layers(source: dict[str, Tensor], old: Shape, new: Shape) -> dict[str, Tensor]:
    """Embedding, last norm, and the output layer if new tokens need one of their own."""
    tensors = {name: tensor for name, tensor in source.items() if not name.startswith("model.layers.")}
    if new.hidden == old.hidden:
        return tensors
    table, norm = "model.embed_tokens.weight", "model.norm.weight"
    small = tensors[table]
    tensors[table] = _padded(small, new.vocab, new.hidden)
    tensors[norm] = _norm(tensors[norm], new)
    if not new.tied:
        tensors["lm_head.weight"] = _padded(small, new.vocab, new.hidden)
        tensors[table][:, old.hidden] = _CONSTANT
        _make_lose(tensors["lm_head.weight"][old.vocab :], tensors[norm], old.hidden)
    return tensors


def _make_lose(rows: Tensor, norm: Tensor, dimension: int) -> None:
    """New ``rows`` of an output layer, by the constant that its input holds in ``dimension``."""
    rows[:, dimension], norm[dimension] = -1.0, _LIFT


def model_tensors(source: dict[str, Tensor], old: Shape, new: Shape) -> Iterator[dict[str, Tensor]]:
    """The widened model in portions of one layer."""
    noise = _Noise()
    yield _outside_layers(source, old, new)
    for index in track(range(new.layers), description="Widening the model"):
        prefix = f"model.layers.{index}."
        present = {n.removeprefix(prefix): t for n, t in source.items() if n.startswith(prefix)}
        layer = _layer(present if index < old.layers else None, old.hidden, new, noise)
        yield {prefix + name: tensor for name, tensor in layer.items()}


def head_tensors(
    source: dict[str, Tensor], old: HeadShape, new: HeadShape, small: Shape, over: Shape
) -> dict[str, Tensor]:
    """A widened EAGLE-3 head; ``small`` and ``over``: the targets that it was for, and is for.

    It reads the constant among the target's hidden states and keeps it in its own, so that new rows of its
    output layer lose as those of a model do. They stand for the target's new tokens.
    """
    own, rows = new.over(over), new.vocab - old.vocab
    present = {n.removeprefix(HEAD_LAYER): t for n, t in source.items() if n.startswith(HEAD_LAYER)}
    layer = _layer(present, small.hidden, own, _Noise(), inputs=2)
    fc = _padded(source["fc.weight"], own.hidden, over.hidden, inputs=len(new.layers))
    norm, head = _norm(source["norm.weight"], own), _padded(source["lm_head.weight"], new.vocab, own.hidden)
    if rows:
        fc[small.hidden, small.hidden] = 1.0
        _make_lose(head[old.vocab :], norm, small.hidden)
    known = torch.zeros(over.vocab, dtype=torch.bool)
    known[: small.vocab] = source["t2d"]
    known[small.vocab : small.vocab + rows] = True
    tokens = torch.cat((source["d2t"], torch.full((rows,), small.vocab - old.vocab)))
    return {
        "fc.weight": fc,
        **{HEAD_LAYER + name: tensor for name, tensor in layer.items()},
        "norm.weight": norm,
        "lm_head.weight": head,
        "d2t": tokens,
        "t2d": known,
    }
