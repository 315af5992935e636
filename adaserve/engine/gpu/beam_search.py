"""A whole beam search as one CUDA graph: all draft steps, and the bookkeeping between them.

The first step has room for the same number of tokens of every request: those that the draft has not seen, and
the root at the end. Unused room is padding. For few requests it is made as wide as the later steps, so that
one attention plan serves all steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from adaserve.engine.beam_levels import Levels
from adaserve.engine.device import Awaited, Beams, Mark, Ready, Run, Search
from adaserve.engine.gpu import noise
from adaserve.engine.gpu.attention import TreeKernel
from adaserve.engine.gpu.attention_layout import Extent, list_slots, slot_lists
from adaserve.engine.gpu.follow_verification import begin_with
from adaserve.engine.gpu.fused_levels import FusedLevels
from adaserve.engine.gpu.model import Inputs, Parts
from adaserve.engine.gpu.sizes import SearchKey
from adaserve.engine.transfer import QueuedCopy, StaticArrays, put
from adaserve.engine.trees.batch import ContextGap, TreeBatch, without_gap
from adaserve.engine.trees.shape import TreeShape, tree_shape

Arrays = dict[str, np.ndarray]

FEW_TOKENS = 64
"""A forward of so many takes the time of one, for which a draft's weights are read."""


@dataclass
class _Prepared:
    """What a search's graph reads, at addresses that stay."""

    shape: TreeShape
    first: int  # tokens per request that the first step has room for
    columns: Tensor  # int64 [nodes]
    inner: Tensor  # int64 [3, R * n]: row, column and depth of the nodes that are expanded, level by level
    seen: Tensor  # bool [first, columns]: what the first step's tokens see, ``text_seen``
    found: Tensor  # int64 [3, R, nodes]: where the candidates are left
    kernels: dict[int, tuple[TreeKernel, np.ndarray]]  # by tokens per request of a step; these, int64 [R]
    static: StaticArrays = field(default_factory=StaticArrays)


class BeamSearches:
    """Beam searches on one model, by padded size: R rows, of which the last ones may be padding."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._prepared: dict[SearchKey, _Prepared] = {}
        self._kernels: dict[tuple[int, int, int], TreeKernel] = {}  # by rows, tokens per request, place
        self._eager: tuple[_Prepared, Mark] | None = None  # the last search without a graph, and its end

    def queue(self, first: TreeBatch, search: Search) -> tuple[Ready, Run]:
        """Queues a whole search; ``first``: its first step, whose gap all steps have."""
        shape, a = search.shape, len(search.base)
        key = self._parts.sizes.search(shape, a)
        prepared = self._prepare(key, shape)
        kv_lens = without_gap(search.base + shape.width, first.gap)
        arrays = {
            **at_the_end(first, prepared.first), "base": search.base, "pool_rows": search.pool_rows,
            "scale": search.scale, "spread": search.spread, "keys": search.keys,
        }  # fmt: skip
        found, run = self._run(key, prepared, arrays, kv_lens, first.gap, search.awaited)
        return queued_beams(found, a, len(shape.beams)), run

    def rehearse(self, batch: TreeBatch, width: int) -> Run:
        """The deepest search that has a graph, over the batch's requests and as wide as it."""
        sizes, a = self._parts.sizes, len(batch.q_lens)
        beams = min(int(batch.q_lens[0]), width, sizes.width)
        shape = tree_shape(sizes.depth, beams, None)
        key = sizes.search(shape, a)
        prepared = self._prepare(key, shape)
        base = np.minimum(batch.kv_lens - batch.q_lens, self._parts.req_to_token.shape[1] - shape.width)
        places = base[:, None] + np.arange(1 - prepared.first, 1)
        padding = _padding(a, prepared.first)
        arrays = {**padding, "places": places, "base": base, "pool_rows": batch.pool_rows}
        return self._run(key, prepared, arrays, base + shape.width)[1]

    def capture(self, key: SearchKey) -> None:
        """Makes the graph of ``key``, which must not branch, on nothing but padding, and compiles what runs
        before it where it follows a verification."""
        prepared = self._prepare(key, tree_shape(len(key.beams), key.beams[0], None))
        none, awaited = np.zeros(0, np.int64), None
        if self._parts.follows:
            one = torch.ones(1, dtype=torch.int64, device=self._parts.device)
            awaited = Awaited(1, one, one[:, None], one, one - 1, none)
        self._run(key, prepared, _padding(0, prepared.first), none, awaited=awaited)

    def _prepare(self, key: SearchKey, shape: TreeShape) -> _Prepared:
        if (prepared := self._prepared.get(key)) is not None:
            return prepared
        parts = self._parts
        if key not in parts.sizes.captured and self._eager is not None:
            # Its kernels go with the next search, and the copies of their plans must be over by then:
            # FlashInfer queues them from memory that no allocator watches.
            self._eager[1].wait()
        first, later = parts.first, shape.beams[:-1]
        if later and later[0] * key.rows <= FEW_TOKENS:
            first = max(first, later[0])
        columns, inner, seen = (
            torch.from_numpy(x).to(parts.device, non_blocking=True)
            for x in (shape.columns, expanded(shape, key.rows), text_seen(first, shape.width))
        )
        queries = dict.fromkeys((first, *later))  # tokens per request of the steps
        kernels = {q: (self._kernel(key, q, place), np.full(key.rows, q)) for place, q in enumerate(queries)}
        found = torch.empty(3, key.rows, shape.nodes, dtype=torch.int64, device=parts.device)
        prepared = _Prepared(shape, first, columns, inner, seen, found, kernels)
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
        self,
        key: SearchKey,
        prepared: _Prepared,
        arrays: Arrays,
        kv_lens: np.ndarray,
        gap: ContextGap | None = None,
        awaited: Awaited | None = None,
    ) -> tuple[Tensor, Run]:
        """int64 [3, R, nodes], ``Levels.found``. ``arrays``, ``kv_lens`` and ``gap`` are those of a rows."""
        parts, a = self._parts, len(kv_lens)
        padded = np.ones(key.rows, np.int64)
        padded[:a] = kv_lens
        of_steps = {}
        for q, (kernel, q_lens) in prepared.kernels.items():
            extent = Extent(q_lens, padded)
            parts.buffers.require(extent)
            of_steps[f"ends-{q}"] = end = extent.ends_of(q)
            end[a:] = -1  # padding sees its one key
            of_steps[f"starts-{q}"] = kernel.plan(extent)
        lists = slot_lists(extent, arrays["pool_rows"], gap)  # keys are the same in all steps
        there = prepared.static.put({**arrays, **of_steps, "lists": lists}, parts.device, key.rows)
        if awaited is not None:
            self._begin_with(awaited, key, prepared, there)
        found, run = parts.run(key, partial(self._search, key, prepared, there))
        if key not in parts.sizes.captured:
            self._eager = prepared, run[1]
        return found, run

    def _begin_with(
        self, awaited: Awaited, key: SearchKey, prepared: _Prepared, there: Mapping[str, Tensor]
    ) -> None:
        """What ``there`` has is that of the longest case."""
        rows = np.full(key.rows, -1, np.int64)
        rows[: len(awaited.rows)] = awaited.rows
        short = begin_with(awaited, put({"rows": rows}, self._parts.device)["rows"], there)
        for q, (kernel, _) in prepared.kernels.items():
            kernel.shorten(there[f"starts-{q}"], short, q)

    # -- inside of it -------------------------------------------------------------------------

    def _search(self, key: SearchKey, prepared: _Prepared, there: Mapping[str, Tensor]) -> Tensor:
        parts, shape, base = self._parts, prepared.shape, there["base"][:, None]
        levels = FusedLevels(shape, key.rows, prepared.columns, prepared.found)
        for q, (kernel, _) in prepared.kernels.items():
            kernel.take(there[f"starts-{q}"])
        q, rows, is_padding = prepared.first, there["pool_rows"][:, None], base == 0
        list_slots(parts.req_to_token, there["lists"], parts.buffers.kv_indices)
        places = torch.where(is_padding, -1, there["places"])
        slots = parts.slots(rows, places)
        positions = parts.turned(places, rows)  # tokens of a text stand at their positions
        # Padding before a short text sees all, or it would see nothing: attention to nothing is NaN.
        ends = torch.where(places < 0, -1, there[f"ends-{q}"])
        step = _Step(there["tokens"], positions, slots, ends, prepared.seen.expand(key.rows, -1, -1))
        before = self._before(there, places)
        logits, states = self._step(prepared, step, before, slice(q - 1, None, q))  # of the roots
        logprob, token = best_children(parts, shape, logits, transform(there, 1), base)
        levels.start(logprob[:, 0], token[:, 0])
        # Where nodes stand is worked out for all that are expanded; what they are, level by level.
        positions, angles, slots = self._standing(prepared, there)
        transforms = {q: transform(there, q) for q in set(shape.beams[:-1])}
        for depth in range(2, len(shape.beams) + 1):
            nodes = levels.level(depth - 1)
            tokens, seen = levels.tokens[:, nodes], levels.visible[:, nodes]
            q = tokens.shape[1]
            at, angle, slot = (
                every[key.rows * nodes.start : key.rows * nodes.stop].view(-1, q)
                for every in (positions, angles, slots)
            )
            step = _Step(tokens, angle, slot, there[f"ends-{q}"], seen)
            before = self._before_level(states, levels, depth)
            logits, states = self._step(prepared, step, before, slice(None))
            levels.grow(depth, *best_children(parts, shape, logits, transforms[q], at))
        return levels.found

    def _standing(self, prepared: _Prepared, there: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """int64 [R * n]: positions of the nodes that are expanded, those for the rotary embedding, and where
        their KV goes."""
        row, column, depth = prepared.inner
        base, pool_rows = there["base"][row], there["pool_rows"][row]
        places, positions = torch.where(base == 0, -1, base + column), base + depth
        return positions, self._parts.turned(positions, pool_rows), self._parts.slots(pool_rows, places)

    def _step(
        self, prepared: _Prepared, step: _Step, before: Tensor | None, wanted: slice
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [R, w, vocab] and a head's states [R, w, H] of the ``wanted`` ones of a step's tokens.
        ``before`` [R, q, H]: what a head is given."""
        parts, (rows, q) = self._parts, step.tokens.shape
        positions = step.positions.flatten()
        inputs = Inputs(
            step.tokens.clamp(max=parts.last_token).flatten(),
            positions,
            step.slots.flatten(),
            wanted,
            None if before is None else before.flatten(0, 1),
            parts.logits.rows(rows * q),
            None if parts.shift is None else positions,
        )
        kernel, _ = prepared.kernels[q]
        with kernel.hiding(step.ends, step.seen):
            found = parts.call(inputs, rows, kernel)
        logits, states = found.logits.unflatten(0, (rows, -1)), found.states
        return logits, None if states is None else states.unflatten(0, (rows, -1))

    def _before(self, there: Mapping[str, Tensor], places: Tensor) -> Tensor | None:
        """Additional inputs for the first step's tokens [R, q]: none, except for heads."""
        return None

    def _before_level(self, states: Tensor | None, levels: Levels, step: int) -> Tensor | None:
        """The same for the beams of depth ``step`` - 1, ``states`` being those of the beams before them."""
        return None


def transform(there: Mapping[str, Tensor], q: int) -> tuple[Tensor, ...]:
    """Scale, spread and keys of every token [R * q], where each request has q of them."""
    return tuple(there[name][:, None].expand(-1, q).flatten() for name in ("scale", "spread", "keys"))


def best_children(
    parts: Parts, shape: TreeShape, logits: Tensor, read: tuple[Tensor, ...], positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probabilities (fp32) and ids of the best tokens [R, q, K], enough for a search of ``shape``;
    ``positions`` [R, q]."""
    rows, q, _ = logits.shape
    flat, words, (scale, spread, keys) = logits.flatten(0, 1), parts.words, read
    logprob, found = noise.best(flat, scale, spread, keys, positions.flatten(), words, parts.best(shape))
    tokens = found if words is None else words[found]
    return logprob.view(rows, q, -1), tokens.view(rows, q, -1)


def queued_beams(found: Tensor, a: int, steps: int) -> Ready:
    """The first ``a`` rows of ``Levels.found``, on their way to the host."""
    copy = QueuedCopy({"found": found})

    def read() -> Beams:
        tokens, parents, logprobs = copy.read()["found"][:, :a]
        return Beams(tokens, parents, logprobs.view(np.float64), steps)

    return Ready(read, found)


@dataclass(frozen=True)
class _Step:
    """Tokens [R, q] of one forward, and what they see of their windows."""

    tokens: Tensor
    positions: Tensor  # for the rotary embedding
    slots: Tensor  # where their KV goes
    ends: Tensor  # of the windows, ``Extent.window_ends``; -1 = sees all
    seen: Tensor  # bool [R, q, columns]


def expanded(shape: TreeShape, rows: int) -> np.ndarray:
    """int64 [3, rows * n]: row, column and depth of the n nodes before the last level, level after level, so
    that those of a step lie side by side."""
    levels = [np.arange(*ends) for ends in pairwise(shape.start[:-1])]
    node = np.concatenate([np.empty(0, np.int64), *(np.tile(level, rows) for level in levels)])
    row = np.concatenate([np.empty(0, np.int64), *(np.arange(rows).repeat(len(level)) for level in levels)])
    return np.stack([row, shape.columns[node], shape.depth[node]])


def at_the_end(batch: TreeBatch, room: int) -> Arrays:
    """Tokens and places, int64 [n, room], a request's at the end of its row; place -1: none.

    Raises ValueError where one has more tokens: what has no room must be read before."""
    tokens = np.zeros((len(batch.q_lens), room), np.int64)
    places = np.full_like(tokens, -1)
    taken = np.arange(room) >= room - batch.q_lens[:, None]
    tokens[taken], places[taken] = batch.tokens, batch.places
    return {"tokens": tokens, "places": places}


def _padding(rows: int, first: int) -> Arrays:
    """Requests without text, for a search whose first step has room for ``first`` tokens of each."""
    places = np.zeros((rows, first), np.int64)
    return {"tokens": places, "places": places, **nothing(rows)}


def nothing(rows: int) -> Arrays:
    """Greedy searches of requests without text."""
    none, ones = np.zeros(rows, np.int64), np.ones(rows, np.float32)
    return {
        "base": none,
        "pool_rows": none,
        "scale": ones,
        "spread": 0 * ones,
        "keys": none.astype(np.uint64),
    }


def text_seen(first: int, width: int) -> np.ndarray:
    """bool [first, first - 2 + width]: the first step's tokens are text up to the root, where a token sees
    those up to itself. Their windows begin at the second of them, and end as those of later steps, which are
    ``width`` columns wide."""
    return np.arange(first - 2 + width) < np.arange(first)[:, None]
