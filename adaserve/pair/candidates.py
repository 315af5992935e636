"""Draft trees over many contexts at once, for measuring acceptance without a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as fn

from adaserve.pair.generate import Cache, extend, shared_noise
from adaserve.pair.model import TinyLlama
from adaserve.pair.vocabulary import BOS_ID, EOS_ID


@dataclass(frozen=True)
class Trees:
    """Beam-search candidate trees: the `w` best nodes of every level.

    paths[level]: [contexts, w, level + 1] tokens from below the root; probability[level]: [contexts, w], the
    product of the drafter's probabilities along the path.
    """

    paths: list[Tensor]
    probability: list[Tensor]

    def hits(self, actual: Tensor) -> Tensor:
        """[contexts, depth, w]: whether a node lies on the `actual` continuation, [contexts, >= depth]."""
        rows = [(p == actual[:, None, : p.shape[2]]).all(-1) for p in self.paths]
        return torch.stack(rows, dim=1)

    def accepted(self, actual: Tensor) -> Tensor:
        """Accepted tokens per context, without the bonus token (sample, then match)."""
        return self.hits(actual).any(-1).sum(-1)


class Drafter(Protocol):
    """What drafts trees. What it keeps about a text (``held``) is its own business."""

    def after(self, tokens: Tensor) -> Tensor:
        """Logits [rows, length, vocab] for what follows each of ``tokens`` [rows, length], -inf for tokens
        that it never proposes. A head reads the target's hidden states of all tokens before."""
        ...

    def begin(self, contexts: Tensor, depth: int) -> tuple[Tensor, Any]:
        """Reads [n, length] tokens; returns logits [n, vocab] for what follows, and what it keeps about
        them."""
        ...

    def grow(self, held: Any, rows: Tensor, tokens: Tensor) -> tuple[Tensor, Any]:
        """The same after one more token, ``tokens`` [m], each after the text of one of the ``rows`` [m]."""
        ...


class ModelDrafter:
    """A language model."""

    def __init__(self, model: TinyLlama) -> None:
        self.model = model

    @torch.no_grad()
    def after(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens)
        return logits

    def begin(self, contexts: Tensor, depth: int) -> tuple[Tensor, Cache]:
        cache = Cache.empty(self.model, len(contexts), contexts.shape[1] + depth)
        return extend(self.model, contexts, cache), cache

    def grow(self, held: Cache, rows: Tensor, tokens: Tensor) -> tuple[Tensor, Cache]:
        cache = _fork(held, rows)
        return extend(self.model, tokens[:, None], cache), cache


def _fork(cache: Cache, rows: Tensor) -> Cache:
    """A cache whose row i continues row `rows[i]`."""
    kept = cache.store[:, :, rows, :, : cache.length]
    room = cache.store.shape[4] - cache.length
    return Cache(fn.pad(kept, (0, 0, 0, room)), cache.rope, cache.length)


@torch.no_grad()
def draft_trees(
    drafter: Drafter,
    contexts: Tensor,
    *,
    depth: int,
    w: int,
    tau: float,
    keys: np.ndarray | None = None,
    noise: float = 0.0,
    never: Sequence[int] = (BOS_ID, EOS_ID),
) -> Trees:
    """Trees below each of [contexts, length]: (the drafter's logits + `noise` x that of `keys`) / `tau`.

    `never`: tokens that are not proposed.
    """
    n, length = contexts.shape
    logits, held = drafter.begin(contexts, depth)
    prefix = torch.zeros(n, 1, 0, dtype=torch.long)
    score = torch.zeros(n, 1)
    trees = Trees([], [])
    for level in range(depth):
        if keys is not None and noise:
            beams_of_row = logits.shape[0] // n
            own = shared_noise(keys, length - 1 + level, logits.shape[1])
            logits = logits + noise * own.repeat_interleave(beams_of_row, dim=0)
        logits[:, list(never)] = -torch.inf
        log_p, token = fn.log_softmax(logits / tau, dim=-1).topk(w)
        beams = score.shape[1]
        total = (score[:, :, None] + log_p.view(n, beams, w)).flatten(1)
        score, best = total.topk(w)
        parent = best // w
        tokens = token.view(n, beams * w).gather(1, best)
        prefix = torch.cat((prefix.gather(1, parent[..., None].expand(-1, -1, level)), tokens[..., None]), 2)
        trees.paths.append(prefix)
        trees.probability.append(score.exp())
        if level < depth - 1:
            rows = (torch.arange(n)[:, None] * beams + parent).flatten()
            logits, held = drafter.grow(held, rows, tokens.flatten())
    return trees
