"""Medusa heads for training: residual blocks on the target's last hidden state, before its own LM head.

Head i says what stands i + 2 places after the token whose state it reads (Medusa, section 2.1.1). The LM
heads are the target's, as at the start of Medusa-1's training, so a head is only as large as its blocks.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from adaserve.checkpoints.medusa import MedusaHeads, load_medusa, save_medusa
from adaserve.pair.distill import lessons
from adaserve.pair.model import TinyLlama
from adaserve.pair.shape import MEDUSA_DEPTH, MEDUSA_LAYERS
from adaserve.pair.target_outputs import TargetOutputs, target_outputs
from adaserve.pair.train import Run, Trainer, head_run
from adaserve.pair.train_head import SHARPENED, STEP_WEIGHT, CrossEntropy, fast_products

COMPARED = 4
"""One token in this many is compared: passes over the vocabulary cost far more than all products, and places
that lie side by side teach much the same."""
_MATRIX_LR, _VECTOR_LR = 0.02, 0.002


class ResBlock(nn.Module):
    """Starts as the identity, so that a head begins with what the target says next."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + fn.silu(self.linear(x))


class MedusaBlocks(nn.Module):
    """``depth`` heads of ``layers`` blocks each over the states of ``target``, which is not trained."""

    def __init__(self, target: TinyLlama, depth: int = MEDUSA_DEPTH, layers: int = MEDUSA_LAYERS) -> None:
        super().__init__()
        hidden = target.shape.hidden
        self.depth, self.layers = depth, layers
        self.embed = nn.Embedding.from_pretrained(target.embed.weight.detach(), freeze=True)
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResBlock(hidden) for _ in range(layers))) for _ in range(depth)
        )

    @classmethod
    def of(cls, heads: MedusaHeads, target: TinyLlama) -> MedusaBlocks:
        """Made from published heads without LM heads of their own."""
        blocks = cls(target, *heads.bias.shape[:2])
        with torch.no_grad():
            for i, linear in enumerate(blocks.linears()):
                linear.weight.copy_(heads.weight.flatten(0, 1)[i])
                linear.bias.copy_(heads.bias.flatten(0, 1)[i])
        return blocks

    def linears(self) -> list[nn.Linear]:
        """Those of all blocks, head by head."""
        return [module for module in self.heads.modules() if isinstance(module, nn.Linear)]

    def published(self) -> MedusaHeads:
        """The heads in their published form, in float16."""
        weight = torch.stack([linear.weight.detach().half() for linear in self.linears()])
        bias = torch.stack([linear.bias.detach().half() for linear in self.linears()])
        shape = (self.depth, self.layers)
        return MedusaHeads(weight.unflatten(0, shape), bias.unflatten(0, shape), None)

    def forward(self, last: Tensor, head: int) -> Tensor:
        """Logits [.., vocab] of one head over the target's ``last`` hidden states [.., hidden]."""
        return fn.linear(self.heads[head](last), self.embed.weight)


def save_blocks(blocks: MedusaBlocks, folder: Path) -> None:
    """As published, and as shipped: in float16, without LM heads."""
    heads = blocks.published()
    if not (heads.weight.isfinite().all() and heads.bias.isfinite().all()):
        raise ValueError("weights do not fit into float16")
    folder.mkdir(parents=True, exist_ok=True)
    save_medusa(heads, folder)


def heads_loss(blocks: MedusaBlocks, seen: TargetOutputs, share: int = 1) -> Tensor:
    """Forward KL(target || head) in nats per token, averaged over the heads by ``STEP_WEIGHT``: head i is
    compared with what the target says i + 1 tokens later, after one token in ``share``."""
    depth = blocks.depth
    places = torch.randperm(seen.tokens.shape[1] - depth)
    places = places[: math.ceil(len(places) / share)]
    states = seen.last[:, places]
    total, weight = torch.zeros(()), 1.0
    for i in range(depth):
        wanted = (seen.logits[:, places + 1 + i] / SHARPENED).log_softmax(-1)
        plain = wanted.exp()
        crossed = CrossEntropy.apply(blocks(states, i), plain, 0)  # type: ignore[no-untyped-call]
        total = total + weight * (crossed + torch.linalg.vecdot(plain, wanted).float().mean())
        weight *= STEP_WEIGHT
    return total * (1 - STEP_WEIGHT) / (1 - weight)


def train_medusa(run: Run, pair: Path, *, written_tokens: int) -> Path:
    """Heads for ``pair/target``, in the folder that is returned. ``run.start``: heads to go on from."""
    target, text = lessons(run, pair / "target", written_tokens)
    blocks = MedusaBlocks(target) if run.start is None else MedusaBlocks.of(load_medusa(run.start), target)

    def loss(window: Tensor) -> Tensor:
        with fast_products():
            return heads_loss(blocks, target_outputs(target, window[:, :-1]), COMPARED)

    Trainer(head_run(run, _MATRIX_LR, _VECTOR_LR), blocks, text, loss).fit("Medusa heads")
    save_blocks(blocks, done := run.out / "heads")
    return done


class MedusaDrafter:
    """``Drafter`` of heads that see ``target`` read what is given as context, but for its last token. What it
    holds are the logits of the levels to come, [levels, rows, vocab]."""

    def __init__(self, target: TinyLlama, blocks: MedusaBlocks) -> None:
        self.target, self.blocks = target, blocks

    @torch.no_grad()
    def after(self, tokens: Tensor) -> Tensor:
        """By the state of the token before; after the first token everything is alike."""
        states = target_outputs(self.target, tokens).last[:, :-1]
        return fn.pad(self.blocks(states, 0), (0, 0, 1, 0))

    @torch.no_grad()
    def begin(self, contexts: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        states = target_outputs(self.target, contexts).last[:, -2]
        logits = torch.stack([self.blocks(states, i) for i in range(depth)])
        return logits[0].clone(), logits[1:]

    def grow(self, held: Tensor, rows: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The same after every token of a level."""
        logits = held[:, rows]
        return logits[0].clone(), logits[1:]
