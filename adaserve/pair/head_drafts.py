"""The embedded EAGLE-3 head as a drafter, for measuring acceptance without a server."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as fn

from adaserve.pair.eagle import EagleHead
from adaserve.pair.model import TinyLlama, rope
from adaserve.pair.target_outputs import target_outputs


@dataclass(frozen=True)
class _Held:
    """keys, values: [rows, heads, length, head_dim]; states: [rows, hidden], the head's of the last token."""

    keys: Tensor
    values: Tensor
    states: Tensor


class HeadDrafter:
    """``Drafter`` of ``head``, which sees ``target`` read what is given as context."""

    def __init__(self, target: TinyLlama, head: EagleHead) -> None:
        self.target, self.head = target, head

    @torch.no_grad()
    def after(self, tokens: Tensor) -> Tensor:
        """Behind the first token, which it does not read, everything is alike."""
        seen = target_outputs(self.target, tokens, self.head.shape.layers)
        (states,) = self.head.unroll(tokens, seen.layers, 1)
        return fn.pad(self._spread(states), (0, 0, 1, 0))

    @torch.no_grad()
    def begin(self, contexts: Tensor, depth: int) -> tuple[Tensor, _Held]:
        head = self.head
        seen = target_outputs(self.target, contexts, head.shape.layers)
        before = head.fc(seen.layers[:, :-1].flatten(2))
        cos, sin = rope(before.shape[1], head.layer.shape)
        q, k, v = head.layer.project(head.embed(contexts[:, 1:]), before, cos, sin)
        states = head.layer.finish(before, fn.scaled_dot_product_attention(q, k, v, is_causal=True))[:, -1]
        return self._spread(states), _Held(k, v, states)

    @torch.no_grad()
    def grow(self, held: _Held, rows: Tensor, tokens: Tensor) -> tuple[Tensor, _Held]:
        head, before = self.head, held.states[rows][:, None]
        cos, sin = (t[-1:] for t in rope(held.keys.shape[2] + 1, head.layer.shape))
        q, k, v = head.layer.project(head.embed(tokens)[:, None], before, cos, sin)
        keys, values = torch.cat((held.keys[rows], k), 2), torch.cat((held.values[rows], v), 2)
        states = head.layer.finish(before, fn.scaled_dot_product_attention(q, keys, values))[:, -1]
        return self._spread(states), _Held(keys, values, states)

    def _spread(self, states: Tensor) -> Tensor:
        """Logits over the target's vocabulary."""
        known = self.head.logits(states)
        out = known.new_full((*states.shape[:-1], self.head.target_shape.vocab), -torch.inf)
        out[..., self.head.token_ids] = known
        return out
