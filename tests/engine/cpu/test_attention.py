"""Attention over random shapes, trees and contexts: as torch says, in bits that no company changes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from adaserve.engine.cpu import LayerWeights, LlamaModel, ModelConfig, ModelWeights, build
from adaserve.engine.cpu.native import NativeBackend
from adaserve.engine.cpu.torch_forward import TorchBackend
from tests.engine.cpu.factories import Chunk, Pool, path_to, run, tree_mask

# (heads, kv_heads, head_dim): odd sizes, groups that fill a tile or do not, one head and many.
SHAPES = [(2, 2, 16), (4, 2, 64), (3, 1, 24), (7, 1, 64), (8, 2, 80), (6, 3, 128), (260, 1, 10)]
# Keys and values of two backends may round to different neighbours.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
CONTEXTS = [0, 1, 15, 63, 64, 130, 700]


@pytest.fixture
def threads() -> Iterator[Any]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def one_layer(heads: int, kv_heads: int, head_dim: int, seed: int = 0) -> tuple[ModelWeights, ModelConfig]:
    """Queries and keys of about unit size, so that the softmax has many keys to weigh."""
    generator = torch.Generator().manual_seed(seed)
    hidden, vocab = 32, 97

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    norm = torch.ones(hidden)
    layer = LayerWeights(
        norm, matrix((heads + 2 * kv_heads) * head_dim, hidden), None, None, None,
        matrix(hidden, heads * head_dim), None, norm, matrix(64, hidden), matrix(hidden, 32),
    )  # fmt: skip
    embed = matrix(vocab, hidden)
    angles = torch.arange(40_000)[:, None] * 1e4 ** (-torch.arange(0, 1, 2 / head_dim))
    config = ModelConfig(hidden, 32, heads, kv_heads, head_dim, head_dim, vocab, 1e-5)
    return ModelWeights(embed, (layer,), norm, embed, torch.cat((angles.cos(), angles.sin()), dim=-1)), config


def llama_model(shape: tuple[int, int, int], flags: tuple[str, ...]) -> LlamaModel:
    weights, config = one_layer(*shape)
    llama = LlamaModel(weights, config, "fp32")
    llama.held = NativeBackend(build.load_library(build.build(*flags)), weights, config, "fp32")
    return llama


def filled_pool(config: ModelConfig, slots: int, dtype: torch.dtype, shuffled: bool) -> Pool:
    pool = Pool(config, 1, slots, dtype)
    generator = torch.Generator().manual_seed(5)
    for part in (pool.k[0], pool.v[0]):
        part.copy_(torch.randn(part.shape, generator=generator))
    if not shuffled:
        pool._free.sort()
    return pool


def random_tree(
    nodes: int, context: list[int], pool: Pool, generator: torch.Generator
) -> tuple[Chunk, list[int]]:
    """A chunk of `nodes` tokens in a random tree, and the nodes' parents; deep where the draw says so."""
    spread = int(torch.randint(1, 6, (1,), generator=generator))
    parents = [-1]
    for node in range(1, nodes):
        parents.append(max(0, node - int(torch.randint(1, 1 + spread, (1,), generator=generator))))
    depths = [len(path_to(node, parents)) - 1 for node in range(nodes)]
    tokens = torch.randint(0, 97, (nodes,), generator=generator).tolist()
    positions = [len(context) + depth for depth in depths]
    mask = tree_mask(parents, len(context))
    return Chunk(tokens, positions, pool.take(nodes), context, mask), parents


def decode_path(llama: LlamaModel, pool: Pool, tree: Chunk, path: list[int]) -> torch.Tensor:
    """The hidden state of the path's last node as plain decoding gives it, one token at a time."""
    context = list(tree.prefix)
    for node in path:
        own = pool.take(1)
        hidden = run(llama, pool, [Chunk([tree.tokens[node]], [len(context)], own, context)])
        context += own
    return hidden[0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shuffled", [True, False])
def test_trees_equal_decoding_and_torch(
    shape: tuple[int, int, int], dtype: torch.dtype, shuffled: bool, flags: tuple[str, ...]
) -> None:
    llama = llama_model(shape, flags)
    pool = filled_pool(llama.config, 6000, dtype, shuffled)
    generator = torch.Generator().manual_seed(sum(shape))
    sizes = torch.randint(1, 65, (len(CONTEXTS),), generator=generator).tolist()
    drawn = [random_tree(n, pool.take(c), pool, generator) for n, c in zip(sizes, CONTEXTS, strict=True)]
    together = run(llama, pool, [tree for tree, _ in drawn])
    alone = torch.cat([run(llama, pool, [tree]) for tree, _ in drawn])
    assert torch.equal(together, alone)
    for (tree, parents), nodes in zip(drawn, together.split(sizes), strict=True):
        for node in {0, len(parents) // 2, len(parents) - 1}:
            decoded = decode_path(llama, pool, tree, path_to(node, parents))
            assert torch.equal(decoded, nodes[node]), (node, len(tree.prefix))
    llama.held = TorchBackend(*one_layer(*shape), "fp32")
    expected = run(llama, pool, [tree for tree, _ in drawn])
    torch.testing.assert_close(together, expected, atol=TOLERANCE[dtype], rtol=2e-4)


@pytest.mark.parametrize("shape", [(4, 2, 64), (3, 1, 24)])
def test_what_overflowed_in_a_hidden_slot_does_not_matter(
    shape: tuple[int, int, int], flags: tuple[str, ...]
) -> None:
    llama = llama_model(shape, flags)
    pool = filled_pool(llama.config, 400, torch.float16, shuffled=True)
    context = pool.take(90)
    hidden, tree = context[40:50], random_tree(9, context, pool, torch.Generator().manual_seed(3))[0]
    assert tree.mask is not None
    tree.mask[:, 40:50] = False
    tree.mask[-1] = False  # it sees nothing at all
    expected = run(llama, pool, [tree])
    assert expected.isfinite().all()
    for part in (pool.k[0], pool.v[0]):
        part[hidden] = torch.tensor([torch.inf, -torch.inf, *[torch.nan] * 8]).half()[:, None, None]
    assert torch.equal(run(llama, pool, [tree]), expected)


@pytest.mark.parametrize("shape", [(4, 2, 64), (3, 1, 24)])
def test_chunks_of_any_size_give_the_same_bits(
    shape: tuple[int, int, int], flags: tuple[str, ...], threads: Any
) -> None:
    llama = llama_model(shape, flags)
    pool = filled_pool(llama.config, 2000, torch.float32, shuffled=True)
    context, slots, tokens = pool.take(777), pool.take(64), [3 * i % 97 for i in range(64)]

    def prefill(bounds: list[int]) -> torch.Tensor:
        return torch.cat([run(llama, pool, [chunk(a, b)]) for a, b in itertools.pairwise(bounds)])

    def chunk(begin: int, end: int) -> Chunk:
        positions = list(range(777 + begin, 777 + end))
        return Chunk(tokens[begin:end], positions, slots[begin:end], context + slots[:begin])

    one_by_one = prefill(list(range(65)))
    for size in range(2, 65):
        assert torch.equal(prefill([*range(0, 64, size), 64]), one_by_one), size
    masked = run(llama, pool, [chunk(0, 64)], masked=True)
    assert torch.equal(masked, one_by_one)
    for count in (2, 3, 5):
        threads(count)
        assert torch.equal(prefill([0, 64]), one_by_one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_long_contexts(dtype: torch.dtype, flags: tuple[str, ...], threads: Any) -> None:
    llama = llama_model((4, 2, 16), flags)
    pool = filled_pool(llama.config, 40_000, dtype, shuffled=False)
    generator = torch.Generator().manual_seed(1)
    requests = [random_tree(n, pool.take(c), pool, generator) for n, c in ((5, 32_700), (64, 4_500), (1, 1))]
    trees = [tree for tree, _ in requests]
    together = run(llama, pool, trees)
    for count in (2, 3, 7):
        threads(count)
        assert torch.equal(run(llama, pool, trees), together), count
    for (tree, parents), nodes in zip(requests, together.split([5, 64, 1]), strict=True):
        leaf = max((n for n in range(len(parents)) if len(path_to(n, parents)) <= 6), default=0)
        assert torch.equal(decode_path(llama, pool, tree, path_to(leaf, parents)), nodes[leaf])
    llama.held = TorchBackend(*one_layer(4, 2, 16), "fp32")
    torch.testing.assert_close(together, run(llama, pool, trees), atol=TOLERANCE[dtype], rtol=2e-4)
