"""A tiny model with a paged pool, seen by a host's parts and by a device's alike."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from adaserve.engine import cpu
from adaserve.engine.cpu.device import CpuDevice
from adaserve.engine.cpu.forwards import CpuForward
from adaserve.engine.cpu.torch_forward import TorchBackend
from adaserve.engine.device import Device
from adaserve.engine.gpu.attention import AttentionBuffers, SdpaKernel, TreeKernel
from adaserve.engine.gpu.device import GpuDevice
from adaserve.engine.gpu.forward import GpuForward
from adaserve.engine.gpu.graphs import GraphTable
from adaserve.engine.gpu.model import Inputs, Output, Parts
from adaserve.engine.gpu.sizes import Key, SearchKey, Sizes, Tiers
from adaserve.engine.logits.logit_transform import LogitTransform
from adaserve.engine.request_state import DecodeRows, RequestState
from adaserve.engine.sources.beam import BeamSource
from adaserve.engine.sources.draft_cache import DraftCache
from adaserve.engine.trees.attention import TreeAttentionPlan
from adaserve.noise import request_key
from adaserve.scheduler.interface import DraftPlan, IterationPlan, RunningBatch
from adaserve.sharpening import DraftSharpening
from tests.engine.cpu.factories import hf_model, read_hf

CONTEXT = 96
VOCABULARY = 131
CPU = torch.device("cpu")
PLAIN = DraftSharpening((0.0,), (1.0,), shared=((0.0,), (1.0,), (0.0,)))
"""The draft's logits as they are, without noise."""
NOISY = DraftSharpening((0.0, 1.0), (0.5, 1.5), shared=((0.0, 1.0), (0.5, 1.5), (0.0, 0.9)))
"""Requests that sample share their noise, in part."""


class TinyModel:
    """Both a ``CpuModel`` and a ``ModelCall`` of the device's forwards, over one pool."""

    def __init__(self, slots: int, seed: int = 0) -> None:
        weights, config = read_hf(hf_model(seed=seed))
        self.backend = TorchBackend(weights, config, "fp32")
        shape = (slots, config.num_kv_heads, config.head_dim)
        self.k = [torch.zeros(shape) for _ in range(len(weights.layers))]
        self.v = [torch.zeros(shape) for _ in range(len(weights.layers))]
        self.written: list[Tensor] = []  # slots of every forward

    def hidden(self, inputs: cpu.Inputs) -> Tensor:
        self.written.append(inputs.slots.clone())
        return self.backend.forward(inputs, self.k, self.v)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.backend.logits(hidden)

    def argmax(self, hidden: Tensor) -> Tensor:
        return self.backend.argmax(hidden)

    def topk_logprobs(self, hidden: Tensor, transform: LogitTransform, width: int) -> tuple[Tensor, Tensor]:
        return self.backend.topk_logprobs(hidden, transform, width)

    def __call__(self, inputs: Inputs, rows: int, kernel: TreeKernel) -> Output:
        assert isinstance(kernel, SdpaKernel)
        hidden = self.hidden(cpu.Inputs(inputs.tokens, inputs.positions, inputs.slots, kernel.tree_plan))
        wanted = inputs.wanted if inputs.pieces is None else inputs.pieces.cumsum(0) - 1
        return Output(self.backend.logits(hidden[wanted]))


class Pool:
    """What the worker asks of SGLang's KV pools."""

    def __init__(self, model: TinyModel) -> None:
        self.k_buffer, self.v_buffer = model.k, model.v

    def move_kv_cache(self, target: Tensor, source: Tensor) -> None:
        for buffer in (*self.k_buffer, *self.v_buffer):
            buffer[target] = buffer[source].clone()


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
        self._texts = torch.randint(0, VOCABULARY, (n, CONTEXT), generator=generator).tolist()
        self.pool_rows = np.arange(1, n + 1)[::-1].copy()  # rows of the pool are not rows of the batch
        self.roots: list[int] = torch.randint(0, VOCABULARY, (n,), generator=generator).tolist()
        self.slots = int(slots.max()) + 1

    def text(self, r: int) -> list[int]:
        """The cached tokens of a request."""
        tokens: list[int] = self._texts[r][: self.lengths[r]]
        return tokens

    def prefill(self, model: TinyModel, upto: list[int] | None = None) -> None:
        """Writes the KV of the first ``upto`` (default: all cached) tokens of every request."""
        for r, length in enumerate(upto or self.lengths):
            if length:
                at = self.req_to_token[self.pool_rows[r], :length]
                ends = torch.tensor([0, length], dtype=torch.int32)
                tokens, plan = torch.tensor(self.text(r)[:length]), TreeAttentionPlan(ends, ends, at)
                model.hidden(cpu.Inputs(tokens, torch.arange(length), at, plan))
        model.written.clear()

    def running(self, max_depth: list[int] | None = None, temperature: float = 0.0) -> RunningBatch:
        ones = np.ones(len(self.lengths), np.int64)
        return RunningBatch(
            tuple(f"r{i}" for i in range(len(ones))), ("default",) * len(ones), math.inf * ones, 0.0 * ones,
            ones, np.array(self.lengths), 100 * ones,
            50 * ones if max_depth is None else np.array(max_depth), temperature * ones,
        )  # fmt: skip

    def rows(self, running: RunningBatch) -> DecodeRows:
        """With noise keys that use all 64 bits."""
        states = [
            RequestState(f"r{r}", "default", math.inf, 0.0, generated=[root], key=request_key(self.seed, r))
            for r, root in enumerate(self.roots)
        ]
        return DecodeRows(states, np.array(self.lengths), self.pool_rows, running)

    def source(
        self,
        device: Device,
        lag: list[int],
        sharpening: DraftSharpening = PLAIN,
        max_nodes: int = 48,
        number: int = 0,
    ) -> BeamSource:
        """A beam search on a draft that has not seen the last ``lag`` tokens of each request."""
        cache = DraftCache(device.drafts[number], self.req_to_token, self.slots, stride=9)
        for r, (row, behind) in enumerate(zip(self.pool_rows.tolist(), lag, strict=True)):
            text = self.text(r)
            known = text[: len(text) - behind]
            slots = self.req_to_token[row, : len(known)]
            cache.started(row, known or text, slots, read=bool(known))
            if known and behind:
                cache.advanced(row, text[len(known) :], 0)
        return BeamSource(device, cache, sharpening, max_nodes, number=number)


def host_device(
    requests: Requests, target: TinyModel, *drafts: TinyModel, drafts_itself: bool = False
) -> CpuDevice:
    own, self_drafter, *others = (CpuForward(m, requests.req_to_token) for m in (target, target, *drafts))
    return CpuDevice(own, *others, self_drafter=self_drafter if drafts_itself else None)


SIZES = Sizes(
    Tiers((1, 2, 4, 8)),
    Tiers((1, 2, 4, 8, 16, 32, 64)),
    most_rows=8,
    most_tokens=64,
    depth=5,
    widths=(4,) * 4,
)


def graph_device(
    requests: Requests, target: TinyModel, *drafts: TinyModel, drafts_itself: bool = False
) -> GpuDevice:
    """The GPU's parts on a CPU: SDPA over the packed arrays, functions in place of graphs."""
    buffers, self_drafter = stale_buffers(), None
    if drafts_itself:
        parts = device_forward(requests, target, SIZES.searches(), buffers).parts
        self_drafter = GpuForward(dataclasses.replace(parts, first=1, follows=False))
    return GpuDevice(
        device_forward(requests, target, SIZES.verifications(), buffers),
        *(device_forward(requests, draft, SIZES.drafts(), buffers) for draft in drafts),
        self_drafter=self_drafter,
    )


def stale_buffers() -> AttentionBuffers:
    """What is left of an earlier forward must not matter."""
    buffers = AttentionBuffers.allocate(1 << 14, 1 << 18, CPU)
    buffers.kv_indices.fill_(7)
    return buffers


def device_forward(
    requests: Requests,
    model: TinyModel,
    captured: Iterable[Key | SearchKey],
    buffers: AttentionBuffers | None = None,
) -> GpuForward:
    buffers = buffers or stale_buffers()
    parts = Parts(
        model,
        lambda b, rows, place: SdpaKernel(b),
        GraphTable(capture=False),
        buffers,
        dataclasses.replace(SIZES, captured=frozenset(captured)),
        requests.req_to_token,
        candidates=4,
        last_position=CONTEXT - 1,
        last_token=VOCABULARY - 1,
        follows=True,
    )
    return GpuForward(parts)


def iteration_plan(
    running: RunningBatch, depth: int, width: int, branching: tuple[int, ...] | None = None
) -> IterationPlan:
    return IterationPlan(0, 0.0, running, DraftPlan(depth, width, branching), 1000)
