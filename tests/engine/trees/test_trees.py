"""Tree shapes, the beam search's bookkeeping, merging and verification, each against brute force."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from adaserve.engine.sources.beam import MAX_PENDING
from adaserve.engine.trees import verify
from adaserve.engine.trees.attention import Scores, attend, attention_plan, token_slots
from adaserve.engine.trees.batch import TreeBatch
from adaserve.engine.trees.proposal import Proposal, merge
from adaserve.engine.trees.shape import tree_shape
from adaserve.scheduler.interface import CandidateTrees
from tests.engine.trees.factories import (
    VOCABULARY,
    Drafted,
    FakeModel,
    decode_rows,
    drafted,
    paths,
    random_selection,
    selection_of,
    slot_table,
    tensors_of,
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
    assert shape.children == max(branching or (width,))


def path_logprob(table: torch.Tensor, root: int, path: tuple[int, ...]) -> float:
    logprobs = torch.log_softmax(table.double(), -1)
    return float(sum(logprobs[a, b] for a, b in itertools.pairwise([root, *path])))


@pytest.mark.parametrize(("depth", "width", "branching"), SHAPES)
def test_a_proposal_says_what_it_means(depth: int, width: int, branching: tuple[int, ...] | None) -> None:
    rows, model = decode_rows([5, 9, 3]), FakeModel()
    proposal = drafted(rows, depth, width, branching)
    trees = proposal.trees
    for row, root in enumerate(rows.root_tokens):
        found, start = paths(trees, row), trees.row_start[row]
        assert len(set(found)) == len(found), "a path is there twice"
        columns = proposal.column[start : start + len(found)]
        assert len(set(columns)) == len(columns) and columns.min() > 0 and columns.max() < proposal.width
        for j, path in enumerate(found):
            assert trees.depth[start + j] == len(path)
            assert trees.logprob[start + j] == pytest.approx(path_logprob(model.table, root, path), abs=1e-4)


def test_beam_search_is_the_best_of_all_extensions() -> None:
    depth, width = 4, 3
    table = FakeModel().table
    found = paths(drafted(decode_rows([5]), depth, width).trees, 0)
    beams: list[tuple[int, ...]] = [()]
    for step in range(depth):
        # Only the best `width` children of a beam can be among the best `width` of all.
        every = [(*b, t) for b in beams for t in range(VOCABULARY)]
        beams = sorted(every, key=lambda p: -path_logprob(table, 1, p))[:width]
        assert sorted(found[step * width : (step + 1) * width]) == sorted(beams)


@pytest.mark.parametrize("behind", [0, 1, 3])
def test_the_draft_catches_up_and_writes_into_its_window(behind: int) -> None:
    rows = decode_rows([5, 9])
    case = Drafted(rows, behind=behind)
    proposal = case.propose(3, 2)
    assert proposal is not None
    late = behind > MAX_PENDING  # then in a forward of its own, whose time is not that of drafting
    assert case.caught_up == late
    expected = [*range(5 - behind, 5), *range(9 - behind, 9)]
    fed: dict[int, list[int]] = {7: [], 1: [], 2: []}
    calls = case.model.calls
    for call in calls[: 1 + late]:
        for token, position in zip(call.tokens.tolist(), call.positions.tolist(), strict=True):
            fed[token].append(position)
        pool_rows = rows.pool_rows[(call.positions > 5).long()]
        assert torch.equal(call.slots, case.table[pool_rows, call.positions].long())
    assert fed == {7: expected, 1: [5], 2: [9]}
    held = [case.cache[row] for row in rows.pool_rows.tolist()]
    assert [h.length for h in held] == [5, 9] and not any(h.pending for h in held)
    later = torch.cat([call.slots for call in calls[1 + late :]]).tolist()
    assert len(set(later)) == len(later), "two nodes share a KV slot"
    windows = [case.table[p, n : n + proposal.width] for p, n in zip(rows.pool_rows, (5, 9), strict=True)]
    assert set(later) <= set(torch.cat(windows).tolist())


@pytest.mark.parametrize("behind", [0, 1, 3])
def test_what_is_read_of_a_context(behind: int) -> None:
    """By every forward of the draft: the first two tokens, the recent ones, and the candidates."""
    lengths, recent = [30, 9, 25, 10], [4, 8, 0, 7]
    case = Drafted(decode_rows(lengths), behind=behind)
    proposal = case.propose(3, 2, recent=recent)
    assert proposal is not None and len(case.model.calls) == 3
    for step, call in enumerate(case.model.calls):
        plan, positions = call.plan, call.positions
        for r, (q0, q1, k0, k1) in enumerate(plan.spans):
            length = lengths[r]
            # Tokens that the draft has not seen follow one another, and nothing stands behind the root.
            end = length + (1 if step == 0 and behind else proposal.width)
            places = [p for p in range(end) if p < 2 or p >= length - recent[r] or not recent[r]]
            right = case.table[case.rows.pool_rows[r], places]
            assert plan.kv_indices[k0:k1].tolist() == right.tolist()
            if step == 0:
                assert positions[q0:q1].tolist() == list(range(length - behind, length + 1))
            else:
                assert positions[q0:q1].tolist() == [length + step] * 2


def test_rows_without_a_tree() -> None:
    case = Drafted(decode_rows([5, 9, 3], max_depth=[4, 0, 2]), behind=1)
    proposal = case.propose(6, 2)
    assert proposal is not None  # as deep as the deepest row may go
    assert np.diff(proposal.trees.row_start).tolist() == [8, 0, 8]
    held = case.cache[int(case.rows.pool_rows[1])]
    assert (held.length, len(held.pending)) == (8, 1), "a row without a tree must not be fed"


def test_nothing_to_draft() -> None:
    assert Drafted(decode_rows([5, 9], max_depth=[0, 0])).propose(3, 2) is None


def test_early_stop_keeps_whole_levels() -> None:
    asked: list[int] = []

    def keep(plan: object, step: int, frontier: np.ndarray) -> bool:
        asked.append(step)
        assert frontier.shape == (3, 2) and np.isneginf(frontier[1]).all()
        return step < 2

    proposal = Drafted(decode_rows([5, 9, 3], max_depth=[5, 0, 5])).propose(5, 2, keep=keep)
    assert proposal is not None and asked == [1, 2]
    assert np.diff(proposal.trees.row_start).tolist() == [4, 0, 4] and proposal.trees.depth.max() == 2


@pytest.mark.parametrize(("max_nodes", "depth"), [(12, 4), (11, 3), (3, 1), (2, 0)])
def test_a_tree_is_cut_to_its_window(max_nodes: int, depth: int) -> None:
    proposal = Drafted(decode_rows([5]), max_nodes=max_nodes).propose(4, 3)
    assert (int(proposal.trees.depth.max()) if proposal is not None else 0) == depth


# -- merging ------------------------------------------------------------------------------------


def by_path(proposal: Proposal, row: int) -> dict[tuple[int, ...], tuple[float, int]]:
    """Log-probability and column of every path of a row."""
    trees, start = proposal.trees, proposal.trees.row_start[row]
    found = paths(trees, row)
    assert len(set(found)) == len(found)
    return {
        p: (float(trees.logprob[start + i]), int(proposal.column[start + i])) for i, p in enumerate(found)
    }


def random_proposal(
    rng: np.random.Generator, n: int, depth: int, source: int, model: int | None = None
) -> Proposal:
    """Few tokens, so that proposals share paths, and none for the last row. ``model``: number of the draft
    model that makes it."""
    trees, columns = [], []
    for row in range(n):
        nodes: list[tuple[int, int, int, float]] = []
        seen = set()
        for _ in range(int(rng.integers(0, 9)) * (row < n - 1)):
            parents = [-1, *(i for i, node in enumerate(nodes) if node[2] < depth)]
            parent, token = int(rng.choice(parents)), int(rng.integers(0, 3))
            if (parent, token) in seen:
                continue
            seen.add((parent, token))
            above = nodes[parent] if parent >= 0 else (0, 0, 0, 0.0)
            nodes.append((token, parent, above[2] + 1, above[3] - float(rng.random())))
        order = sorted(range(len(nodes)), key=lambda i: nodes[i][2])
        place = {old: new for new, old in enumerate(order)} | {-1: -1}
        trees.append([(nodes[i][0], place[nodes[i][1]], *nodes[i][2:]) for i in order])
        columns.append(1 + rng.permutation(len(nodes)))
    flat = [node for row in trees for node in row]
    width = 1 + max(map(len, trees))
    values = [np.array(c) for c in zip(*flat, strict=True)] or [np.zeros(0, np.int64)] * 3 + [np.zeros(0)]
    starts = np.cumsum([0, *map(len, trees)])
    bits, column = np.full(len(flat), source), np.concatenate(columns).astype(np.int64)
    drafted = {} if model is None else {model: column}
    return Proposal(CandidateTrees(starts, *values, bits), column, width, drafted)


@pytest.mark.parametrize("seed", range(30))
def test_merged_proposals_are_one_tree_by_path(seed: int) -> None:
    rng = np.random.default_rng(seed)
    proposals = [random_proposal(rng, 4, 4, source=1 << k) for k in range(3)]
    merged = merge(proposals, 4)
    assert merged.trees.source is not None
    for row in range(4):
        each = [by_path(p, row) for p in proposals]
        got = by_path(merged, row)
        assert got.keys() == set().union(*each)
        columns = [column for _, column in got.values()]
        assert len(set(columns)) == len(columns) and all(0 < c < merged.width for c in columns)
        for path, (logprob, column) in got.items():
            assert logprob == max(e[path][0] for e in each if path in e)
            first = next(i for i, e in enumerate(each) if e)
            if path in each[first]:
                assert column == each[first][path][1], "the first source's KV lies at its own columns"
            else:
                assert column >= proposals[first].width
            place = int(merged.trees.row_start[row]) + paths(merged.trees, row).index(path)
            assert merged.trees.source[place] == sum(1 << i for i, e in enumerate(each) if path in e)
        start, end = merged.trees.row_start[row : row + 2]
        depth, parent = merged.trees.depth[start:end], merged.trees.parent[start:end]
        assert (np.diff(depth) >= 0).all() and (parent < np.arange(end - start)).all()


@pytest.mark.parametrize("seed", range(30))
def test_each_pool_moves_what_it_holds(seed: int) -> None:
    """Two models and one source without KV of its own: of every kept node the target has the KV at the merged
    tree's column, a model at its own, and what a model did not make is not moved in its pool."""
    rng, rows = np.random.default_rng(seed), decode_rows([5, 9, 3])
    proposals = [random_proposal(rng, 3, 4, 1 << k, k if k < 2 else None) for k in range(3)]
    merged = merge(proposals, 3)
    if merged.trees.n_nodes:
        assert merged.draft_columns.keys() == {k for k in (0, 1) if proposals[k].trees.n_nodes}
    verified = verify.build(rows, merged, random_selection(merged.trees, rng))
    assert (verified.held_at[0] == verified.batch.places).all()
    assert list(verified.made_by) == list(merged.draft_columns)
    for at, k in enumerate(verified.made_by, 1):
        own = [by_path(proposals[k], r) for r in range(3)]
        for i, candidate in enumerate(verified.candidate.tolist()):
            row, depth = int(verified.row[i]), int(verified.depth[i])
            start = int(merged.trees.row_start[row])
            path = () if candidate < 0 else paths(merged.trees, row)[candidate - start]
            made = path in own[row]
            assert verified.made_by[k][i] == made
            column = own[row][path][1] if made else depth
            assert verified.held_at[at, i] == rows.seq_lens[row] + column
    assert verified.in_place == (verified.held_at == verified.positions).all()


def merged_in_python(proposals: list[Proposal], n: int) -> list[list[tuple[int, ...]]]:
    """Per row: token, parent, depth and column of each node, in order."""
    rows = []
    for row in range(n):
        nodes: list[list[int]] = []
        at: dict[tuple[int, int], int] = {}
        free = 0
        for proposal in proposals:
            t = proposal.trees
            start, end = t.row_start[row : row + 2].tolist()
            is_first, mine = not nodes, list[int]()
            if is_first:
                free = proposal.width
            for i in range(start, end):
                above = mine[t.parent[i]] if t.parent[i] >= 0 else -1
                key = above, int(t.token[i])
                if key not in at:
                    at[key] = len(nodes)
                    nodes.append(
                        [key[1], above, int(t.depth[i]), int(proposal.column[i]) if is_first else free]
                    )
                    free += not is_first
                mine.append(at[key])
        order = sorted(range(len(nodes)), key=lambda i: nodes[i][2])
        place = {old: new for new, old in enumerate(order)} | {-1: -1}
        rows.append([(nodes[i][0], place[nodes[i][1]], *nodes[i][2:]) for i in order])
    return rows


@pytest.mark.parametrize("seed", range(30))
def test_merged_nodes_stand_where_a_loop_in_python_puts_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    proposals = [random_proposal(rng, 5, 3, 1 << k) for k in range(int(rng.integers(2, 4)))]
    # One that doesn't say where its nodes come from, and an impossible node.
    said = proposals[0].trees
    logprob = np.where(rng.random(said.n_nodes) < 0.2, np.nan, said.logprob)
    proposals[0] = replace(proposals[0], trees=replace(said, logprob=logprob, source=None))
    merged = merge(proposals, 5)
    trees, expected = merged.trees, merged_in_python(proposals, 5)
    columns = zip(trees.token, trees.parent, trees.depth, merged.column, strict=True)
    assert [tuple(map(int, node)) for node in columns] == [node for row in expected for node in row]
    assert trees.row_start.tolist() == [0, *np.cumsum([len(row) for row in expected]).tolist()]
    assert np.isnan(trees.logprob).sum() == np.isnan(logprob).sum()


def test_a_single_proposal_is_left_alone() -> None:
    proposal = drafted(decode_rows([5, 9]), 2, 2)
    assert merge([Proposal.nothing(2), proposal], 2) is proposal
    assert merge([], 2).trees.n_nodes == 0


# -- verification -------------------------------------------------------------------------------


def accepted_by_hand(batch: verify.VerifyBatch, draws: np.ndarray, row: int) -> list[int]:
    """The walk, one step at a time: root, then the child that equals the draw, as long as there is one."""
    path = [int(batch.root[row])]
    while True:
        children = [i for i in range(len(batch)) if batch.parent[i] == path[-1] and batch.depth[i] > 0]
        hits = [c for c in children if batch.tokens[c] == draws[path[-1]]]
        assert len(hits) <= 1
        if not hits:
            return path
        path.append(hits[0])


def random_draws(batch: verify.VerifyBatch, rng: np.random.Generator) -> np.ndarray:
    """Mostly one of the node's own children, or the walks would end at once."""
    draws = rng.integers(0, VOCABULARY, len(batch))
    for i in range(len(draws)):
        children = np.flatnonzero((batch.parent == i) & (batch.depth > 0))
        if len(children) and rng.random() < 0.8:
            draws[i] = batch.tokens[rng.choice(children)]
    return draws


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("seed", range(20))
def test_accept_walks_the_tree(seed: int, depth: int) -> None:
    rng = np.random.default_rng(seed)
    rows = decode_rows([5, 9, 3, 7], max_depth=[5, 0, 9, 9])
    proposal = drafted(rows, depth, 3)
    batch = verify.build(rows, proposal, random_selection(proposal.trees, rng))
    draws, stride = random_draws(batch, rng), 5
    tensors, table = tensors_of(batch.arrays()), slot_table(4)
    got = verify.accept(tensors, torch.from_numpy(draws), 4, batch.deepest, stride)
    targets, sources = verify.moves(tensors, got, table, 4, batch.deepest)
    assert (batch.held_at >= batch.positions).all(), "a move may not write what a later one reads"
    index = verify.path_index(tensors, got, stride)
    assert index.shape == (4, stride)
    for row in range(4):
        path = accepted_by_hand(batch, draws, row)
        assert np.flatnonzero(got.accepted.numpy() & (batch.row == row)).tolist() == path
        assert got.count[row] == len(path) - 1 and got.bonus[row] == draws[path[-1]]
        assert got.length[row] == len(path)
        tokens = [*batch.tokens[path[1:]], draws[path[-1]]]
        assert got.emitted[row].tolist() == tokens + [0] * (stride - len(tokens))
        assert index[row].tolist() == path + [path[0]] * (stride - len(path))
        slots, length = table[rows.pool_rows[row]], int(rows.seq_lens[row])
        for step in range(batch.deepest):
            if step + 1 < len(path):
                assert targets[row, step] == slots[length + step + 1]
                assert (
                    sources[:, row, step] == slots[length + proposal.column[batch.candidate[path[step + 1]]]]
                ).all()
            else:
                assert (sources[:, row, step] == targets[row, step]).all()
                assert targets[row, step] == verify.SCRATCH_SLOT


@pytest.mark.parametrize("seed", range(5))
def test_built_batch(seed: int) -> None:
    """Slots, positions and the mask of every token, against the tree followed by hand."""
    rows, table = decode_rows([5, 9, 3], max_depth=[5, 0, 9]), slot_table(3)
    proposal = drafted(rows, 3, 3)
    built = verify.build(rows, proposal, random_selection(proposal.trees, np.random.default_rng(seed)))
    plan, slots, offset = attention_plan(table, built.batch), token_slots(table, built.batch), 0
    for i in range(len(built)):
        row = int(built.row[i])
        length, pool_row = int(rows.seq_lens[row]), table[rows.pool_rows[row]]
        assert built.positions[i] == length + built.depth[i]
        assert slots[i] == pool_row[length + [0, *proposal.column][1 + built.candidate[i]]]
        kv = plan.kv_indices[plan.kv_indptr[row] : plan.kv_indptr[row + 1]]
        lineage, node = [i], i
        while built.depth[node]:
            node = int(built.parent[node])
            lineage.append(node)
        expected = {*pool_row[:length].tolist(), *(int(slots[j]) for j in lineage)}
        assert plan.custom_mask is not None
        seen = plan.custom_mask[offset : offset + len(kv)]
        assert set(kv[seen].tolist()) == expected
        offset += len(kv)


@pytest.mark.parametrize("share", [0.0, 0.6])
@pytest.mark.parametrize("window", [0, 4])
def test_prompts_stand_behind_trees_in_one_layout(share: float, window: int) -> None:
    """Requests see what they saw, twice: behind prompts there is room for more."""
    rng = np.random.default_rng(0)
    rows, table = decode_rows([5, 9]), slot_table(5)
    proposal = drafted(rows, 3, 2)
    trees = verify.build(rows, proposal, random_selection(proposal.trees, rng, share)).batch
    assert (trees.seen is None) == (share == 0)
    starts, lens = np.array([0, 7, 3]), np.array([6, 1, 4])
    texts = TreeBatch.causal(np.arange(11), np.array([4, 2, 3]), starts, lens)
    some, others = texts_of(texts, [0, 1]), texts_of(texts, [2])
    plans = [attention_plan(table, batch) for batch in (trees, some, others)]
    whole = plans[0].beside(plans[1]).beside(plans[2])
    assert whole.num_requests == 5 and whole.masked == (2 if share else 0)
    assert whole.kv_indices.tolist() == [slot for plan in plans for slot in plan.kv_indices.tolist()]
    q, keys, values = torch.randn(len(trees) + 11, 2, 8), torch.randn(400, 2, 8), torch.randn(400, 2, 8)
    sizes = [len(trees), 7, 4]
    apart = [
        attend(part, keys, values, plan, Scores(0.3, window))
        for part, plan in zip(q.split(sizes), plans, strict=True)
    ]
    assert torch.equal(attend(q, keys, values, whole, Scores(0.3, window)), torch.cat(apart))


def texts_of(texts: TreeBatch, chosen: list[int]) -> TreeBatch:
    """Some rows of a causal batch."""
    mine = np.isin(texts.row, chosen)
    starts = texts.kv_lens - texts.q_lens
    return TreeBatch.causal(texts.tokens[mine], texts.pool_rows[chosen], starts[chosen], texts.q_lens[chosen])


def test_roots_only() -> None:
    rows = decode_rows([5, 9])
    proposal = drafted(rows, 2, 2)
    nothing = selection_of(proposal.trees, np.zeros(proposal.trees.n_nodes, np.bool_))
    built = verify.build(rows, proposal, nothing)
    assert built.tokens.tolist() == [1, 2] and built.positions.tolist() == [5, 9] and built.batch.seen is None
    assert built.batch.kv_lens.tolist() == [6, 10], "a root would see what is in its empty window"
    tensors, draws = tensors_of(built.arrays()), torch.tensor([4, 4])
    for got in (verify.accept(tensors, draws, 2, 0, 3), verify.accept_paths(tensors, draws, 2, 3)):
        assert got.count.tolist() == [0, 0] and got.emitted.tolist() == [[4, 0, 0], [4, 0, 0]]
        assert got.accepted.all() and got.bonus.tolist() == [4, 4]
