"""Tree shapes, the beam search's bookkeeping, and verification, each against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from adaserve.engine.sources.beam import USUALLY_PENDING, Draft
from adaserve.engine.state import DecodeRows
from adaserve.engine.trees import verify
from adaserve.engine.trees.shape import tree_shape
from tests.engine.trees.factories import (
    VOCABULARY,
    FakeForward,
    decode_rows,
    drafted,
    drafter,
    iteration_plan,
    random_selection,
)

SHAPES = [(1, 1, None), (1, 4, None), (4, 1, None), (5, 3, None), (3, 1, (2, 1, 3)), (4, 1, (1, 1, 3, 1))]


@pytest.mark.parametrize(("depth", "width", "branching"), SHAPES)
def test_shape(depth: int, width: int, branching: tuple[int, ...] | None) -> None:
    shape = tree_shape(depth, width, branching)
    beams = (
        (width,) * depth if branching is None else tuple(itertools.accumulate(branching, lambda a, b: a * b))
    )
    assert shape.beams == beams and shape.nodes == sum(beams) and shape.width == 1 + sum(beams)
    # Every node has a column of its own, none takes the root's, the best beam of step s stands at s.
    assert sorted(shape.columns) == list(range(1, shape.width))
    assert [shape.columns[s] for s in shape.start[:-1]] == list(range(1, depth + 1))
    assert list(shape.depth) == [s + 1 for s, count in enumerate(beams) for _ in range(count)]


def paths(draft: Draft, row: int) -> list[list[int]]:
    """Tokens from the root's child down to every node of a row."""
    trees = draft.trees
    nodes = range(trees.row_start[row], trees.row_start[row + 1])
    out: list[list[int]] = []
    for node in nodes:
        above = out[trees.parent[node]] if trees.parent[node] >= 0 else []
        out.append([*above, int(trees.token[node])])
    return out


def path_logprob(table: torch.Tensor, root: int, path: list[int]) -> float:
    logprobs = torch.log_softmax(table.double(), -1)
    return float(sum(logprobs[a, b] for a, b in itertools.pairwise([root, *path])))


@pytest.mark.parametrize(("depth", "width", "branching"), SHAPES)
def test_draft_says_what_it_means(depth: int, width: int, branching: tuple[int, ...] | None) -> None:
    rows, forward = decode_rows([5, 9, 3]), FakeForward()
    draft = drafted(rows, iteration_plan(3, depth, width, branching), forward)
    for row, root in enumerate(rows.roots):
        found = paths(draft, row)
        assert len({tuple(p) for p in found}) == len(found), "a path is there twice"
        start = draft.trees.row_start[row]
        for j, path in enumerate(found):
            assert draft.trees.depth[start + j] == len(path)
            assert draft.trees.logprob[start + j] == pytest.approx(
                path_logprob(forward.table, root, path), abs=1e-4
            )


def test_beam_search_is_the_best_of_all_extensions() -> None:
    depth, width = 4, 3
    rows, forward = decode_rows([5]), FakeForward()
    draft = drafted(rows, iteration_plan(1, depth, width), forward)
    beams: list[list[int]] = [[]]
    found = paths(draft, 0)
    for step in range(depth):
        # Only the best `width` children of a beam can be among the best `width` of all.
        every = [[*b, t] for b in beams for t in range(VOCABULARY)]
        beams = sorted(every, key=lambda p: -path_logprob(forward.table, 1, p))[:width]
        assert sorted(found[step * width : (step + 1) * width]) == sorted(beams)


def test_nodes_see_their_ancestors_and_nothing_else() -> None:
    draft = drafted(decode_rows([5, 9]), iteration_plan(2, 4, 3))
    trees, columns = draft.trees, draft.shape.columns
    for row, j in itertools.product(range(2), range(draft.nodes_per_row)):
        expected, node = {0}, j
        while node >= 0:
            expected.add(int(columns[node]))
            node = int(trees.parent[trees.row_start[row] + node])
        assert set(np.flatnonzero(draft.visible[row, j])) == expected


@pytest.mark.parametrize("behind", [0, 1, 3])
def test_draft_catches_up_and_writes_into_its_window(behind: int) -> None:
    rows, forward = decode_rows([5, 9], behind=behind), FakeForward()
    draft = drafted(rows, iteration_plan(2, 3, 2), forward)
    late = behind > USUALLY_PENDING  # then in a forward of its own, whose time is not that of drafting
    assert (draft.catch_up_s > 0) == late
    expected = [*range(5 - behind, 5), *range(9 - behind, 9)]
    fed: dict[int, list[int]] = {7: [], 1: [], 2: []}
    for tokens, positions, slots, _ in forward.calls[: 1 + late]:
        for token, position in zip(tokens.tolist(), positions.tolist(), strict=True):
            fed[token].append(position)
        pool_rows = rows.pool_indices[(positions > 5).long()]
        assert torch.equal(slots, rows.req_to_token[pool_rows, positions])
    assert fed == {7: expected, 1: [5], 2: [9]}
    assert [s.draft_len for s in rows.states] == [6, 10] and not any(s.pending for s in rows.states)
    later = torch.cat([call[2] for call in forward.calls[1 + late :]]).tolist()
    assert len(set(later)) == len(later), "two nodes share a KV slot"
    assert set(later) <= set(draft.window.flatten().tolist())


def test_rows_without_a_tree() -> None:
    rows = decode_rows([5, 9, 3], max_depth=[4, 0, 2])
    draft = drafted(rows, iteration_plan(3, 6, 2))
    assert draft.rows.tolist() == [0, 2] and draft.depth == 4  # as deep as the deepest row may go
    assert np.diff(draft.trees.row_start).tolist() == [8, 0, 8]
    assert rows.states[1].draft_len == 9, "a row without a tree must not be fed"


def test_nothing_to_draft() -> None:
    assert drafter().draft(iteration_plan(2, 3, 2), decode_rows([5, 9], max_depth=[0, 0]), None) is None


def test_early_stop_keeps_whole_levels() -> None:
    asked: list[int] = []

    def keep(plan: object, step: int, frontier: np.ndarray) -> bool:
        asked.append(step)
        assert frontier.shape == (3, 2) and np.isneginf(frontier[1]).all()
        return step < 2

    rows = decode_rows([5, 9, 3], max_depth=[5, 0, 5])
    draft = drafter().draft(iteration_plan(3, 5, 2), rows, keep)
    assert draft is not None and draft.depth == 2 and asked == [1, 2]
    assert draft.nodes_per_row == 4 and np.diff(draft.trees.row_start).tolist() == [4, 0, 4]


@pytest.mark.parametrize(("max_nodes", "depth"), [(12, 4), (11, 3), (3, 1), (2, 0)])
def test_a_tree_is_cut_to_its_window(max_nodes: int, depth: int) -> None:
    draft = drafter(max_nodes=max_nodes).draft(iteration_plan(1, 4, 3), decode_rows([5]), None)
    assert (draft.depth if draft is not None else 0) == depth


def accepted_by_hand(batch: verify.VerifyBatch, draws: np.ndarray, row: int) -> list[int]:
    """The walk, one step at a time: root, then the child that equals the draw, as long as there is one."""
    path = [int(batch.root[row])]
    while True:
        children = [i for i in range(len(batch.tokens)) if batch.parent[i] == path[-1] and batch.depth[i] > 0]
        hits = [c for c in children if batch.tokens[c] == draws[path[-1]]]
        assert len(hits) <= 1
        if not hits:
            return path
        path.append(hits[0])


def verified(rows: DecodeRows, draft: Draft, rng: np.random.Generator) -> verify.VerifyBatch:
    return verify.build(rows, draft, random_selection(draft, rng))


@pytest.mark.parametrize("seed", range(20))
def test_accept_walks_the_tree(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = decode_rows([5, 9, 3, 7], max_depth=[5, 0, 9, 9])
    draft = drafted(rows, iteration_plan(4, 4, 3))
    batch = verified(rows, draft, rng)
    draws = rng.integers(0, VOCABULARY, len(batch.tokens))
    for i in range(len(draws)):  # mostly one of the node's own children, or the walks would end at once
        children = np.flatnonzero((batch.parent == i) & (batch.depth > 0))
        if len(children) and rng.random() < 0.8:
            draws[i] = batch.tokens[rng.choice(children)]
    acceptance = verify.accept(batch, draws)
    for row in range(4):
        path = accepted_by_hand(batch, draws, row)
        assert np.flatnonzero(acceptance.accepted & (batch.row == row)).tolist() == path
        assert acceptance.count[row] == len(path) - 1 and acceptance.last[row] == path[-1]


@pytest.mark.parametrize("seed", range(5))
def test_built_batch(seed: int) -> None:
    """Slots, positions and the mask of every token, against the tree followed by hand."""
    rows = decode_rows([5, 9, 3], max_depth=[5, 0, 9])
    draft = drafted(rows, iteration_plan(3, 3, 3))
    batch = verified(rows, draft, np.random.default_rng(seed))
    mask, offset = batch.plan.custom_mask, 0
    for i in range(len(batch.tokens)):
        row = int(batch.row[i])
        length, pool_row = int(rows.seq_lens[row]), rows.req_to_token[rows.pool_indices[row]]
        assert batch.positions[i] == length + batch.depth[i]
        assert batch.slots[i] == pool_row[length + batch.column[i]]
        kv_len = int(batch.plan.kv_indptr[row + 1] - batch.plan.kv_indptr[row])
        kv = batch.plan.kv_indices[batch.plan.kv_indptr[row] : batch.plan.kv_indptr[row + 1]]
        lineage, node = [i], i
        while batch.depth[node]:
            node = int(batch.parent[node])
            lineage.append(node)
        expected = {*pool_row[:length].tolist(), *(int(batch.slots[j]) for j in lineage)}
        assert mask is not None
        seen = mask[offset : offset + kv_len]
        assert set(kv[seen].tolist()) == expected
        offset += kv_len


def test_roots_only() -> None:
    rows = decode_rows([5, 9])
    draft = drafted(rows, iteration_plan(2, 2, 2))
    nothing = random_selection(draft, np.random.default_rng(0))
    nothing.keep[:] = False
    batch = verify.build(rows, draft, nothing)
    assert batch.tokens.tolist() == [1, 2] and batch.positions.tolist() == [5, 9]
    acceptance = verify.accept(batch, np.array([4, 4]))
    assert acceptance.count.tolist() == [0, 0] and acceptance.last.tolist() == [0, 1]
