"""Batched sampling with the training network: a KV cache, no server."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as fn

from adaserve.noise import gumbel
from adaserve.pair.model import Block, TinyLlama, rope, rotate
from adaserve.pair.vocabulary import BOS_ID, EOS_ID

_AT_ONCE = 512
"""Tokens of a row that are fed together: what attention holds grows with them times the context."""


@dataclass
class Cache:
    """Keys and values, [layers, 2, rows, kv_heads, capacity, head_dim], filled up to `length`.
    `rope`: cosines and sines of every place."""

    store: Tensor
    rope: tuple[Tensor, Tensor]
    length: int = 0

    @classmethod
    def empty(cls, model: TinyLlama, rows: int, capacity: int) -> Cache:
        shape = model.shape
        size = (shape.layers, 2, rows, shape.kv_heads, capacity, shape.head_dim)
        return cls(torch.zeros(size), rope(capacity, shape))


@dataclass(frozen=True)
class Written:
    """What the target wrote: prompts [rows, p] and its continuation [rows, new] at one temperature.

    keys: uint64 [rows], of the noise by which it drew.
    """

    prompts: Tensor
    text: Tensor
    keys: np.ndarray

    @property
    def whole(self) -> Tensor:
        return torch.cat((self.prompts, self.text), dim=1)


def _attend(block: Block, layer: int, x: Tensor, cache: Cache) -> Tensor:
    """What the heads gather, [rows, heads, new, head_dim], of normed tokens [rows, new, hidden]."""
    shape, (rows, new, _) = block.shape, x.shape
    span = slice(cache.length, cache.length + new)
    q, k, v = block.heads(x)
    cos, sin = (t[span] for t in cache.rope)
    cache.store[layer, 0, :, :, span] = rotate(k, cos, sin)
    cache.store[layer, 1, :, :, span] = v
    keys, values = cache.store[layer, :, :, :, : span.stop]
    groups = rotate(q, cos, sin).view(rows, shape.kv_heads, -1, new, shape.head_dim)
    # Query heads that share a key head are folded into the sequence axis: no copies of keys and values.
    mask = torch.ones(new, span.stop, dtype=torch.bool).tril(span.start).repeat(groups.shape[2], 1)
    mixed = fn.scaled_dot_product_attention(groups.flatten(2, 3), keys, values, attn_mask=mask)
    return mixed.view(rows, shape.heads, new, shape.head_dim)


@torch.no_grad()
def extend(model: TinyLlama, tokens: Tensor, cache: Cache) -> Tensor:
    """Feeds [rows, new] tokens, returns the logits after the last one, [rows, vocab]."""
    for part in tokens.split(_AT_ONCE, dim=1):
        x = model.embed(part)
        for layer, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            x = block.finish(x, _attend(block, layer, block.attn_norm(x), cache))
        cache.length += part.shape[1]
    return fn.linear(model.norm(x[:, -1]), model.embed.weight)


def pick(logits: Tensor, temperature: Tensor, random: torch.Generator) -> Tensor:
    """One token per row; temperature 0 takes the best."""
    scaled = logits / temperature.clamp(min=1e-3)[:, None]
    noise = -torch.empty_like(scaled).exponential_(generator=random).log()
    return (scaled + noise * (temperature > 0)[:, None]).argmax(-1)


def shared_noise(keys: np.ndarray, position: int, vocabulary: int) -> Tensor:
    """[rows, vocabulary]: what draft and target share of rows with these `keys`, after `position`."""
    return torch.from_numpy(gumbel(keys, np.full(len(keys), position), vocabulary))


def generate(
    model: TinyLlama,
    prompts: Tensor,
    new: int,
    temperature: Tensor,
    *,
    seed: int,
    keys: np.ndarray | None = None,
) -> Tensor:
    """Continues [rows, prompt] by `new` tokens; documents do not end (end and begin are never chosen).

    With `keys` (uint64 [rows]) every row draws by its own noise, as a server does, and not by `seed`.
    """
    random = torch.Generator().manual_seed(seed)
    cache = Cache.empty(model, len(prompts), prompts.shape[1] + new)
    out, fed = [prompts], prompts
    for _ in range(new):
        logits = extend(model, fed, cache)
        logits[:, [BOS_ID, EOS_ID]] = -torch.inf
        if keys is None:
            token = pick(logits, temperature, random)
        else:
            noise = shared_noise(keys, cache.length - 1, logits.shape[1])
            token = (logits + noise * temperature[:, None]).argmax(-1)
        fed = token[:, None]
        out.append(fed)
    return torch.cat(out, dim=1)
