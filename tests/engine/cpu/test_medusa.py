"""Medusa heads in our forward against the same heads in plain torch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from adaserve.checkpoints.medusa import MedusaHeads, load_medusa, save_medusa
from adaserve.engine.cpu import LlamaModel, build
from adaserve.engine.cpu.forwards import CpuForward, LlamaForward
from adaserve.engine.cpu.install import LLAMA_ATTRIBUTE
from adaserve.engine.cpu.medusa import MedusaForward, medusa_forward
from adaserve.engine.device import Search
from adaserve.engine.gpu.attention import AttentionBuffers
from adaserve.engine.gpu.graphs import GraphTable
from adaserve.engine.gpu.medusa import GpuMedusa
from adaserve.engine.gpu.model import Parts
from adaserve.engine.gpu.sizes import SearchKey, Sizes, Tiers
from adaserve.engine.hidden_states import HiddenStates
from adaserve.engine.trees.batch import TreeBatch
from adaserve.engine.trees.shape import tree_shape
from adaserve.errors import UnsupportedError
from tests.engine.cpu.factories import Pool, read_hf
from tests.engine.medusa import HEADS, best_paths, random_heads, said_by, save_published
from tests.engine.pairs import random_target

ROWS = np.array([2, 0])
LENGTHS = np.array([9, 23])


@pytest.fixture(scope="module")
def target() -> Any:
    return random_target()


@pytest.fixture(params=["native", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(build, "load_kernels", lambda: None)
    return str(request.param)


class Setting:
    """Two texts that the target has read in two chunks, and heads on its states."""

    def __init__(self, target: Any, heads: MedusaHeads) -> None:
        weights, config = read_hf(target)
        self.target, self.heads = LlamaModel(weights, config, "fp32"), heads
        pool = Pool(config, len(weights.layers))
        self.table = torch.zeros(3, 64, dtype=torch.int32)
        for row in ROWS:
            self.table[row] = torch.tensor(pool.take(64), dtype=torch.int32)
        self.states = HiddenStates(pool.slots, config.hidden_size, torch.float32)
        self.target.sink = self.states
        self.reads = LlamaForward(self.target, SimpleNamespace(k_buffer=pool.k, v_buffer=pool.v))
        self.drafts = MedusaForward(heads, self.target, self.states, self.table, "fp32")
        rng = np.random.default_rng(1)
        self.texts = [rng.integers(2, 500, length + 1).tolist() for length in LENGTHS]

    def read(self) -> None:
        starts = np.zeros(2, np.int64)
        for ends in (LENGTHS // 2, LENGTHS):
            tokens = [t for text, s, e in zip(self.texts, starts, ends, strict=True) for t in text[s:e]]
            batch = TreeBatch.causal(np.array(tokens), ROWS, starts, ends - starts)
            CpuForward(self.reads, self.table).run(batch)
            starts = ends

    def search(self, depth: int, width: int, branching: tuple[int, ...] | None = None) -> Search:
        ones, keys = np.ones(2, np.float32), np.array([3, 4], np.uint64)
        return Search(tree_shape(depth, width, branching), LENGTHS, ROWS, ones, 0.7 * ones, keys)

    def first(self, search: Search) -> TreeBatch:
        roots = np.array([text[-1] for text in self.texts])
        return TreeBatch.roots(roots, ROWS, LENGTHS, search.shape.width)

    def found(self, search: Search) -> Any:
        return self.drafts.search(self.first(search), search, None).read()


@pytest.mark.parametrize(("layers", "tied"), [(1, False), (2, True)])
@pytest.mark.parametrize(("depth", "width"), [(3, 3), (1, 2)])
def test_the_best_of_all_extensions(
    target: Any, backend: str, layers: int, tied: bool, depth: int, width: int
) -> None:
    """Levels by the product of the heads' probabilities, with the noise of the place that they guess."""
    case = Setting(target, random_heads(target, layers, tied))
    assert (case.target.native is None) == (backend == "torch")
    case.read()
    found = case.found(case.search(depth, width))
    assert found.steps == depth
    for r, text in enumerate(case.texts):
        levels = best_paths(case.heads, target, text, depth, width, 3 + r, 0.7)
        for level, paths in enumerate(levels):
            nodes = slice(level * width, (level + 1) * width)
            assert found.tokens[r, nodes].tolist() == [path[-1] for path in paths]
            assert np.allclose(found.logprobs[r, nodes], list(paths.values()), atol=1e-3)
        for node, parent in enumerate(found.parents[r, width:].tolist(), width):
            step = node // width
            above = list(levels[step - 1])[parent - (step - 1) * width]
            assert list(levels[step])[node % width][:-1] == above


def test_every_node_of_a_fixed_tree_has_the_same_children(target: Any) -> None:
    case = Setting(target, random_heads(target))
    case.read()
    found = case.found(replace(case.search(2, 1, (2, 3)), spread=np.zeros(2, np.float32)))
    for r, text in enumerate(case.texts):
        best = said_by(case.heads, target, text).topk(3).indices
        assert found.tokens[r].tolist() == [*best[0, :2].tolist(), *best[1].tolist(), *best[1].tolist()]
        assert found.parents[r].tolist() == [-1, -1, 0, 0, 0, 1, 1, 1]


def test_what_a_grammar_forbids_depends_on_the_path(target: Any) -> None:
    """Behind the first beam one token is allowed, behind the second another one: they are certain."""
    case = Setting(target, random_heads(target))
    case.read()

    def forbid(logits: torch.Tensor, tokens: np.ndarray, parents: np.ndarray, beams: int) -> None:
        if tokens.shape[1]:
            allowed = torch.arange(len(logits)) % beams + 7
            kept = logits.gather(1, allowed[:, None])
            logits.fill_(-torch.inf).scatter_(1, allowed[:, None], kept)

    free, bound = case.search(1, 2), replace(case.search(2, 2), forbid=forbid)
    first, found = case.found(free), case.found(bound)
    assert found.tokens[:, :2].tolist() == first.tokens.tolist()
    assert found.tokens[:, 2:].tolist() == [[7, 8]] * 2
    assert found.parents[:, 2:].tolist() == [[0, 1]] * 2
    assert np.allclose(found.logprobs[:, 2:], first.logprobs, atol=1e-5)


def device_heads(case: Setting, target: Any, captured: bool) -> GpuMedusa:
    """The same heads on a device's parts, whose searches have four rows at least."""
    shapes = [tree_shape(depth, width, None) for depth in (1, 3) for width in (2, 3)]
    tiers = Tiers((4, 8))
    keys = frozenset(SearchKey(4, shape.beams) for shape in shapes) if captured else frozenset()
    sizes = Sizes(tiers, tiers, 8, 8, depth=4, widths=(3, 3), captured=keys)
    buffers = AttentionBuffers.allocate(16, 16, torch.device("cpu"))
    parts = Parts(None, None, GraphTable(False), buffers, sizes, case.table, 3, 63, 511)  # type: ignore[arg-type]
    own = case.heads.lm_heads or [target.lm_head.weight.detach()] * len(case.heads)
    return GpuMedusa(case.heads, parts, case.states, own, torch.float32)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("layers", "tied"), [(1, False), (2, True)])
@pytest.mark.parametrize("shape", [(3, 3, None), (1, 2, None), (2, 1, (2, 3)), (3, 2, None)])
def test_a_device_drafts_the_same(
    target: Any, layers: int, tied: bool, shape: tuple[int, int, Any], captured: bool
) -> None:
    """In one graph, of padded rows; again with other requests, whose inputs lie where the first ones' lay."""
    case = Setting(target, random_heads(target, layers, tied))
    case.read()
    heads = device_heads(case, target, captured)
    both = case.search(*shape)
    hot = replace(both, keys=np.array([2**64 - 5, 9], np.uint64), spread=np.array([0.0, 1.3], np.float32))
    for search in (both, hot, both):
        right, found = case.found(search), heads.search(case.first(search), search, None).read()
        assert found.steps == right.steps == len(search.shape.beams)
        assert found.tokens.tolist() == right.tokens.tolist()
        assert found.parents.tolist() == right.parents.tolist()
        np.testing.assert_allclose(found.logprobs, right.logprobs, atol=1e-4)
    assert len(heads.take_runs()) == 3 and not heads.take_runs()


def test_a_device_rehearses_what_it_serves(target: Any) -> None:
    """As deep as there are heads, though the sizes allow more; and makes graphs of no deeper searches."""
    case = Setting(target, random_heads(target))
    case.read()
    heads = device_heads(case, target, captured=True)
    assert heads.rehearse(case.first(case.search(3, 3)), 3) == heads.most_steps == HEADS
    for depth in (3, 4):
        heads.capture(SearchKey(4, (3,) * depth))
    assert list(heads.table) == [SearchKey(4, (3, 3, 3))]


@pytest.mark.parametrize("tied", [False, True])
def test_checkpoints(tmp_path: Any, target: Any, tied: bool) -> None:
    heads = random_heads(target, 2, tied)
    save_medusa(heads, tmp_path, base_model_name_or_path="target")
    read = [load_medusa(tmp_path)]
    if not tied:
        save_published(heads, tmp_path / "published")
        read.append(load_medusa(tmp_path / "published"))
    for other in read:
        assert torch.equal(other.weight, heads.weight) and torch.equal(other.bias, heads.bias)
        assert (other.lm_heads is None) == tied
        if other.lm_heads is not None and heads.lm_heads is not None:
            assert all(map(torch.equal, other.lm_heads, heads.lm_heads))


@pytest.mark.parametrize("published", [False, True])
def test_weights_that_cannot_be_read_are_named(tmp_path: Any, target: Any, published: bool) -> None:
    """A download that broke off."""
    save_medusa(random_heads(target, 2), tmp_path)
    file = tmp_path / "medusa_lm_head.safetensors"
    if published:
        save_published(random_heads(target, 2), tmp_path / "published")
        file = tmp_path / "published" / "medusa_lm_head.pt"
    for harmed in (file.read_bytes()[:-100], b""):
        file.write_bytes(harmed)
        with pytest.raises(UnsupportedError, match=f"{file} cannot be read.*download the folder again"):
            load_medusa(file.parent)


def test_heads_that_do_not_fit_are_refused(tmp_path: Any, target: Any) -> None:
    llama = LlamaModel(*read_hf(target), "fp32")
    pool = SimpleNamespace(k_buffer=[torch.zeros(4, 2, 8)], dtype=torch.float32)
    runner = SimpleNamespace(
        model=SimpleNamespace(**{LLAMA_ATTRIBUTE: llama}),
        token_to_kv_pool=pool,
        dtype=torch.float32,
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(2, 2, dtype=torch.int32)),
    )
    heads = random_heads(target)
    save_medusa(heads, tmp_path)
    assert medusa_forward(runner, tmp_path, "fp32").most_steps == HEADS
    without = SimpleNamespace(model=SimpleNamespace())
    with pytest.raises(ValueError, match=r"Medusa heads need AdaServe's own forward.*--cpu-weights off"):
        medusa_forward(without, tmp_path, "fp32")
    assert heads.lm_heads is not None
    save_medusa(replace(heads, lm_heads=tuple(m[:400] for m in heads.lm_heads)), tmp_path)
    with pytest.raises(ValueError, match="a hidden size of 128 and 400 tokens, and this one has 128 and 512"):
        medusa_forward(runner, tmp_path, "fp32")
    save_medusa(MedusaHeads(torch.zeros(2, 1, 8, 8), torch.zeros(2, 1, 8), None), tmp_path)
    with pytest.raises(ValueError, match="a hidden size of 8, and this one has 128"):
        medusa_forward(runner, tmp_path, "fp32")
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 3, "medusa_num_layers": 1}')
    with pytest.raises(ValueError, match=r"have no 2\.0\.linear\.weight.*3 heads of 1 layers"):
        load_medusa(tmp_path)
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    with pytest.raises(ValueError, match=r"neither .* nor medusa_lm_head\.pt"):
        load_medusa(tmp_path)
