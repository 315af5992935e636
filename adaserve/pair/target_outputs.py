"""What heads are trained on: the target's hidden states and logits on the windows of text that the draft is
distilled on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as fn

from adaserve.pair.model import TinyLlama, rope


@dataclass(frozen=True)
class TargetOutputs:
    """A target's forward over ``tokens`` [rows, length]."""

    tokens: Tensor
    layers: Tensor
    """[rows, length, captured layers, hidden]: the residual stream before each of these layers, in the order
    of their numbers."""
    last: Tensor
    """[rows, length, hidden]: after the final norm."""
    logits: Tensor
    """[rows, length, vocabulary]: for the token that follows."""


@torch.no_grad()
def target_outputs(target: TinyLlama, tokens: Tensor, layers: Sequence[int] = ()) -> TargetOutputs:
    """``layers``: rising numbers of the layers whose inputs are kept."""
    cos, sin = rope(tokens.shape[1], target.shape)
    x = target.embed(tokens)
    kept = []
    for number, block in enumerate(target.blocks):
        if number in layers:
            kept.append(x)
        x = block(x, cos, sin)
    states = torch.stack(kept, 2) if kept else x.new_zeros(*tokens.shape, 0, x.shape[-1])
    last = target.norm(x)
    return TargetOutputs(tokens, states, last, fn.linear(last, target.embed.weight))
