"""A whole beam search as one CUDA graph: all draft steps, and the bookkeeping between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from adaserve.engine.device import noise
from adaserve.engine.device.attention import TreeKernel
from adaserve.engine.device.layout import Extent, slot_lists, window_bits
from adaserve.engine.device.model import Inputs, Parts
from adaserve.engine.device.sizes import FIRST, SearchKey
from adaserve.engine.device.transfer import QueuedCopy, StaticArrays
from adaserve.engine.parts import Beams, Ready, Run, Search
from adaserve.engine.search import Levels
from adaserve.engine.trees.batch import Gap, TreeBatch, without_gap
from adaserve.engine.trees.shape import TreeShape, tree_shape

Arrays = dict[str, np.ndarray]


@dataclass
class _Prepared:
    """What a search's graph reads, at addresses that stay."""

    shape: TreeShape
    columns: Tensor  # int64 [nodes]
    kernels: dict[int, TreeKernel]  # by tokens per request of a step
    static: StaticArrays = field(default_factory=StaticArrays)


class BeamSearches:
    """Beam searches on one model, by padded size: R rows, of which the last ones may be padding."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._prepared: dict[SearchKey, _Prepared] = {}
        self._kernels: dict[tuple[int, int, int], TreeKernel] = {}  # by rows, tokens per request, place

    def queue(self, first: TreeBatch, search: Search) -> tuple[Ready, Run]:
        """Queues a whole search; ``first``: its first step, whose gap all steps have."""
        shape, a = search.shape, len(search.base)
        key = self._parts.sizes.search(shape, a)
        kv_lens = without_gap(search.base + shape.width, first.gap)
        arrays = {
            "tokens": first.tokens.reshape(a, FIRST),
            "base": search.base, "pool_rows": search.pool_rows, "scale": search.scale,
            "spread": search.spread, "keys": search.keys,
        }  # fmt: skip
        found, run = self._run(key, self._prepare(key, shape), arrays, kv_lens, first.gap)
        copy = QueuedCopy({"found": found})

        def read() -> Beams:
            tokens, parents, logprobs = copy.read()["found"][:, :a]
            return Beams(tokens, parents, logprobs.view(np.float64), steps=len(shape.beams))

        return read, run

    def rehearse(self, batch: TreeBatch, width: int) -> Run:
        """The deepest search that has a graph, over the batch's requests and as wide as it."""
        sizes, a = self._parts.sizes, len(batch.q_lens)
        beams = min(int(batch.q_lens[0]), width, sizes.width)
        shape = tree_shape(sizes.depth, beams, None)
        key = sizes.search(shape, a)
        base = np.minimum(batch.kv_lens - batch.q_lens, self._parts.req_to_token.shape[1] - shape.width)
        arrays = {**self._padding(a), "base": base, "pool_rows": batch.pool_rows}
        return self._run(key, self._prepare(key, shape), arrays, base + shape.width)[1]

    def capture(self, key: SearchKey) -> None:
        """Makes the graph of ``key``, which must not branch, on nothing but padding."""
        shape = tree_shape(len(key.beams), key.beams[0], None)
        self._run(key, self._prepare(key, shape), self._padding(0), np.zeros(0, np.int64))

    @staticmethod
    def _padding(rows: int) -> Arrays:
        none, ones = np.zeros(rows, np.int64), np.ones(rows, np.float32)
        tokens = np.zeros((rows, FIRST), np.int64)
        return {"tokens": tokens, "base": none, "pool_rows": none, "scale": ones, "spread": 0 * ones,
                "keys": none.astype(np.uint64)}  # fmt: skip

    def _prepare(self, key: SearchKey, shape: TreeShape) -> _Prepared:
        if (prepared := self._prepared.get(key)) is not None:
            return prepared
        parts = self._parts
        columns = torch.from_numpy(shape.columns).to(parts.device)
        kernels = {q: self._kernel(key, q, place) for place, q in enumerate(_queries(shape))}
        prepared = _Prepared(shape, columns, kernels)
        if key in parts.sizes.captured:  # others are not kept: there are too many of them
            self._prepared[key] = prepared
        return prepared

    def _kernel(self, key: SearchKey, q: int, place: int) -> TreeKernel:
        """Searches of different depth and width share what they can: FlashInfer pins memory for each."""
        parts, size = self._parts, (key.rows, q, place)
        kernel = self._kernels.get(size)
        if kernel is None:
            kernel = parts.make_kernel(parts.buffers, key.rows, place)
            if key in parts.sizes.captured:
                self._kernels[size] = kernel
        return kernel

    # -- before the graph ---------------------------------------------------------------------

    def _run(
        self, key: SearchKey, prepared: _Prepared, arrays: Arrays, kv_lens: np.ndarray, gap: Gap | None = None
    ) -> tuple[Tensor, Run]:
        """int64 [3, R, nodes], ``Levels.found``. ``arrays``, ``kv_lens`` and ``gap`` are those of a rows."""
        parts, a, spare = self._parts, len(kv_lens), key.rows - len(kv_lens)
        lists = slot_lists(parts.req_to_token.shape[1], arrays["pool_rows"], kv_lens, gap)
        padded = np.concatenate([kv_lens, np.ones(spare, np.int64)])
        extents = {q: Extent(np.full(key.rows, q), padded) for q in prepared.kernels}
        bits: Arrays = {}
        for q, extent in extents.items():
            bits |= _window(q, extent, prepared.shape.width, a)
        no_gap = dict.fromkeys(("gap_at", "gap_length"), np.zeros(a, np.int64))  # gaps come and go
        given = {name: _pad(values, key.rows) for name, values in {**no_gap, **arrays, **lists}.items()}
        there = prepared.static.put({**given, **bits}, parts.device)
        parts.buffers.set_slots(
            parts.req_to_token, {name: there[name][:a] for name in lists}, int(kv_lens.sum()), spare
        )
        parts.buffers.see_all(max(int(extent.byte_starts[-1]) for extent in extents.values()))
        for q, kernel in prepared.kernels.items():
            kernel.plan(extents[q])
        return parts.run(key, partial(self._search, key, prepared, there))

    # -- inside of it -------------------------------------------------------------------------

    def _search(self, key: SearchKey, prepared: _Prepared, there: Mapping[str, Tensor]) -> Tensor:
        shape, base = prepared.shape, there["base"][:, None]
        levels = Levels(shape, key.rows, prepared.columns)
        at = base + torch.arange(1 - FIRST, 1, device=base.device)
        seen = torch.zeros(key.rows, FIRST, shape.width, dtype=torch.bool, device=base.device)
        seen[:, -1, 0] = True  # the root sees itself; the token before it stands before the window
        logits = self._step(prepared, there, there["tokens"], at, at, seen)
        logprob, token = self._best(logits[:, -1:], there, base)
        levels.start(logprob[:, 0], token[:, 0])
        for step in range(2, len(shape.beams) + 1):
            nodes = levels.level(step - 1)
            tokens, places = levels.tokens[:, nodes], base + levels.columns[nodes]
            positions = base + (step - 1)
            logits = self._step(prepared, there, tokens, positions, places, levels.visible[:, nodes])
            levels.grow(step, *self._best(logits, there, positions))
        return levels.found

    def _step(
        self,
        prepared: _Prepared,
        there: Mapping[str, Tensor],
        tokens: Tensor,
        positions: Tensor,
        places: Tensor,
        seen: Tensor,
    ) -> Tensor:
        """Logits [R, q, vocab] of ``tokens`` [R, q] at ``places`` [R, q]; ``seen`` [R, q, width]."""
        parts, (rows, q) = self._parts, tokens.shape
        is_padding = there["base"][:, None] == 0
        slots = parts.slots(there["pool_rows"][:, None], torch.where(is_padding, -1, places))
        positions = positions.clamp(0, parts.last_position).expand_as(tokens)
        byte, clear = there[f"byte-{q}"], there[f"clear-{q}"].view_as(seen)
        parts.buffers.hide(byte, torch.where(seen, 0, clear))
        tokens = tokens.clamp(max=parts.last_token)
        inputs = Inputs(tokens.flatten(), positions.flatten(), slots.flatten())
        logits = parts.call(inputs, rows, prepared.kernels[q])
        parts.buffers.show(byte)
        return logits.view(rows, q, -1)

    def _best(self, logits: Tensor, there: Mapping[str, Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities (float64) and ids of the best tokens [R, q, K]; ``positions`` [R, 1]."""
        rows, q, _ = logits.shape
        columns = (there["scale"], there["spread"], there["keys"], positions[:, 0])
        each = (c[:, None].expand(rows, q).flatten() for c in columns)
        scaled = noise.read(logits.flatten(0, 1), *each)
        best = scaled.topk(self._parts.candidates, dim=-1)
        logprob = best.values - scaled.logsumexp(dim=-1, keepdim=True)
        return logprob.double().view(rows, q, -1), best.indices.view(rows, q, -1)


def _queries(shape: TreeShape) -> list[int]:
    """Tokens per request of the steps: the first one's, then those of the others that differ."""
    return list(dict.fromkeys((FIRST, *shape.beams[:-1])))


def _window(q: int, extent: Extent, width: int, a: int) -> Arrays:
    """Bytes of the mask that tell of a step's windows, and what clears their bits. Padding behind the first
    ``a`` rows sees its one key."""
    seen = np.zeros((len(extent.q_lens) * q, width), np.bool_)
    seen[a * q :] = True
    byte, clear = window_bits(extent, width, seen)
    return {f"byte-{q}": byte, f"clear-{q}": clear}


def _pad(values: np.ndarray, rows: int) -> np.ndarray:
    """With zeros, to so many rows."""
    return np.concatenate([values, np.zeros((rows - len(values), *values.shape[1:]), values.dtype)])
