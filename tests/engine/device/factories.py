"""A tiny model with a paged pool, seen by the numpy worker and by the device worker alike."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from adaserve.engine.device.attention import AttentionBuffers, SdpaKernel, TreeKernel
from adaserve.engine.device.forward import DeviceForward, Inputs
from adaserve.engine.device.graphs import GraphTable
from adaserve.engine.device.rows import DeviceRows
from adaserve.engine.host.gumbel import Reading
from adaserve.engine.host.torch_forward import TorchBackend
from adaserve.engine.state import DecodeRows, RequestState
from adaserve.engine.trees.plan import TreeAttentionPlan
from adaserve.noise import request_key
from adaserve.scheduler.interface import IterationPlan, RunningBatch
from tests.engine.host.factories import hf_model, read_hf

CONTEXT = 96
VOCABULARY = 131
CPU = torch.device("cpu")


def read_plainly(temperature: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The draft's logits as they are, without noise."""
    return np.ones_like(temperature), np.zeros_like(temperature)


class TinyModel:
    """Both a ``TreeForward`` (numpy worker) and a ``ModelCall`` (device worker) over one pool."""

    def __init__(self, slots: int, seed: int = 0) -> None:
        weights, config = read_hf(hf_model(seed=seed))
        self.backend = TorchBackend(weights, config, "fp32")
        shape = (slots, config.num_kv_heads, config.head_dim)
        self.k = [torch.zeros(shape) for _ in range(len(weights.layers))]
        self.v = [torch.zeros(shape) for _ in range(len(weights.layers))]
        self.written: list[Tensor] = []  # slots of every forward

    def hidden(self, tokens: Tensor, positions: Tensor, slots: Tensor, plan: TreeAttentionPlan) -> Tensor:
        self.written.append(slots.clone())
        return self.backend.forward(tokens, positions, slots, self.k, self.v, plan)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.backend.logits(hidden)

    def argmax(self, hidden: Tensor) -> Tensor:
        return self.backend.argmax(hidden)

    def topk_logprobs(self, hidden: Tensor, reading: Reading, width: int) -> tuple[Tensor, Tensor]:
        return self.backend.topk_logprobs(hidden, reading, width)

    def __call__(self, inputs: Inputs, rows: int, kernel: TreeKernel) -> Tensor:
        assert isinstance(kernel, SdpaKernel)
        hidden = self.hidden(inputs.tokens, inputs.positions, inputs.slots, kernel.tree_plan)
        return self.backend.logits(hidden)


@dataclass
class Requests:
    """n requests with cached tokens in shuffled slots of a pool; slot 0 belongs to nobody."""

    lengths: list[int]
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        n = len(self.lengths)
        slots = torch.randperm((n + 1) * CONTEXT, generator=generator) + 1
        self.req_to_token = slots.view(n + 1, CONTEXT).int()
        self.history = torch.randint(0, VOCABULARY, (n + 1, CONTEXT), generator=generator).int()
        self.pool_rows = torch.arange(1, n + 1).flip(0)  # rows of the pool are not rows of the batch
        self.roots = torch.randint(0, VOCABULARY, (n,), generator=generator)
        self.slots = int(slots.max()) + 1

    def prefill(self, model: TinyModel, upto: list[int] | None = None) -> None:
        """Writes the KV of the first ``upto`` (default: all cached) tokens of every request."""
        for r, length in enumerate(upto or self.lengths):
            if not length:
                continue
            at = self.req_to_token[self.pool_rows[r], :length]
            ends = torch.tensor([0, length], dtype=torch.int32)
            tokens = self.history[self.pool_rows[r], :length].long()
            model.hidden(tokens, torch.arange(length), at.long(), TreeAttentionPlan(ends, ends, at))
        model.written.clear()

    @property
    def keys(self) -> np.ndarray:
        """Of the requests' noise: all 64 bits in use."""
        return np.array([request_key(self.seed, r) for r in range(len(self.lengths))], np.uint64)

    def running(self, max_depth: list[int] | None = None, temperature: float = 0.0) -> RunningBatch:
        ones = np.ones(len(self.lengths), np.int64)
        return RunningBatch(
            tuple(f"r{i}" for i in range(len(ones))), ("default",) * len(ones), math.inf * ones, 0.0 * ones,
            ones, np.array(self.lengths), 100 * ones,
            50 * ones if max_depth is None else np.array(max_depth), temperature * ones,
        )  # fmt: skip

    def host_rows(self, running: RunningBatch, lag: list[int]) -> DecodeRows:
        states = []
        for r, length in enumerate(self.lengths):
            pending = self.history[self.pool_rows[r], length - lag[r] : length].tolist()
            states.append(
                RequestState(
                    f"r{r}", "default", math.inf, 0.0, draft_len=length - lag[r], pending=pending,
                    key=int(self.keys[r]),
                )
            )  # fmt: skip
        return DecodeRows(
            states,
            np.array(self.lengths),
            self.roots.numpy(),
            self.pool_rows,
            self.req_to_token.long(),
            running,
        )

    def device_rows(self, running: RunningBatch, lag: list[int]) -> DeviceRows:
        lengths = np.array(self.lengths)
        return DeviceRows(
            lengths, torch.from_numpy(lengths), self.roots, self.pool_rows, self.req_to_token, self.history,
            np.array(lag), running, self.keys,
        )  # fmt: skip


def device_forward(model: TinyModel, candidates: int = 4, tokens: int = 512) -> DeviceForward:
    buffers = AttentionBuffers.allocate(1 << 14, 1 << 18, CPU)
    buffers.kv_indices.fill_(7)  # what is left of an earlier forward must not matter
    buffers.mask.fill_(255)
    inputs = Inputs.allocate(tokens, CPU)
    return DeviceForward(
        model,
        lambda b, rows: SdpaKernel(b),
        GraphTable(capture=False),
        inputs,
        buffers,
        candidates,
        CONTEXT - 1,
        VOCABULARY,
    )


def iteration_plan(
    running: RunningBatch, depth: int, width: int, branching: tuple[int, ...] | None = None
) -> IterationPlan:
    n = len(running)
    return IterationPlan(0, 0.0, running, np.ones(n), depth, width, 1000, branching)
