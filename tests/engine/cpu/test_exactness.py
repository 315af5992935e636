"""A row's bits depend on its own tokens only: not on its company, nor on decoding or sitting in a tree."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from adaserve.engine.cpu import LlamaModel, build
from adaserve.engine.cpu.forwards import CpuForward, LlamaForward
from adaserve.engine.cpu.linear import Storage
from adaserve.engine.cpu.native import NativeBackend
from adaserve.engine.trees import verify
from adaserve.engine.trees.batch import TreeBatch
from adaserve.engine.trees.proposal import Proposal
from adaserve.engine.trees.shape import tree_shape
from adaserve.scheduler.interface import CandidateTrees
from tests.engine.cpu.factories import Chunk, Pool, hf_model, path_to, read_hf, run, tree_mask
from tests.engine.trees.factories import decode_rows, random_selection, selection_of

STORAGES: list[Storage] = ["fp32", "fp16", "bf16", "int8"]
ROW_COUNTS = [*range(1, 65), 121, 130]


@pytest.fixture(params=STORAGES)
def llama(request: pytest.FixtureRequest, flags: tuple[str, ...]) -> LlamaModel:
    # More than one block of k in both products of the MLP.
    weights, config = read_hf(hf_model(hidden_size=272, intermediate_size=520))
    model = LlamaModel(weights, config, storage=request.param)
    kernels = build.load_library(build.build(*flags))
    model.held = NativeBackend(kernels, weights, config, request.param)
    return model


def test_rows_do_not_depend_on_their_number(llama: LlamaModel) -> None:
    contexts = [list(range(3 + i % 7, 9 + 2 * (i % 11))) for i in range(max(ROW_COUNTS))]
    pool = Pool(llama.config, 2, slots=8192)
    slots = [pool.take(len(c)) for c in contexts]
    run(llama, pool, [Chunk(c, list(range(len(c))), s, []) for c, s in zip(contexts, slots, strict=True)])
    (own,) = ([pool.take(1) for _ in contexts],)
    chunks = [Chunk([i], [len(s)], o, s) for i, (o, s) in enumerate(zip(own, slots, strict=True))]
    alone = torch.cat([run(llama, pool, [c]) for c in chunks])
    for count in ROW_COUNTS:
        first = 64 - count if count <= 64 else 0
        together = run(llama, pool, chunks[first : first + count])
        assert torch.equal(together, alone[first : first + count]), count
        assert torch.equal(llama.logits(together), llama.logits(alone)[first : first + count])


def test_thread_count_does_not_matter(llama: LlamaModel) -> None:
    pool, threads = Pool(llama.config, 2), torch.get_num_threads()
    tokens = list(range(1, 90))
    chunk = Chunk(tokens, list(range(89)), pool.take(89), [])
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(run(llama, pool, [chunk]))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("storage", STORAGES)
def test_items_that_several_members_do_are_stored_once(storage: Storage) -> None:
    """As on a busy host, where a member that lost its core in the midst of an item finds it done."""
    if build.load_kernels() is None:
        pytest.skip("no C compiler here")
    impatient = build.load_library(build.build("-DMOST_PATIENCE_NS=0"))
    weights, config = read_hf(hf_model(hidden_size=272, intermediate_size=520))
    backend, pool = NativeBackend(impatient, weights, config, storage), Pool(config, 2)
    llama = LlamaModel(weights, config, storage)
    chunks = [Chunk(list(range(1, 1 + n)), list(range(n)), pool.take(n), []) for n in (1, 7, 50, 130)]
    hidden = [run(llama, pool, [c]) for c in chunks]
    logits = [llama.logits(h) for h in hidden]
    llama.held = backend
    threads = torch.get_num_threads()
    try:
        for _ in range(25):
            for count in (2, 3, 5):
                torch.set_num_threads(count)
                for chunk, h, out in zip(chunks, hidden, logits, strict=True):
                    assert torch.equal(run(llama, pool, [chunk]), h), (count, len(chunk.tokens))
                    assert torch.equal(llama.logits(h), out)
    finally:
        torch.set_num_threads(threads)


def test_prefill_in_chunks_equals_prefill_at_once(llama: LlamaModel) -> None:
    pool = Pool(llama.config, 2)
    tokens = list(range(1, 100))
    at_once = run(llama, pool, [Chunk(tokens, list(range(99)), pool.take(99), [])])
    slots = pool.take(99)
    parts = [
        run(llama, pool, [Chunk(tokens[a:b], list(range(a, b)), slots[a:b], slots[:a])])
        for a, b in ((0, 1), (1, 31), (31, 32), (32, 99))
    ]
    assert torch.equal(torch.cat(parts), at_once)


def test_tree_nodes_equal_plain_decoding(llama: LlamaModel) -> None:
    parents, tokens = [-1, 0, 0, 1, 1, 2, 3, 5, 6], [7, 11, 13, 17, 19, 23, 29, 31, 37]
    pool, prompt = Pool(llama.config, 2), list(range(1, 38))
    slots = pool.take(37)
    run(llama, pool, [Chunk(prompt, list(range(37)), slots, [])])
    depths = [len(path_to(i, parents)) - 1 for i in range(len(parents))]
    tree = Chunk(
        tokens, [37 + d for d in depths], pool.take(len(parents)), slots, tree_mask(parents, len(slots))
    )
    nodes = run(llama, pool, [tree])
    for leaf in (4, 7, 8):
        decoded = list(slots)
        for depth, node in enumerate(path_to(leaf, parents)):
            own = pool.take(1)
            step = run(llama, pool, [Chunk([tokens[node]], [37 + depth], own, decoded)])
            decoded += own
            assert torch.equal(step[0], nodes[node])


def test_storages_that_hold_the_weights_agree() -> None:
    weights, config = read_hf(hf_model())
    pools = [Pool(config, 2) for _ in range(3)]
    tokens = list(range(1, 60))
    results = []
    for storage, pool in zip(("fp32", "fp16", "auto"), pools, strict=True):
        llama = LlamaModel(weights, config, storage=storage)  # type: ignore[arg-type]
        if llama.native is None:
            pytest.skip("torch's operators promise no such thing")
        results.append(run(llama, pool, [Chunk(tokens, list(range(59)), pool.take(59), [])]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def forward_of(llama: LlamaModel, pool: Pool, rows: int) -> CpuForward:
    """With so many requests, each of which has 64 slots."""
    table = torch.tensor([pool.take(64) for _ in range(rows)], dtype=torch.int32)
    return CpuForward(LlamaForward(llama, SimpleNamespace(k_buffer=pool.k, v_buffer=pool.v)), table)


def random_trees(contexts: list[int], rng: np.random.Generator) -> TreeBatch:
    """What is verified of trees that were drafted behind so many tokens."""
    n, shape = len(contexts), tree_shape(3, 3, None)
    parents = [-1, -1, -1, *rng.integers(0, 3, 3), *rng.integers(3, 6, 3)]
    trees = CandidateTrees(
        9 * np.arange(n + 1), rng.integers(0, 131, 9 * n), np.tile(parents, n), np.tile(shape.depth, n),
        np.zeros(9 * n),
    )  # fmt: skip
    chosen = random_selection(trees, rng, share=rng.choice([0.0, 0.6, 1.0]))
    proposal = Proposal(trees, np.tile(shape.columns, n), shape.width)
    return verify.build(decode_rows(contexts), proposal, chosen).batch


def random_prompts(first_row: int, count: int, rng: np.random.Generator) -> tuple[TreeBatch, TreeBatch]:
    """What is cached of some prompts, and the next part of each."""
    rows, starts = first_row + rng.permutation(count), rng.integers(0, 40, count)
    starts[rng.random(count) < 0.3] = 0
    lens = rng.integers(1, 20, count)
    cached, read = (rng.integers(0, 131, int(many.sum())) for many in (starts, lens))
    return TreeBatch.causal(cached, rows, 0 * starts, starts), TreeBatch.causal(read, rows, starts, lens)


@pytest.mark.parametrize("seed", range(6))
def test_prompts_beside_trees_change_no_bit(llama: LlamaModel, seed: int) -> None:
    """States and KV of a forward of both are those of a forward of each."""
    rng = np.random.default_rng(seed)
    contexts, prompts = rng.integers(0, 40, rng.integers(1, 6)), int(rng.integers(1, 5))
    rows = np.arange(len(contexts))[::-1].copy()
    text = rng.integers(0, 131, int(contexts.sum()))
    before = TreeBatch.causal(text, rows, 0 * contexts, contexts)
    trees = random_trees(contexts.tolist(), rng)
    cached, read = random_prompts(len(contexts), prompts, rng)
    found = []
    for together in (False, True):
        pool = Pool(llama.config, 2, dtype=(torch.float32, torch.float16, torch.bfloat16)[seed % 3])
        forward = forward_of(llama, pool, len(contexts) + prompts)
        forward.run(before)
        forward.run(cached)
        if together:
            states = forward.run_beside(trees, read)
            prompts_states = llama.take_read(len(read))
            assert prompts_states is not None and llama.take_read(len(read)) is None
        else:
            states, prompts_states = forward.run(trees), forward.run(read)
        found.append([states, prompts_states, *pool.k, *pool.v])
    assert all(torch.equal(apart, beside) for apart, beside in zip(*found, strict=True))


def test_what_was_read_is_for_as_many_tokens() -> None:
    llama = LlamaModel(*read_hf(hf_model()))
    forward = forward_of(llama, Pool(llama.config, 2), 3)
    rng = np.random.default_rng(1)
    for _ in range(2):
        forward.run_beside(random_trees([0], rng), random_prompts(1, 2, rng)[1])
        forward.forget_read()
        assert llama.take_read(5) is None, "it was dropped"
    forward.run_beside(random_trees([0], rng), read := random_prompts(1, 2, rng)[1])
    with pytest.raises(RuntimeError, match="tokens of prompts were read"):
        llama.take_read(len(read) + 1)
    assert llama.take_read(len(read)) is None


def test_nodes_of_a_served_tree_equal_plain_decoding(llama: LlamaModel) -> None:
    """Whose columns do not follow their depths: the likeliest node of each level stands in front."""
    prompt, root, shape = [3 * i % 131 for i in range(20)], 1, tree_shape(3, 3, None)
    forward = forward_of(llama, Pool(llama.config, 2), 2)

    def read(row: int, tokens: list[int], start: int) -> torch.Tensor:
        rows, starts, lens = (np.array([n]) for n in (row, start, len(tokens)))
        return forward.run(TreeBatch.causal(np.array(tokens), rows, starts, lens))

    parent = np.array([-1, -1, -1, 2, 0, 1, 3, 5, 4])
    trees = CandidateTrees(np.array([0, 9]), np.arange(40, 49), parent, shape.depth, np.zeros(9))
    assert {(2, 3), (5, 7)} <= {(p, i) for i, p in enumerate(parent.tolist())}
    assert (shape.columns[[3, 6]] < shape.columns[2]).all(), "they stand before their parents"
    read(0, prompt, 0)
    every = selection_of(trees, np.ones(9, np.bool_))
    verified = verify.build(decode_rows([len(prompt)]), Proposal(trees, shape.columns, shape.width), every)
    nodes = forward.run(verified.batch)
    for leaf in (6, 7, 8):
        read(1, prompt, 0)
        decoded = read(1, [root], len(prompt))
        assert torch.equal(decoded[0], nodes[0])
        for depth, node in enumerate(path_to(leaf, parent.tolist()), start=1):
            decoded = read(1, [40 + node], len(prompt) + depth)
            assert torch.equal(decoded[0], nodes[1 + node]), (leaf, depth)
