"""Fake requests, models and random trees for the tests of sources and verification."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from adaserve.engine.cpu import Inputs
from adaserve.engine.cpu.device import CpuDevice
from adaserve.engine.cpu.forwards import CpuForward
from adaserve.engine.cpu.noise import transformed
from adaserve.engine.logits.logit_transform import LogitTransform
from adaserve.engine.request_state import DecodeRows, RequestState
from adaserve.engine.sources.beam import BeamSource
from adaserve.engine.sources.draft_cache import DraftCache
from adaserve.engine.sources.source import KeepDrafting
from adaserve.engine.trees.proposal import Proposal
from adaserve.scheduler.interface import CandidateTrees, DraftPlan, IterationPlan, RunningBatch, Selection
from adaserve.sharpening import DraftSharpening

VOCABULARY = 23
CONTEXT = 64
PLAIN = DraftSharpening((0.0,), (1.0,), shared=((0.0,), (1.0,), (0.0,)))
"""The draft's logits as they are, without noise."""


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


def decode_rows(lengths: list[int], max_depth: list[int] | None = None) -> DecodeRows:
    """Requests with ``lengths`` cached tokens and the roots 1, 2, 3, ..."""
    n = len(lengths)
    states = [RequestState(f"r{i}", "default", math.inf, 0.0, generated=[i + 1]) for i in range(n)]
    pool_rows = np.arange(n)[::-1].copy()  # rows of the pool are not rows of the batch
    return DecodeRows(states, np.array(lengths, np.int64), pool_rows, running(n, max_depth))


def slot_table(n: int) -> torch.Tensor:
    """``req_to_token``: shuffled slots, so that places are not slots; slot 0 belongs to nobody."""
    generator = torch.Generator().manual_seed(1)
    return (1 + torch.randperm(n * CONTEXT, generator=generator)).view(n, CONTEXT).int()


def iteration_plan(n: int, depth: int, width: int, branching: tuple[int, ...] | None = None) -> IterationPlan:
    return IterationPlan(0, 0.0, running(n), DraftPlan(depth, width, branching), 1000)


@dataclass
class FakeModel:
    """Logits that depend on the token alone, so that every path probability can be computed by hand.

    It remembers which slots were written, and by which tokens.
    """

    table: torch.Tensor = field(
        default_factory=lambda: torch.randn(
            VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(2)
        )
    )
    calls: list[Inputs] = field(default_factory=list)

    def hidden(self, inputs: Inputs) -> torch.Tensor:
        self.calls.append(inputs)
        return self.table[inputs.tokens]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.argmax(-1)

    def topk_logprobs(
        self, hidden: torch.Tensor, transform: LogitTransform, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        best = torch.log_softmax(transformed(hidden, transform), -1).topk(width)
        return best.values, best.indices


@dataclass
class Drafted:
    """A beam source over a model, the requests it drafts for, and their slots."""

    rows: DecodeRows
    model: Any = field(default_factory=FakeModel)
    behind: int = 0  # tokens that the draft has not seen yet, besides the root
    max_nodes: int = 48

    def __post_init__(self) -> None:
        self.table = slot_table(len(self.rows))
        self.forward = CpuForward(self.model, self.table)
        self.device = CpuDevice(self.forward, self.forward)
        self.cache = DraftCache(self.forward, self.table, int(self.table.max()) + 1, stride=9)
        self.source = BeamSource(self.device, self.cache, PLAIN, self.max_nodes)
        for length, row in zip(self.rows.seq_lens.tolist(), self.rows.pool_rows.tolist(), strict=True):
            seen = length - self.behind
            self.cache.started(row, [7] * seen, self.table[row, :seen], read=True)
            if self.behind:
                self.cache.advanced(row, [7] * self.behind, 0)

    def propose(
        self,
        depth: int,
        width: int,
        branching: tuple[int, ...] | None = None,
        keep: KeepDrafting | None = None,
        recent: list[int] | None = None,
    ) -> Proposal | None:
        """``recent``: what is read of each context besides its first two tokens; 0 = all."""
        window = None if recent is None else np.array(recent)
        plan = replace(
            iteration_plan(len(self.rows), depth, width, branching),
            running=replace(self.rows.running, context_tokens=self.rows.seq_lens),
            draft=DraftPlan(depth, width, branching, window=window, sinks=2),
        )
        pending = self.source.propose(plan, self.rows, keep)
        self.caught_up = pending is not None and pending.caught_up is not None
        return None if pending is None else pending.read()


def drafted(rows: DecodeRows, depth: int, width: int, branching: tuple[int, ...] | None = None) -> Proposal:
    proposal = Drafted(rows).propose(depth, width, branching)
    assert proposal is not None
    return proposal


def paths(trees: CandidateTrees, row: int) -> list[tuple[int, ...]]:
    """Tokens from the root's child down to every node of a row."""
    out: list[tuple[int, ...]] = []
    for node in range(trees.row_start[row], trees.row_start[row + 1]):
        above = out[trees.parent[node]] if trees.parent[node] >= 0 else ()
        out.append((*above, int(trees.token[node])))
    return out


def random_selection(trees: CandidateTrees, rng: np.random.Generator, share: float = 0.6) -> Selection:
    """Keeps some nodes, and only those whose parents are kept."""
    start = np.repeat(trees.row_start[:-1], np.diff(trees.row_start))
    keep = rng.random(trees.n_nodes) < share
    for node in range(trees.n_nodes):
        if trees.parent[node] >= 0:
            keep[node] &= keep[start[node] + trees.parent[node]]
    return selection_of(trees, keep)


def selection_of(trees: CandidateTrees, keep: np.ndarray) -> Selection:
    bounds = np.concatenate([[0], np.cumsum(keep)])
    counts = bounds[trees.row_start[1:]] - bounds[trees.row_start[:-1]]
    return Selection(keep, counts, np.zeros_like(counts), np.ones(len(counts)))


def tensors_of(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(a) for name, a in arrays.items()}


def sampling_request(**over: Any) -> Any:
    """What draws read of SGLang's requests."""
    values = {
        "temperature": 1.0, "top_k": 1 << 30, "top_p": 1.0, "min_p": 0.0, "frequency_penalty": 0.0,
        "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0, "stop_token_ids": None,
        "ignore_eos": False,
    }  # fmt: skip
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=None)
    params = SimpleNamespace(**values | over)
    return SimpleNamespace(sampling_params=params, output_ids=[], eos_token_ids=None, tokenizer=tokenizer)
