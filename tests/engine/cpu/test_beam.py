"""The beam search in one C call builds the trees of the search that goes step by step, and of brute force."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from adaserve.engine.cpu import LlamaModel
from adaserve.engine.cpu.beam_arrays import MAX_WIDTH, BeamArrays
from adaserve.engine.cpu.device import CpuDevice
from adaserve.engine.cpu.forwards import CpuForward, LlamaForward
from adaserve.engine.cpu.noise import transformed
from adaserve.engine.device import Beams, KeepGoing, Ready, Search
from adaserve.engine.logits.logit_transform import LogitTransform
from adaserve.engine.request_state import DecodeRows, RequestState
from adaserve.engine.sources.beam import MAX_PENDING, BeamSource
from adaserve.engine.sources.draft_cache import DraftCache, Held
from adaserve.engine.sources.source import KeepDrafting
from adaserve.engine.trees import verify
from adaserve.engine.trees.batch import TreeBatch
from adaserve.engine.trees.proposal import Proposal
from adaserve.scheduler.interface import DraftPlan, IterationPlan
from adaserve.sharpening import DraftSharpening
from tests.engine.cpu.factories import Chunk, Pool, hf_model, read_hf, run
from tests.engine.trees.factories import iteration_plan, paths, running, selection_of

LENGTHS = [12, 40, 17]
ROOTS = [3, 5, 9]
TEMPERATURES = np.array([0.0, 0.7, 1.0])
WINDOW = 64
SINKS, RECENT = 2, np.array([0, 16, 9])  # what a sparse draft reads of the three contexts
SHARPENING = DraftSharpening(
    (0.0, 1.0), (0.5, 1.0), shared=((0.0, 0.7, 1.0), (0.5, 0.7, 1.0), (0.0, 0.56, 0.8))
)
SHAPES = [(1, 1), (5, 1), (1, 4), (4, 3), (2, 16)]


class NativeForward(CpuForward):
    """All levels in one call, or a failure."""

    def _walk(self, first: TreeBatch, search: Search, keep: KeepGoing | None) -> Beams:
        raise AssertionError("the kernels do not compile here")


class WalkingForward(CpuForward):
    """Level by level, though the kernels could do it in one call."""

    def search(self, first: TreeBatch, search: Search, keep: KeepGoing | None) -> Ready:
        beams = self._walk(first, search, keep)
        return Ready(lambda: beams)


class Setting:
    """Three requests with cached prefixes, of which the draft has not seen the last ``behind`` tokens."""

    def __init__(
        self,
        forward: Callable[[LlamaForward, torch.Tensor], CpuForward],
        behind: int = 0,
        max_depth: list[int] | None = None,
        *,
        noisy: bool = True,
        recent: np.ndarray | None = None,
    ) -> None:
        self.hf = hf_model()
        weights, config = read_hf(self.hf)
        self.llama, self.pool = LlamaModel(weights, config, "fp32"), Pool(config, len(weights.layers))
        rng, n = np.random.default_rng(1), len(LENGTHS)
        self.texts = [rng.integers(0, config.vocab_size, length).tolist() for length in LENGTHS]
        self.table = torch.zeros(n, 128, dtype=torch.int32)
        pools = SimpleNamespace(k_buffer=self.pool.k, v_buffer=self.pool.v)
        self.forward = forward(LlamaForward(self.llama, pools), self.table)
        self.cache = DraftCache(self.forward, self.table, self.pool.slots, stride=9)
        device = CpuDevice(self.forward, self.forward)
        self.source = BeamSource(device, self.cache, SHARPENING, WINDOW - 1)
        states = [RequestState(f"r{r}", "chat", 1.0, 0.0, generated=[ROOTS[r]], key=r + 1) for r in range(n)]
        view = replace(running(n, max_depth), temperature=TEMPERATURES, context_tokens=np.array(LENGTHS))
        self.behind, self.recent = behind, recent
        self.rows = DecodeRows(states, np.array(LENGTHS), np.array([2, 0, 1]), view, noisy)
        for row, text in zip(self.rows.pool_rows.tolist(), self.texts, strict=True):
            self._prefill(row, text, behind)

    def _prefill(self, pool_row: int, text: list[int], behind: int) -> None:
        taken, seen = self.pool.take(len(text) + WINDOW), len(text) - behind
        self.table[pool_row, : len(taken)] = torch.tensor(taken, dtype=torch.int32)
        run(self.llama, self.pool, [Chunk(text[:seen], list(range(seen)), taken[:seen], [])])
        self.cache.started(pool_row, text[:seen], self.table[pool_row, :seen], read=True)
        if behind:
            self.cache.advanced(pool_row, text[seen:], 0)

    def propose(self, depth: int, width: int, keep: KeepDrafting | None = None) -> Proposal:
        plan = replace(
            iteration_plan(len(LENGTHS), depth, width),
            running=self.rows.running,
            draft=DraftPlan(depth, width, window=self.recent, sinks=SINKS),
        )
        pending = self.source.propose(plan, self.rows, keep)
        assert pending is not None
        self.caught_up = pending.caught_up is not None
        return pending.read()

    def held(self) -> list[Held]:
        return [self.cache[row] for row in self.rows.pool_rows.tolist()]

    def seen(self, proposal: Proposal) -> np.ndarray:
        """bool [T, width]: what the roots and all candidates see of their windows."""
        every = selection_of(proposal.trees, np.ones(proposal.trees.n_nodes, np.bool_))
        seen = verify.build(self.rows, proposal, every).batch.seen
        assert seen is not None
        return seen


def same(one: Setting, by_one: Proposal, other: Setting, by_other: Proposal) -> None:
    assert by_one.width == by_other.width
    assert np.array_equal(by_one.column, by_other.column)
    for name in ("row_start", "token", "parent", "depth"):
        assert np.array_equal(getattr(by_one.trees, name), getattr(by_other.trees, name)), name
    assert np.allclose(by_one.trees.logprob, by_other.trees.logprob, atol=1e-5)
    assert np.array_equal(one.seen(by_one), other.seen(by_other))
    for a, b in zip(one.pool.k + one.pool.v, other.pool.k + other.pool.v, strict=True):
        assert torch.allclose(a, b, atol=1e-5), "the draft's KV differs"
    assert one.held() == other.held()
    assert one.caught_up == other.caught_up


@pytest.mark.parametrize("recent", [None, RECENT])
@pytest.mark.parametrize("behind", [0, 1, 3, 9])
@pytest.mark.parametrize(("depth", "width"), SHAPES)
def test_the_same_trees(depth: int, width: int, behind: int, recent: np.ndarray | None) -> None:
    one, other = (Setting(forward, behind, recent=recent) for forward in (NativeForward, WalkingForward))
    same(one, one.propose(depth, width), other, other.propose(depth, width))
    assert one.held() == [Held(length, []) for length in LENGTHS]
    assert one.caught_up == (behind > MAX_PENDING)


def logprobs_of(case: Setting, row: int, path: tuple[int, ...]) -> torch.Tensor:
    """float64 [vocab]: of what may follow ``path``, as the draft's logits are read, computed from scratch."""
    text = torch.tensor([[*case.texts[row], ROOTS[row], *path]])
    hidden = torch.full((1, 1, text.shape[1], text.shape[1]), -torch.inf).triu(1)
    if case.recent is not None and case.recent[row]:
        known = LENGTHS[row] - case.behind  # before these everything was read
        hidden[..., known:, SINKS : LENGTHS[row] - case.recent[row]] = -torch.inf
    with torch.no_grad():
        logits = case.hf(text, attention_mask=hidden).logits[0, -1:]
    transform = SHARPENING.with_shared_noise if case.rows.noisy else SHARPENING.without_shared_noise
    scale, spread = transform(TEMPERATURES[row : row + 1])
    position = np.array([LENGTHS[row] + len(path)])
    key = np.array([row + 1], np.uint64)
    as_read = transformed(
        logits, LogitTransform(scale.astype(np.float32), spread.astype(np.float32), key, position)
    )
    return as_read[0].double().log_softmax(-1)


@pytest.mark.parametrize("noisy", [True, False])
@pytest.mark.parametrize("forward", [NativeForward, WalkingForward])
@pytest.mark.parametrize(("depth", "width", "behind"), [(4, 3, 0), (3, 2, 3), (2, 16, 1)])
@pytest.mark.parametrize("recent", [None, RECENT])
def test_the_best_of_all_extensions(
    forward: type[CpuForward], depth: int, width: int, behind: int, noisy: bool, recent: np.ndarray | None
) -> None:
    """Every beam expanded by the whole vocabulary, in a fresh forward of its whole text."""
    case = Setting(forward, behind, noisy=noisy, recent=recent)
    trees = case.propose(depth, width).trees
    for row in range(len(LENGTHS)):
        found, start = paths(trees, row), int(trees.row_start[row])
        assert len(found) == depth * width
        beams: dict[tuple[int, ...], float] = {(): 0.0}
        for level in range(depth):
            grown = {
                (*path, token): score + logprob
                for path, score in beams.items()
                for token, logprob in enumerate(logprobs_of(case, row, path).tolist())
            }
            beams = dict(sorted(grown.items(), key=lambda item: -item[1])[:width])
            nodes = slice(start + level * width, start + (level + 1) * width)
            assert found[level * width : (level + 1) * width] == list(beams), "best first"
            assert np.allclose(trees.logprob[nodes], list(beams.values()), atol=1e-3)


def test_of_equal_beams_the_kernels_keep_the_first() -> None:
    case = Setting(NativeForward, noisy=False)
    weights = read_hf(case.hf)[0]
    case.llama.held = case.llama.packed(replace(weights, lm_head=torch.zeros_like(weights.lm_head)))
    trees = case.propose(3, 2).trees
    for row in range(len(LENGTHS)):
        assert paths(trees, row) == [(0,), (1,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 1)]


def test_what_beams_saw_in_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The windows' columns that C let every beam see are those of its ancestors and its own."""
    case, searched = Setting(NativeForward), list[BeamArrays]()
    native = case.llama.native
    assert native is not None
    search = native.beam_search

    def spy(*args: Any) -> int:
        searched.append(args[-2])
        return search(*args)

    monkeypatch.setattr(native, "beam_search", spy)
    proposal = case.propose(4, 3)
    seen = case.seen(proposal).reshape(len(LENGTHS), 1 + 12, proposal.width)
    assert np.array_equal(searched[0].visible, seen[:, 1:])


def test_what_the_kernels_leave_to_the_walk() -> None:
    """Fixed branching, and more beams than the kernels' buffers hold."""
    case = Setting(NativeForward)
    with pytest.raises(AssertionError, match="do not compile"):
        case.propose(2, MAX_WIDTH + 1)
    plain, walking = Setting(CpuForward), Setting(WalkingForward)
    same(plain, plain.propose(2, MAX_WIDTH + 1), walking, walking.propose(2, MAX_WIDTH + 1))


def test_rows_without_a_tree() -> None:
    one, other = Setting(NativeForward, 0, [4, 0, 2]), Setting(WalkingForward, 0, [4, 0, 2])
    by_one = one.propose(3, 2)
    same(one, by_one, other, other.propose(3, 2))
    assert np.diff(by_one.trees.row_start).tolist() == [6, 0, 6]


def test_stopping_early() -> None:
    asked: list[tuple[int, np.ndarray]] = []

    def keep(plan: IterationPlan, step: int, frontier: np.ndarray) -> bool:
        assert plan.draft.depth == 5
        asked.append((step, frontier.copy()))
        return step < 3

    max_depth = [5, 0, 5]
    one, other = Setting(NativeForward, 0, max_depth), Setting(WalkingForward, 0, max_depth)
    by_one = one.propose(5, 2, keep)
    by_native, asked = asked, []
    assert [step for step, _ in by_native] == [1, 2, 3]
    assert by_one.trees.depth.max() == 3 and np.diff(by_one.trees.row_start).tolist() == [6, 0, 6]
    # What the policy was told of a level are its path probabilities.
    for step, frontier in by_native:
        assert np.isneginf(frontier[1]).all()
        told = frontier[[0, 2]].ravel()
        assert np.array_equal(told, by_one.trees.logprob[by_one.trees.depth == step])
    same(one, by_one, other, other.propose(5, 2, keep))
    assert [step for step, _ in asked] == [1, 2, 3]
    for (_, a), (_, b) in zip(by_native, asked, strict=True):
        assert np.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("forward", [NativeForward, WalkingForward])
def test_a_draft_that_stopped_early_knows_what_it_has_seen(forward: type[CpuForward]) -> None:
    """Of the accepted path it has the KV of all but the last level that it made."""
    case = Setting(forward)
    proposal = case.propose(5, 2, lambda _plan, step, _frontier: step < 3)
    trees = proposal.trees
    best = np.isin(proposal.column, [1, 2, 3])  # the likeliest beam of each level
    chains = [r for r in range(len(LENGTHS)) if _is_chain(trees.parent[trees.row_start[r] :][:6])]
    assert chains, "no row's best beams follow one another"
    keep = best & np.isin(np.repeat(np.arange(len(LENGTHS)), 6), chains)
    verified = verify.build(case.rows, proposal, selection_of(trees, keep))
    case.source.advanced(case.rows, verified, np.ones(len(verified), np.bool_))
    for r, held in enumerate(case.held()):
        path = [ROOTS[r], *trees.token[trees.row_start[r] :][:6:2].tolist()] if r in chains else [ROOTS[r]]
        known = min(len(path), 3)
        assert held == Held(LENGTHS[r] + known, path[known:])


def _is_chain(parent: np.ndarray) -> bool:
    """Whether the first of two beams is the parent of the next level's first."""
    return parent[::2].tolist() == [-1, 0, 2]


def test_an_error_of_the_policy_is_raised() -> None:
    def keep(*_: Any) -> bool:
        raise ValueError("a policy's fault")

    with pytest.raises(ValueError, match="a policy's fault"):
        Setting(NativeForward).propose(3, 2, keep)
