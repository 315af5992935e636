"""One iteration without SGLang: drafts against a brute-force beam search, the flat layout against decoding.

The verification's ``qo_indptr``, ``kv_indptr``, ``kv_indices`` and mask are what FlashInfer gets on a GPU;
here they go through plain dense attention and every node must see exactly its own path.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from adaserve.engine.cpu import Inputs
from adaserve.engine.cpu.device import CpuDevice
from adaserve.engine.cpu.forwards import CpuForward
from adaserve.engine.cpu.torch_forward import TorchBackend
from adaserve.engine.sources.beam import MAX_PENDING, BeamSource
from adaserve.engine.sources.draft_cache import DraftCache
from adaserve.engine.trees import verify
from adaserve.engine.trees.attention import token_slots
from adaserve.engine.trees.batch import TreeBatch
from adaserve.engine.trees.proposal import Proposal
from adaserve.scheduler.interface import CandidateTrees
from tests.engine.cpu.factories import Pool, hf_model, read_hf
from tests.engine.trees import factories
from tests.engine.trees.factories import (
    PLAIN,
    iteration_plan,
    paths,
    random_selection,
    running,
    selection_of,
    slot_table,
    tensors_of,
)

MAX_NODES = 16
PROMPTS = [[5, 9, 2], [7] * 11, [101, 3, 55, 20, 77, 8]]
ROOTS = [40, 41, 42]
RNG = np.random.default_rng


class DenseModel:
    """Plain dense attention over the plan's own lists; both models of these tests."""

    def __init__(self, model: Any) -> None:
        weights, config = read_hf(model)
        self.pool = Pool(config, len(weights.layers))
        self._backend = TorchBackend(weights, config, "fp32")

    def hidden(self, inputs: Inputs) -> torch.Tensor:
        return self._backend.forward(inputs, self.pool.k, self.pool.v)

    def move_kv_cache(self, target: torch.Tensor, source: torch.Tensor) -> None:
        for buffer in (*self.pool.k, *self.pool.v):
            buffer[target] = buffer[source]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


STRIDE = 5
"""Tokens that an iteration commits at most."""


class Case:
    """Requests whose prompts the target has cached, and a draft that has not seen the last ``behind[r]``."""

    def __init__(self, draft: Any, target: Any, behind: list[int], max_depth: list[int]) -> None:
        self.models = [DenseModel(target), DenseModel(draft)]
        n = len(PROMPTS)
        self.table = slot_table(n)
        self.target, self.draft = (CpuForward(model, self.table) for model in self.models)
        self.cache = DraftCache(self.draft, self.table, self.models[0].pool.slots, STRIDE)
        self.device = CpuDevice(self.target, self.draft)
        self.source = BeamSource(self.device, self.cache, PLAIN, MAX_NODES)
        self.rows = factories.decode_rows([len(p) for p in PROMPTS])
        self.may_go(max_depth)
        for state, root in zip(self.rows.states, ROOTS, strict=True):
            state.generated = [root]
        for r in range(n):
            self._prefill(int(self.rows.pool_rows[r]), PROMPTS[r], behind[r])

    def may_go(self, max_depth: list[int]) -> None:
        view = replace(running(len(PROMPTS), max_depth), temperature=np.ones(len(PROMPTS)))
        self.rows = replace(self.rows, running=view)

    def _prefill(self, pool_row: int, prompt: list[int], behind: int) -> None:
        seen, slots = len(prompt) - behind, self.table[pool_row]
        for forward, length in ((self.target, len(prompt)), (self.draft, seen)):
            if length:
                one = (np.array([pool_row]), np.array([0]), np.array([length]))
                forward.run(TreeBatch.causal(np.array(prompt[:length]), *one))
        if not seen:
            self.cache.started(pool_row, prompt, slots[: len(prompt)], read=False)
            return
        self.cache.started(pool_row, prompt[:seen], slots[:seen], read=True)
        if behind:
            self.cache.advanced(pool_row, prompt[seen:], 0)

    def text(self, row: int) -> list[int]:
        return [*PROMPTS[row], *self.rows.states[row].generated]

    def held(self, row: int) -> tuple[int, list[int]]:
        """Cached tokens that the draft has the KV of, and those behind them."""
        held = self.cache[int(self.rows.pool_rows[row])]
        return held.length, held.pending

    def propose(self, depth: int, width: int, branching: tuple[int, ...] | None = None) -> Proposal:
        pending = self.source.propose(iteration_plan(len(PROMPTS), depth, width, branching), self.rows, None)
        assert pending is not None
        self.caught_up = pending.caught_up is not None
        return pending.read()

    def commit(self, verified: verify.VerifyBatch, draws: np.ndarray) -> list[int]:
        """Accepts along ``draws``, as the worker does; accepted nodes of each row."""
        n, deepest, tensors = len(PROMPTS), verified.deepest, tensors_of(verified.arrays())
        got = verify.accept(tensors, torch.from_numpy(draws), n, deepest, deepest + 1)
        target, sources = verify.moves(tensors, got, self.table, n, deepest)
        for model, source in zip(self.models, sources, strict=False):  # the draft's, if it proposed
            self.device.move(model, target, source)
        for r, state in enumerate(self.rows.states):
            state.advance(got.emitted[r, : int(got.count[r]) + 1].tolist())
        self.source.advanced(self.rows, verified, got.accepted.numpy())
        self.rows = replace(self.rows, seq_lens=self.rows.seq_lens + got.count.numpy() + 1)
        return got.count.tolist()


def alike(behind: list[int], max_depth: list[int]) -> Case:
    model = hf_model()
    return Case(model, model, behind, max_depth)


def path_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, -1].double().log_softmax(-1)


def beam_search(model: Any, prefix: list[int], depth: int, width: int) -> list[set[tuple[int, ...]]]:
    """The kept paths of every level, recomputed from scratch for each node."""
    levels: list[set[tuple[int, ...]]] = []
    beams: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(depth):
        grown = {
            (*path, token): score + float(logprob)
            for path, score in beams.items()
            for token, logprob in enumerate(path_logprobs(model, [*prefix, *path]))
        }
        beams = dict(sorted(grown.items(), key=lambda item: -item[1])[:width])
        levels.append(set(beams))
    return levels


def check_proposal(trees: CandidateTrees, row: int, text: list[int], depth: int, width: int) -> None:
    """Paths and log-probabilities of a row's tree, against the search from scratch behind ``text``."""
    model, found = hf_model(), paths(trees, row)
    by_level = [{p for p in found if len(p) == d} for d in range(1, depth + 1)]
    assert len(set(found)) == len(found) and by_level == beam_search(model, text, depth, width)
    start, end = trees.row_start[row : row + 2]
    for path, logprob in zip(found, trees.logprob[start:end], strict=True):
        tokens = [*text, *path]
        exact = sum(float(path_logprobs(model, tokens[: i + len(text)])[t]) for i, t in enumerate(path))
        assert abs(exact - logprob) < 1e-3


@pytest.mark.parametrize("behind", [[0, 0, 0], [1, 0, 4], [3, 11, 2]])
def test_drafts_are_the_beam_search_of_a_fresh_prefill(behind: list[int]) -> None:
    """Also when the draft was kept from drafting for a while and has to catch up on some requests."""
    case = alike(behind, [4, 4, 4])
    trees = case.propose(depth=3, width=3).trees
    for r, prompt in enumerate(PROMPTS):
        check_proposal(trees, r, [*prompt, ROOTS[r]], 3, 3)
        assert case.held(r) == (len(prompt), [])
    assert case.caught_up == (max(behind) > MAX_PENDING)


@pytest.mark.parametrize("seed", range(3))
def test_drafts_stay_right_from_iteration_to_iteration(seed: int) -> None:
    """Whatever is kept and accepted, and when nothing is drafted for some or all of the requests."""
    rng, case, n = np.random.default_rng(seed), alike([0, 1, 0], [4, 4, 4]), len(PROMPTS)
    counts: list[int] = []
    for iteration in range(10):
        case.may_go([0 if iteration and rng.random() < 0.3 else 4 for _ in range(n)])
        proposal = Proposal.nothing(n)
        if iteration not in (2, 3) and case.rows.running.max_depth.any():
            proposal = case.propose(depth=3, width=2)
            for r in np.flatnonzero(case.rows.running.max_depth):
                check_proposal(proposal.trees, r, case.text(r), 3, 2)
        selection = random_selection(proposal.trees, rng, 0.8)
        verified = verify.build(case.rows, proposal, selection)
        case.target.run(verified.batch)
        counts += case.commit(verified, lucky_draws(verified, rng))
        for r in range(n):
            length, pending = case.held(r)
            assert length + len(pending) == case.rows.seq_lens[r]
            assert pending == case.text(r)[length:-1]
        _check_caches(case)
    assert set(counts) == {0, 1, 2, 3}


def lucky_draws(verified: verify.VerifyBatch, rng: np.random.Generator) -> np.ndarray:
    """Mostly a kept child, or every walk would end at once."""
    draws = rng.integers(0, 131, len(verified))
    for i in np.flatnonzero(~verified.is_root & (rng.random(len(verified)) < 0.8)):
        draws[verified.parent[i]] = verified.tokens[i]
    return draws


def _check_caches(case: Case) -> None:
    """Every committed token's KV, of the draft where it claims to have it, is that of a fresh prefill."""
    fresh = DenseModel(hf_model())
    for r, pool_row in enumerate(case.rows.pool_rows.tolist()):
        text, slots = case.text(r)[:-1], case.table[pool_row]
        one = (np.array([pool_row]), np.array([0]), np.array([len(text)]))
        CpuForward(fresh, case.table).run(TreeBatch.causal(np.array(text), *one))
        for model, length in zip(case.models, (len(text), case.held(r)[0]), strict=True):
            at = slots[:length].long()
            for name in ("k", "v"):
                for got, right in zip(getattr(model.pool, name), getattr(fresh.pool, name), strict=True):
                    torch.testing.assert_close(got[at], right[at], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_whose_slots_are_exchanged_for_some_with_holes(overlap: bool) -> None:
    """Another request put the same text into the radix cache meanwhile, and its draft was behind."""
    case, row, hole = alike([0, 0, 0], [4, 4, 4]), 1, 1
    if not overlap:
        exchange(case, row, hole)
    else:
        proposal = case.propose(depth=2, width=2)
        verified = verify.build(case.rows, proposal, random_selection(proposal.trees, RNG(4), 0.8))
        case.target.run(verified.batch)
        exchange(case, row, hole)
        case.commit(verified, lucky_draws(verified, RNG(4)))
    trees = case.propose(depth=3, width=3).trees
    for r in range(len(PROMPTS)):
        check_proposal(trees, r, case.text(r), 3, 3)
    assert case.caught_up
    _check_caches(case)


def test_holes_of_exchanged_slots_are_remembered_when_the_request_ends() -> None:
    case, row, hole = alike([0, 0, 0], [4, 4, 4]), 1, 1
    exchange(case, row, hole)
    pool_row = int(case.rows.pool_rows[row])
    case.cache.finished(pool_row, unheard=False)
    case.cache.fill_holes([pool_row], [len(PROMPTS[row])], [PROMPTS[row]])
    _check_caches(case)


@pytest.mark.parametrize("unheard", [False, True])
@pytest.mark.parametrize("is_read", [False, True])
def test_what_is_known_of_a_prompt_stays_when_it_ends_at_once(is_read: bool, unheard: bool) -> None:
    """Whether its slots are its own or were exchanged; behind it nothing is held."""
    case, row, hole = alike([0, 0, 0], [4, 4, 4]), 1, 1
    exchange(case, row, hole)
    pool_row, prompt = int(case.rows.pool_rows[row]), PROMPTS[row]
    slots = case.table[pool_row].long()
    if is_read:  # by whoever had them, which nobody tells this request
        case.cache.started(99, prompt, slots[: len(prompt)], read=True)
    before = case.cache._is_held.clone()
    before[slots[len(prompt) : len(prompt) + STRIDE]] &= not unheard
    case.cache.finished(pool_row, unheard)
    assert torch.equal(case.cache._is_held, before)


def test_an_end_that_the_draft_has_not_heard_of() -> None:
    """The last request ends under overlap: SGLang reports it before the next iteration would."""
    case, row, prompt = alike([0, 0, 0], [4, 4, 4]), 1, PROMPTS[1]
    pool_row, unheard = int(case.rows.pool_rows[row]), [3, 4, 5]
    slots = case.table[pool_row, len(prompt) : len(prompt) + len(unheard)]
    case.cache.started(99, unheard, slots, read=True)  # as the slots' last user left them
    case.cache.finished(pool_row, unheard=True)
    text = [*prompt, *unheard]
    case.cache.fill_holes([pool_row], [len(text)], [text])
    fresh = DenseModel(hf_model())
    one = (np.array([pool_row]), np.array([0]), np.array([len(text)]))
    CpuForward(fresh, case.table).run(TreeBatch.causal(np.array(text), *one))
    torch.testing.assert_close(case.models[1].pool.k[0][slots.long()], fresh.pool.k[0][slots.long()])


def test_a_request_that_ends_takes_back_nothing_of_its_rows_last_user() -> None:
    """Behind its own tokens the row lists slots that belong to the radix cache by now."""
    case, row, prompt = alike([0, 0, 0], [4, 4, 4]), 1, PROMPTS[1]
    pool_row, others = int(case.rows.pool_rows[row]), [3, 4, 5]
    slots = case.table[pool_row, len(prompt) : len(prompt) + len(others)]
    case.cache.started(99, others, slots, read=True)
    case.cache.finished(pool_row, unheard=False)
    assert case.cache._is_held[slots.long()].all()


def exchange(case: Case, row: int, hole: int) -> None:
    """Gives a prompt other slots of the same text, of which the draft read only the first ``hole``."""
    pool_row, prompt = int(case.rows.pool_rows[row]), PROMPTS[row]
    old = case.table[pool_row, : len(prompt)].long()
    new = case.models[0].pool.slots - 1 - torch.arange(len(prompt))
    case.models[0].move_kv_cache(new, old)
    case.models[1].move_kv_cache(new[:hole], old[:hole])
    case.cache.started(99, prompt[:hole], new[:hole], read=True)
    case.cache.started(99, prompt, new[hole:], read=False)
    case.table[pool_row, : len(prompt)] = new.int()


def test_only_rows_that_may_have_trees_are_drafted_for() -> None:
    case = alike([0, 0, 1], [2, 0, 3])
    trees = case.propose(depth=3, width=2).trees
    assert np.diff(trees.row_start).tolist() == [6, 0, 6]
    for r in (0, 2):
        check_proposal(trees, r, [*PROMPTS[r], ROOTS[r]], 3, 2)
    assert case.held(1) == (len(PROMPTS[1]), [])


def test_a_shape_larger_than_the_window_is_cut() -> None:
    case = alike([0, 0, 0], [8, 8, 8])
    proposal = case.propose(depth=8, width=3, branching=(1, 1, 3, 1, 1, 1, 1, 1))
    assert proposal.trees.depth.max() == 6 and proposal.width == 15
    assert np.diff(proposal.trees.row_start).tolist() == [14] * 3 and MAX_NODES >= 14


@pytest.mark.parametrize("shape", [dict(depth=3, width=3), dict(depth=4, width=2, branching=(2, 1, 2, 1))])
def test_the_flat_layout_equals_decoding_every_path(shape: dict[str, Any]) -> None:
    """Rows with trees of unequal size, one without any, nodes at scattered slots."""
    model = hf_model()
    case = Case(hf_model(seed=4), model, [0, 0, 0], [4, 0, 4])
    proposal = case.propose(**shape)
    trees = proposal.trees
    keep = np.ones(trees.n_nodes, np.bool_)
    keep[trees.row_start[2] :] = trees.depth[trees.row_start[2] :] <= 2
    selection = selection_of(trees, keep)
    assert selection.counts[0] > selection.counts[2] > selection.counts[1] == 0
    verified = verify.build(case.rows, proposal, selection)
    logits = case.target.logits(case.target.run(verified.batch))
    assert len(logits) == len(verified) == 3 + keep.sum()
    for i in range(len(verified)):
        path, at = [], i
        while at != verified.parent[at]:
            path.append(int(verified.tokens[at]))
            at = int(verified.parent[at])
        row = int(verified.row[i])
        assert verified.tokens[at] == ROOTS[row]
        exact = path_logprobs(model, [*PROMPTS[row], ROOTS[row], *reversed(path)])
        assert torch.allclose(logits[i].double().log_softmax(-1), exact, atol=1e-4)


def test_windows_of_one_row_never_share_a_slot() -> None:
    case = alike([0, 0, 0], [4, 4, 4])
    proposal = case.propose(depth=4, width=3)
    trees, rows = proposal.trees, case.rows
    verified = verify.build(rows, proposal, selection_of(trees, np.ones(trees.n_nodes, np.bool_)))
    cached = [case.table[p, : len(PROMPTS[r])].numpy() for r, p in enumerate(rows.pool_rows.tolist())]
    every = np.concatenate([token_slots(case.table, verified.batch).numpy(), *cached])
    assert len(every) == 3 * (1 + 12) + sum(map(len, PROMPTS))
    assert len(np.unique(every)) == len(every)
    # The best beam of each level stands where an accepted path belongs, so it needs no move.
    for start, end in zip(trees.row_start[:-1], trees.row_start[1:], strict=True):
        for level in range(1, 5):
            nodes = start + np.flatnonzero(trees.depth[start:end] == level)
            assert proposal.column[nodes[np.argmax(trees.logprob[nodes])]] == level
