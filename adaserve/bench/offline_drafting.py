"""Drafts that follow texts which are already written, without a server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adaserve.checkpoints.medusa import MedusaHeads
from adaserve.engine.cpu.draft_heads import HeadForward
from adaserve.engine.cpu.forwards import CpuForward, LlamaForward
from adaserve.engine.cpu.linear import Storage, draft_storage
from adaserve.engine.cpu.llama import LlamaModel
from adaserve.engine.cpu.medusa import MedusaForward
from adaserve.engine.cpu.params import LayerWeights, ModelConfig, ModelWeights
from adaserve.engine.device import Search
from adaserve.engine.hidden_states import HiddenStates, project
from adaserve.engine.trees.batch import TreeBatch
from adaserve.engine.trees.shape import TreeShape, tree_shape
from adaserve.pair.candidates import ModelDrafter
from adaserve.pair.eagle import EagleHead
from adaserve.pair.evaluate import load_drafter
from adaserve.pair.folders import drafts_of
from adaserve.pair.head_drafts import HeadDrafter
from adaserve.pair.medusa import MedusaDrafter
from adaserve.pair.model import Block, TinyLlama, rope
from adaserve.pair.shape import NORM_EPS
from adaserve.pair.target_outputs import target_outputs
from adaserve.sharpening import load_sharpening

TARGET_WEIGHTS: Storage = "fp32"
"""How servers store the embedded target on a CPU host, and Medusa heads with it."""


@dataclass(frozen=True)
class HeadPlan:
    """What to measure: trees of ``depth`` and ``width`` for ``batches`` requests at once.

    ``draft_weights``: how draft and EAGLE-3 head are stored, which are measured once for each."""

    batches: tuple[int, ...] = (1, 4, 8)
    temperature: float = 0.8
    depth: int = 4
    width: int = 3
    tokens: int = 96
    rows: int = 24
    trees: int = 200
    seed: int = 0
    threads: int = 1
    draft_weights: tuple[Storage, ...] = ("auto",)


@dataclass(frozen=True)
class Text:
    """A prompt with its continuation, which begins at ``start``; ``key``: of the noise behind it."""

    tokens: np.ndarray
    start: int
    key: int


@dataclass(frozen=True)
class Course:
    """What a draft follows: the texts, one after the other in each of ``rows`` rows of a KV pool."""

    texts: Sequence[Text]
    rows: int
    plan: HeadPlan


@dataclass(frozen=True)
class Tree:
    """One tree for some requests: tokens accepted in each, what drafting took, and which texts they are."""

    accepted: tuple[int, ...]
    seconds: float
    texts: tuple[int, ...]


def layer_weights(block: Block, hidden_norm: Tensor | None = None) -> LayerWeights:
    return LayerWeights(
        block.attn_norm.weight, block.qkv.weight, None, None, None, block.out.weight, None,
        block.mlp_norm.weight, block.gate_up.weight, block.down.weight, hidden_norm,
    )  # fmt: skip


def kernel_model(network: TinyLlama | EagleHead, positions: int, storage: Storage) -> LlamaModel:
    """The network in the kernels that serve it."""
    if isinstance(network, EagleHead):
        own, norm = network.layer.shape, network.layer.hidden_norm.weight
        layers: tuple[LayerWeights, ...] = (layer_weights(network.layer, norm),)
        matrix, ids = network.lm_head.weight, network.token_ids
    else:
        own, matrix, ids = network.shape, network.embed.weight, None
        layers = tuple(layer_weights(b) for b in network.blocks if isinstance(b, Block))
    vocab = network.embed.num_embeddings
    config = ModelConfig(
        own.hidden, own.mlp, own.heads, own.kv_heads, own.head_dim, own.head_dim, vocab, NORM_EPS
    )
    cos_sin = torch.cat(rope(positions, own), -1)
    weights = ModelWeights(network.embed.weight, layers, network.norm.weight, matrix, cos_sin, ids)
    return LlamaModel(weights, config, storage)


class OfflineDraft(ABC):
    """A draft that follows a course. ``folder``: where it lies, with its measured sharpening."""

    read_with: Sequence[Tensor] = ()  # the target's states of each text, [tokens, H], if it reads them
    states: HiddenStates  # where such a draft finds them

    def __init__(self, course: Course, folder: Path) -> None:
        self.texts, self.plan, self.sharpening = course.texts, course.plan, load_sharpening(folder)
        texts, rows = course.texts, course.rows
        self.shape: TreeShape = tree_shape(self.plan.depth, self.plan.width, None)
        self.room = max(len(t.tokens) for t in texts) + self.shape.width
        self.table = torch.arange(rows * self.room, dtype=torch.int32).view(rows, self.room)
        self.at = np.zeros(rows, np.int64)  # the row's root, which is cached nowhere yet
        self.read = np.zeros(rows, np.int64)  # tokens that the draft has read
        self.text = [row % len(texts) for row in range(rows)]
        self.forward = self.make(rows * self.room)
        for row in range(rows):
            self._open(row, self.text[row])

    @abstractmethod
    def make(self, slots: int) -> Any:
        """The forward over a KV pool of this size, as a device's ``Drafter``."""

    @abstractmethod
    def kept(self, accepted: np.ndarray) -> np.ndarray:
        """How many of the accepted tokens need not be read again."""

    def _open(self, row: int, text: int) -> None:
        self.text[row], self.at[row], self.read[row] = text, self.texts[text].start - 1, 0
        if self.read_with:
            states = self.read_with[text]
            self.states.write(self.table[row, : len(states)].long(), states, states)

    def _tokens(self, row: int, start: int, end: int) -> np.ndarray:
        return self.texts[self.text[row]].tokens[start:end].astype(np.int64)

    def _causal(self, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> TreeBatch:
        spans = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
        tokens = np.concatenate([self._tokens(*span) for span in spans])
        return TreeBatch.causal(tokens, rows, starts, ends - starts)

    def step(self) -> Tree:
        """The next tree of every row. Timed is what a server counts as drafting."""
        rows = np.arange(len(self.at))
        first = self._causal(rows, self.read, self.at + 1)
        scale, spread = self.sharpening.with_shared_noise(np.full(len(rows), self.plan.temperature))
        keys = np.array([self.texts[t].key for t in self.text], np.uint64)
        search = Search(self.shape, self.at, rows, scale.astype(np.float32), spread.astype(np.float32), keys)
        self.forward.take_runs()
        beams = self.forward.search(first, search, None).read()
        seconds = sum(start.seconds_until(end) for start, end in self.forward.take_runs())
        accepted = np.array(
            [self._accepted(row, beams.tokens[row], beams.parents[row]) for row in rows.tolist()]
        )
        texts = tuple(self.text)
        self.read = self.at + 1
        self._catch_up(rows, self.read + self.kept(accepted))
        self.at = self.at + accepted + 1
        for row in np.flatnonzero(self.at + self.plan.depth >= self._ends()):
            self._open(int(row), (self.text[row] + len(rows)) % len(self.texts))
        self._catch_up(rows, np.where(self.read == 0, self.at, self.read))
        return Tree(tuple(accepted.tolist()), seconds, texts)

    def start(self) -> None:
        """Reads the first prompts."""
        self._catch_up(np.arange(len(self.at)), self.at)

    def _catch_up(self, rows: np.ndarray, ends: np.ndarray) -> None:
        """What a server reads besides: prompts, and nodes of the tree, which it need not read again."""
        some = ends > self.read
        if some.any():
            self.forward.run(self._causal(rows[some], self.read[some], ends[some]))
            self.read = np.maximum(self.read, ends)

    def _ends(self) -> np.ndarray:
        return np.array([len(self.texts[t].tokens) for t in self.text])

    def _accepted(self, row: int, tokens: np.ndarray, parents: np.ndarray) -> int:
        """Nodes on the path that the text takes."""
        node, text = -1, self._tokens(row, int(self.at[row]) + 1, int(self.at[row]) + 1 + self.plan.depth)
        for depth, token in enumerate(text):
            found = np.flatnonzero((parents == node) & (tokens == token) & (self.shape.depth == depth + 1))
            if not len(found):
                return depth
            node = int(found[0])
        return len(text)


def over_pool(network: LlamaModel, layers: int, slots: int) -> LlamaForward:
    """The network's forward, with a KV pool of this size."""
    size = (slots, network.config.num_kv_heads, network.config.head_dim)
    k, v = ([torch.zeros(size) for _ in range(layers)] for _ in range(2))
    return LlamaForward(network, SimpleNamespace(k_buffer=k, v_buffer=v))


class OfflineModel(OfflineDraft):
    """A draft model, which has the KV of all nodes that it expanded."""

    def __init__(self, model: TinyLlama, course: Course, folder: Path, weights: Storage = "fp32") -> None:
        self.model, self.weights = model, weights
        super().__init__(course, folder)

    def make(self, slots: int) -> CpuForward:
        llama = kernel_model(self.model, self.room, self.weights)
        return CpuForward(over_pool(llama, self.model.shape.layers, slots), self.table)

    def kept(self, accepted: np.ndarray) -> np.ndarray:
        return np.minimum(accepted, self.plan.depth - 1)


class OfflineEagle(OfflineDraft):
    """An EAGLE-3 head, which reads all accepted tokens again, with the target's states of them."""

    def __init__(
        self, target: TinyLlama, head: EagleHead, course: Course, folder: Path, weights: Storage = "fp32"
    ) -> None:
        self.head, self.weights = head, weights
        loaded = SimpleNamespace(fc=head.fc, input_norm=None, fc_norm=None)
        seen = [
            target_outputs(target, torch.from_numpy(t.tokens)[None], head.shape.layers).layers[0]
            for t in course.texts
        ]
        self.read_with = [project(loaded, states) for states in seen]
        super().__init__(course, folder)

    def make(self, slots: int) -> CpuForward:
        llama = kernel_model(self.head, self.room, self.weights)
        self.states = HiddenStates(slots, self.head.layer.shape.hidden, torch.float32)
        return HeadForward(over_pool(llama, 1, slots), self.table, self.states)

    def kept(self, accepted: np.ndarray) -> np.ndarray:
        return np.zeros_like(accepted)


class OfflineMedusa(OfflineDraft):
    """Medusa heads, which read nothing but the target's state of the token before a root."""

    def __init__(self, target: TinyLlama, heads: MedusaHeads, course: Course, folder: Path) -> None:
        self.target, self.heads = target, heads
        texts, depth = course.texts, min(course.plan.depth, len(heads))  # as on a server
        self.read_with = [target_outputs(target, torch.from_numpy(t.tokens)[None]).last[0] for t in texts]
        super().__init__(replace(course, plan=replace(course.plan, depth=depth)), folder)

    def make(self, slots: int) -> MedusaForward:
        llama = kernel_model(self.target, self.room, TARGET_WEIGHTS)
        self.states = HiddenStates(slots, self.target.shape.hidden, torch.float32)
        return MedusaForward(self.heads, llama, self.states, self.table, TARGET_WEIGHTS)

    def kept(self, accepted: np.ndarray) -> np.ndarray:
        return accepted

    def _catch_up(self, rows: np.ndarray, ends: np.ndarray) -> None:
        self.read = np.maximum(self.read, ends)


def offline_drafts(pair: Path, target: TinyLlama, course: Course) -> dict[tuple[str, Storage], OfflineDraft]:
    """Each draft that the pair has, by its name and storage."""
    found: dict[tuple[str, Storage], OfflineDraft] = {}
    for name in drafts_of(pair):
        drafter, folder = load_drafter(pair / name, target), pair / name
        if isinstance(drafter, MedusaDrafter):
            found[name, TARGET_WEIGHTS] = OfflineMedusa(target, drafter.blocks.published(), course, folder)
            continue
        for asked in course.plan.draft_weights:
            weights = draft_storage(asked, TARGET_WEIGHTS)
            if isinstance(drafter, HeadDrafter):
                head = drafter.head.requires_grad_(False)
                found[name, weights] = OfflineEagle(target, head, course, folder, weights)
            elif isinstance(drafter, ModelDrafter):
                model = drafter.model.requires_grad_(False)
                found[name, weights] = OfflineModel(model, course, folder, weights)
    return found
