"""Draft trees over many contexts at once, for measuring acceptance without a server."""

from __future__ import annotations

from dataclasses import dataclass

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
    product of the draft's probabilities along the path.
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


def _fork(cache: Cache, rows: Tensor, capacity: int) -> Cache:
    """A cache whose row i continues row `rows[i]`."""
    forked = Cache.__new__(Cache)
    kept = cache.store[:, :, rows, :, : cache.length]
    forked.store = fn.pad(kept, (0, 0, 0, capacity - cache.length))
    forked.rope, forked.length = cache.rope, cache.length
    return forked


@torch.no_grad()
def draft_trees(
    draft: TinyLlama,
    contexts: Tensor,
    *,
    depth: int,
    w: int,
    tau: float,
    keys: np.ndarray | None = None,
    noise: float = 0.0,
) -> Trees:
    """Trees below each of [contexts, length]: (the draft's logits + `noise` x that of `keys`) / `tau`."""
    n, length = contexts.shape
    capacity = length + depth
    cache = Cache(draft, n, capacity)
    logits = extend(draft, contexts, cache)
    prefix = torch.zeros(n, 1, 0, dtype=torch.long)
    score = torch.zeros(n, 1)
    trees = Trees([], [])
    for level in range(depth):
        if keys is not None and noise:
            beams_of_row = logits.shape[0] // n
            own = shared_noise(keys, cache.length - 1, logits.shape[1])
            logits = logits + noise * own.repeat_interleave(beams_of_row, dim=0)
        logits[:, [BOS_ID, EOS_ID]] = -torch.inf
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
            cache = _fork(cache, rows, capacity)
            logits = extend(draft, tokens.flatten()[:, None], cache)
    return trees
