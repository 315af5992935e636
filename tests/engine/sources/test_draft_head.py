"""What heads draft from iteration to iteration, without SGLang: each tree is that of a fresh start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from adaserve.engine.cpu.device import CpuDevice
from adaserve.engine.cpu.forwards import CpuForward
from adaserve.engine.sources.draft_cache import DraftCache
from adaserve.engine.sources.draft_head import HeadSource
from adaserve.engine.sources.source import TreeSource
from adaserve.engine.sources.stateless import StatelessSource
from adaserve.engine.trees import verify
from adaserve.engine.trees.batch import TreeBatch
from adaserve.engine.trees.proposal import Proposal
from adaserve.scheduler.interface import DraftPlan
from tests.engine.cpu.test_draft_heads import Setting, check_levels
from tests.engine.cpu.test_medusa import Setting as MedusaSetting
from tests.engine.gpu.heads import TinyCall, headed_device
from tests.engine.gpu.test_no_waiting import Watch
from tests.engine.heads import Head, following_head, frequent_tokens, head_target
from tests.engine.medusa import best_paths, random_heads
from tests.engine.mtp import Mtp, following_layer, mtp_target
from tests.engine.trees import factories
from tests.engine.trees.factories import PLAIN, iteration_plan, random_selection, tensors_of

PROMPTS = [[5, 9, 2], [7, 8, 300, 20, 77, 8, 400, 3, 9, 11, 13]]
DEPTH, WIDTH = 3, 2


class Case:
    """Two requests of a target and heads on its hidden states, as the worker runs them. ``check``: of the
    text, tokens and scores of a row."""

    def __init__(
        self,
        pool: Any,
        table: torch.Tensor,
        device: Any,
        source: TreeSource,
        check: Callable[[list[int], np.ndarray, np.ndarray], None],
    ) -> None:
        self.pool, self.table, self.device, self.source, self._check = pool, table, device, source, check
        table[:2] = factories.slot_table(2)
        self.target = device.target
        self.rows = factories.decode_rows([0, 0])
        self.prompts = [list(p) for p in PROMPTS]

    def prefill(self, r: int, prompt: list[int], starts: list[int], cached: int = 0) -> None:
        """In chunks that begin at ``starts``, behind ``cached`` tokens that the radix cache has."""
        self.prompts[r], pool_row = prompt, int(self.rows.pool_rows[r])
        self.rows.states[r].generated = [41 + r]
        self.rows.seq_lens[r] = len(prompt)
        request = SimpleNamespace(origin_input_ids=prompt, output_ids=[], multimodal_inputs=None)
        for start, end in zip([cached, *starts], [*starts, len(prompt)], strict=True):
            row = np.array([pool_row])
            batch = TreeBatch.causal(
                np.array(prompt[start:end]), row, np.array([start]), np.array([end - start])
            )
            self.target.run(batch)
            chunk: Any = SimpleNamespace(
                req_pool_indices_cpu=torch.from_numpy(row), prefix_lens=[start],
                extend_lens=[end - start], reqs=[request], out_cache_loc=self.table[pool_row, start:end],
            )  # fmt: skip
            self.source.prefilled(chunk, drafts=True)

    def text(self, r: int) -> list[int]:
        return [*self.prompts[r], *self.rows.states[r].generated]

    def propose(self, may: list[bool]) -> Proposal:
        self.rows = replace(self.rows, running=factories.running(2, [DEPTH * m for m in may]))
        pending = self.source.propose(iteration_plan(2, DEPTH, WIDTH), self.rows, None)
        return Proposal.nothing(2) if pending is None else pending.read()

    def check(self, proposal: Proposal) -> None:
        trees = proposal.trees
        for r in range(2):
            nodes = slice(*trees.row_start[r : r + 2])
            self._check(self.text(r), trees.token[nodes], trees.logprob[nodes])

    def verify(self, proposal: Proposal, rng: np.random.Generator) -> tuple[int, bool]:
        """Accepts most of what is kept; gives the accepted nodes, and whether any of them moved."""
        verified = verify.build(self.rows, proposal, random_selection(proposal.trees, rng, 0.8))
        self.target.run(verified.batch)
        draws = rng.integers(2, 500, len(verified))
        for i in np.flatnonzero(~verified.is_root & (rng.random(len(verified)) < 0.8)):
            draws[verified.parent[i]] = verified.tokens[i]
        tensors, deepest = tensors_of(verified.arrays()), verified.deepest
        got = verify.accept(tensors, torch.from_numpy(draws), 2, deepest, deepest + 1)
        target, sources = verify.moves(tensors, got, self.table, 2, deepest)
        assert len(sources) == 1, "heads keep no KV of what they draft"
        for pool in (KV(self.pool), self.device.target_states):
            self.device.move(pool, target, sources[0])
        for r, state in enumerate(self.rows.states):
            state.advance(got.emitted[r, : int(got.count[r]) + 1].tolist())
        self.source.advanced(self.rows, verified, got.accepted.numpy())
        self.rows = replace(self.rows, seq_lens=self.rows.seq_lens + got.count.numpy() + 1)
        return int(got.count.sum()), bool((target != sources[0]).any())


class KV:
    """Moves KV as SGLang's pools do."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def move_kv_cache(self, target: torch.Tensor, source: torch.Tensor) -> None:
        for buffer in (*self._pool.k_buffer, *self._pool.v_buffer):
            buffer[target] = buffer[source]


def drafts_stay_right(case: Case, seed: int) -> None:
    """From iteration to iteration, whatever is kept and accepted, and when nothing is drafted; then behind a
    prefix that the radix cache has of a request that ended."""
    rng = np.random.default_rng(seed)
    case.prefill(0, PROMPTS[0], [])
    case.prefill(1, PROMPTS[1], [1, 6])
    accepted, moved = [], []
    for iteration in range(7):
        proposal = case.propose([iteration != 2, iteration not in (2, 3)])
        if iteration not in (2, 3):
            case.check(proposal)
        count, has_moved = case.verify(proposal, rng)
        accepted.append(count)
        moved.append(has_moved)
    assert max(accepted) >= 3 and any(moved)
    case.source.finished(int(case.rows.pool_rows[1]), unheard=False)
    ended = case.text(1)
    case.prefill(1, [*ended[:-2], 17, 18, 19], [], cached=len(ended) - 2)
    case.check(case.propose([True, True]))


def a_head(kind: str) -> Head | Mtp:
    """Hidden states matter to it."""
    if kind == "mtp":
        return following_layer(mtp_target(), weight=1.0)
    target = head_target()
    return following_head(target, frequent_tokens(target), weight=0.5)


def head_case(head: Head | Mtp, parts: str) -> Case:
    """Over a host's parts or a device's."""
    made = Setting(head, "native")
    table = made.drafts._req_to_token
    device: Any = CpuDevice(CpuForward(made.reads, table), made.drafts)
    if parts == "graphs":
        device = headed_device(made, head, DEPTH)
    cache = DraftCache(device.drafts[0], table, made.states.by_slot.shape[0], stride=DEPTH + 1)

    def check(text: list[int], tokens: np.ndarray, scores: np.ndarray) -> None:
        check_levels(head, text, tokens, scores, WIDTH, 1, 0.0)

    return Case(made.reads.pool, table, device, HeadSource(device, cache, PLAIN, max_nodes=16), check)


@pytest.mark.parametrize("parts", ["host", "graphs"])
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
@pytest.mark.parametrize("seed", range(2))
def test_a_head(seed: int, kind: str, parts: str) -> None:
    drafts_stay_right(head_case(a_head(kind), parts), seed)


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_head_reads_more_recent_tokens_in_place_of_sinks(kind: str) -> None:
    """The first tokens are none for it, which has never read the very first."""
    head = a_head(kind)
    case, window, sinks = head_case(head, "host"), np.array([0, 4]), 2
    for r, prompt in enumerate(PROMPTS):
        case.prefill(r, prompt, [])
    plan = replace(iteration_plan(2, DEPTH, WIDTH), draft=DraftPlan(DEPTH, WIDTH, window=window, sinks=sinks))
    pending = case.source.propose(plan, case.rows, None)
    assert pending is not None
    trees = pending.read().trees
    for r, left_out in enumerate((1, len(PROMPTS[1]) - 4 - sinks)):
        nodes, text = slice(*trees.row_start[r : r + 2]), case.text(r)
        check_levels(head, text, trees.token[nodes], trees.logprob[nodes], WIDTH, 1, 0.0, left_out)


@pytest.mark.parametrize("seed", range(2))
def test_medusa_heads(seed: int) -> None:
    target = head_target()
    made = MedusaSetting(target, random_heads(target, layers=2))
    device = CpuDevice(CpuForward(made.reads, made.table), medusa=made.drafts)

    def check(text: list[int], tokens: np.ndarray, scores: np.ndarray) -> None:
        for level, paths in enumerate(best_paths(made.heads, target, text, DEPTH, WIDTH, 1, 0.0)):
            nodes = slice(level * WIDTH, (level + 1) * WIDTH)
            assert tokens[nodes].tolist() == [path[-1] for path in paths]
            assert np.allclose(scores[nodes], list(paths.values()), atol=1e-3)

    source = StatelessSource(made.drafts, PLAIN, 16, made.drafts.most_steps)
    drafts_stay_right(Case(made.reads.pool, made.table, device, source, check), seed)


def test_a_search_on_a_device_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states are found and handed on by operators that a CUDA graph can hold."""
    case, call, calls = head_case(a_head("eagle3"), "graphs"), TinyCall.__call__, []
    for r, prompt in enumerate(PROMPTS):
        case.prefill(r, prompt, [])

    def unwatched(self: TinyCall, *arguments: Any) -> Any:
        calls.append(self)
        with torch.utils._python_dispatch._disable_current_modes():
            return call(self, *arguments)

    monkeypatch.setattr(TinyCall, "__call__", unwatched)
    assert isinstance(case.source, HeadSource)
    case.source.cache._exchangeable.clear()  # a request's first search looks for holes in its slots
    with Watch() as watch:
        case.propose([True, True])
    assert watch.waits == [] and len(calls) == DEPTH
