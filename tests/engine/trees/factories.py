"""Fake requests, forwards and random trees for the worker's tests."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from adaserve.engine.host.gumbel import Reading, read
from adaserve.engine.sources.beam import Draft, Drafter
from adaserve.engine.state import DecodeRows, RequestState
from adaserve.engine.trees.plan import TreeAttentionPlan
from adaserve.scheduler.interface import IterationPlan, RunningBatch, Selection

VOCABULARY = 23
CONTEXT = 64


def running(n: int, max_depth: list[int] | None = None) -> RunningBatch:
    ones = np.ones(n)
    whole = ones.astype(np.int64)
    return RunningBatch(
        rids=tuple(f"r{i}" for i in range(n)),
        slo_class=("default",) * n,
        tpot_slo_s=np.full(n, math.inf),
        decode_start_s=0 * ones,
        decoded_tokens=whole,
        context_tokens=whole,
        remaining_tokens=100 * whole,
        max_depth=np.array(max_depth) if max_depth is not None else 50 * whole,
        temperature=0 * ones,
    )


def decode_rows(lengths: list[int], max_depth: list[int] | None = None, behind: int = 0) -> DecodeRows:
    """Requests with ``lengths`` cached tokens; their slots in the pool are shuffled.

    ``behind``: tokens that the draft has not seen yet, besides the root.
    """
    n = len(lengths)
    slots = torch.randperm(n * CONTEXT, generator=torch.Generator().manual_seed(1)).view(n, CONTEXT)
    states = [
        RequestState(f"r{i}", "default", math.inf, 0.0, draft_len=length - behind, pending=[7] * behind)
        for i, length in enumerate(lengths)
    ]
    return DecodeRows(
        states=states,
        seq_lens=np.array(lengths, np.int64),
        roots=np.arange(1, n + 1),
        pool_indices=torch.arange(n).flip(0),  # rows of the pool are not rows of the batch
        req_to_token=slots,
        running=running(n, max_depth),
    )


def iteration_plan(n: int, depth: int, width: int, branching: tuple[int, ...] | None = None) -> IterationPlan:
    return IterationPlan(0, 0.0, running(n), np.ones(n), depth, width, 1000, branching)


@dataclass
class FakeForward:
    """Logits that depend on the token alone, so that every path probability can be computed by hand.

    It remembers which slots were written, and by which tokens.
    """

    table: torch.Tensor = field(
        default_factory=lambda: torch.randn(
            VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(2)
        )
    )
    calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, TreeAttentionPlan]] = field(
        default_factory=list
    )

    def hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, plan: TreeAttentionPlan
    ) -> torch.Tensor:
        self.calls.append((tokens, positions, slots, plan))
        return self.table[tokens]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.argmax(-1)

    def topk_logprobs(
        self, hidden: torch.Tensor, reading: Reading, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        best = torch.log_softmax(read(hidden, reading), -1).topk(width)
        return best.values, best.indices


def drafter(forward: FakeForward | None = None, max_nodes: int = 48) -> Drafter:
    return Drafter(forward or FakeForward(), lambda t: (np.ones_like(t), np.zeros_like(t)), max_nodes)


def drafted(rows: DecodeRows, plan: IterationPlan, forward: FakeForward | None = None) -> Draft:
    draft = drafter(forward).draft(plan, rows, None)
    assert draft is not None
    return draft


def random_selection(draft: Draft, rng: np.random.Generator) -> Selection:
    """Keeps some nodes, and only those whose parents are kept."""
    trees = draft.trees
    start = np.repeat(trees.row_start[:-1], np.diff(trees.row_start))
    keep = rng.random(trees.n_nodes) < 0.6
    for node in range(trees.n_nodes):
        if trees.parent[node] >= 0:
            keep[node] &= keep[start[node] + trees.parent[node]]
    bounds = np.concatenate([[0], np.cumsum(keep)])
    counts = bounds[trees.row_start[1:]] - bounds[trees.row_start[:-1]]
    return Selection(keep, counts, np.zeros_like(counts), np.ones(len(counts)))
