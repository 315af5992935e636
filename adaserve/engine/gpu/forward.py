"""One model's tree forwards on a GPU: static inputs, padded sizes, graphs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adaserve.engine.device import KeepGoing, Mark, Ready, Run, Search
from adaserve.engine.gpu.attention import TreeKernel
from adaserve.engine.gpu.beam_search import BeamSearches
from adaserve.engine.gpu.layout import Extent, seen_by, slot_lists, window_bits
from adaserve.engine.gpu.model import Inputs, Parts
from adaserve.engine.gpu.sizes import Key, SearchKey
from adaserve.engine.transfer import put
from adaserve.engine.trees.batch import TreeBatch
from adaserve.engine.trees.verify import SCRATCH_SLOT


class GpuForward:
    """``ModelForward`` by padded size, on static buffers, with a graph per size where graphs are captured."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.device, self.most_tokens = parts, parts.device, parts.sizes.most_tokens
        self.sizes, self.table, self.first_tokens = parts.sizes, parts.table, parts.first
        self._searches = BeamSearches(parts)
        most = self.sizes.tokens.fit(self.most_tokens)
        self._inputs = torch.zeros(4 * most, dtype=torch.int64, device=self.device)
        self._kernels: dict[Key, TreeKernel] = {}
        self._eager: tuple[TreeKernel, Mark] | None = None  # the last forward without a graph, and its end
        self._runs: list[Run] = []
        self._logits: Tensor | None = None  # of all graphs: 16 sizes with 128k tokens would take a gigabyte

    # -- one forward --------------------------------------------------------------------------

    def arrays(self, batch: TreeBatch) -> dict[str, np.ndarray]:
        """The tokens, padded, where their keys are and what hides some of these."""
        key, p = self._key(batch), self.parts
        inputs = np.zeros((4, key.tokens), np.int64)
        inputs[3] = -1
        inputs[:, : len(batch)] = (
            np.minimum(batch.tokens, p.last_token),
            np.minimum(batch.positions, p.last_position),
            batch.pool_rows[batch.row],
            batch.places,
        )
        seen = seen_by(batch)
        byte, clear = window_bits(Extent(batch.q_lens, batch.kv_lens), seen.shape[1], seen)
        arrays = {"inputs": inputs, "byte": byte, "clear": clear}
        if not p.buffers.has_slots(batch):
            arrays |= slot_lists(p.req_to_token.shape[1], batch.pool_rows, batch.kv_lens, batch.gap)
        return arrays

    def run(self, batch: TreeBatch, tensors: Mapping[str, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Logits [T, vocab] and their argmax int64 [T], valid until the next forward."""
        logits, best = self._queue(
            batch, put(self.arrays(batch), self.device) if tensors is None else tensors
        )
        return logits[: len(batch)], best[: len(batch)]

    def _queue(self, batch: TreeBatch, tensors: Mapping[str, Tensor]) -> Any:
        """What ``_forward`` gives, padding included."""
        key, count, buffers = self._key(batch), len(batch), self.parts.buffers
        q_lens, kv_lens, spare = batch.q_lens, batch.kv_lens, key.rows - len(batch.q_lens)
        self._inputs[: 4 * key.tokens].copy_(tensors["inputs"].flatten())
        buffers.set_slots(self.parts.req_to_token, tensors, int(kv_lens.sum()), spare)
        # One request more than can be there holds the padding, which sees its one key.
        if spare:
            q_lens = np.concatenate([q_lens, [key.tokens - count], np.zeros(spare - 1, np.int64)])
            kv_lens = np.concatenate([kv_lens, np.ones(spare, np.int64)])
        extent = Extent(q_lens, kv_lens)
        buffers.see_all(int(extent.byte_starts[-1]))
        buffers.hide(tensors["byte"], tensors["clear"])
        return self._replay(key, extent)

    def logits(self, states: tuple[Tensor, Tensor]) -> Tensor:
        logits = states[0]
        return logits.clone() if logits.dtype == torch.float32 else logits.float()

    def argmax(self, states: tuple[Tensor, Tensor]) -> Tensor:
        return states[1]

    # -- draft steps --------------------------------------------------------------------------

    def search(self, first: TreeBatch, search: Search, keep: KeepGoing | None) -> Ready:
        """Queues all steps; nothing waits until the candidates are read."""
        ready, run = self._searches.queue(first, search)
        self._runs.append(run)
        return ready

    def rehearse(self, batch: TreeBatch, width: int) -> int:
        """The deepest search that has graphs, over the batch's requests and with as many beams."""
        self._runs.append(self._searches.rehearse(batch, width))
        return self.sizes.depth

    # -- graphs -------------------------------------------------------------------------------

    def capture(self, key: Key | SearchKey) -> None:
        """Makes the graph of ``key``, on nothing but padding."""
        if isinstance(key, SearchKey):
            self._searches.capture(key)
            return
        self._inputs.zero_()
        buffers = self.parts.buffers
        buffers.kv_indices[: key.rows].fill_(SCRATCH_SLOT)
        buffers.see_all(len(buffers.mask))
        each, rest = divmod(key.tokens, key.rows)
        q_lens = np.full(key.rows, each, np.int64)
        q_lens[:rest] += 1  # as when all requests are there: the kernel is chosen for it
        self._replay(key, Extent(q_lens, np.ones(key.rows, np.int64)))

    def take_runs(self) -> list[Run]:
        runs, self._runs = self._runs, []
        return runs

    def _key(self, batch: TreeBatch) -> Key:
        return self.sizes.verification(len(batch), len(batch.q_lens))

    def _replay(self, key: Key, extent: Extent) -> Any:
        kernel = self._kernels.get(key) or self._make_kernel(key)
        kernel.plan(extent)
        output, run = self.parts.run(key, partial(self._forward, key, kernel))
        if key not in self._kernels:
            self._eager = kernel, run[1]
        self._runs.append(run)
        return output

    def _make_kernel(self, key: Key) -> TreeKernel:
        """Kept for sizes that have a graph: there are too many of the others. One of these must live until
        its forward is over, since FlashInfer's plan is copied from memory that no allocator watches."""
        if self._eager is not None:
            self._eager[1].wait()
        kernel = self.parts.make_kernel(self.parts.buffers, key.rows, 0)
        if key in self.sizes.captured:
            self._kernels[key] = kernel
        return kernel

    def _forward(self, key: Key, kernel: TreeKernel) -> Any:
        """Logits and their argmax, of all tokens of the padded size."""
        tokens, positions, pool_rows, places = self._inputs[: 4 * key.tokens].view(4, -1)
        slots = self.parts.slots(pool_rows, places)
        logits = self._shared(key, self.parts.call(Inputs(tokens, positions, slots), key.rows, kernel).logits)
        return logits, logits.argmax(dim=-1)

    def _shared(self, key: Key, logits: Tensor) -> Tensor:
        """Logits of a graph in a buffer that all graphs share; those of eager forwards as they are."""
        if key not in self.sizes.captured:
            return logits
        if self._logits is None:  # before the first capture: graphs are made after a warm-up
            most = max(k.tokens for k in self.sizes.captured if isinstance(k, Key))
            self._logits = torch.empty(most, logits.shape[1], dtype=logits.dtype, device=self.device)
        return self._logits[: key.tokens].copy_(logits)
