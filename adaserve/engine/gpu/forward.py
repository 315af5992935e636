"""One model's tree forwards on a GPU: static inputs, padded sizes, graphs."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from adaserve.engine.device import KeepGoing, Mark, Ready, Run, Search
from adaserve.engine.gpu.attention import TreeKernel
from adaserve.engine.gpu.attention_layout import LIST, Extent, list_slots, seen_by, slot_lists
from adaserve.engine.gpu.beam_search import BeamSearches
from adaserve.engine.gpu.model import Inputs, LogitsRoom, Output, Parts
from adaserve.engine.gpu.sizes import READ_AT_ONCE, Key, SearchKey
from adaserve.engine.gpu.unread_candidates import write_nodes
from adaserve.engine.transfer import StaticArrays
from adaserve.engine.trees.batch import TreeBatch
from adaserve.scheduler.compiled import BOOL_TABLE, BOOLS_OUT, INT, INTS, INTS_OUT, compiled, several


class Packed:
    """What a forward of a padded size reads, in one array of int64, on the host or on the device."""

    def __init__(self, flat: Any, key: Key, bools: Any) -> None:
        t, r = key.tokens, key.rows
        lists, lens, end = 5 * t, 5 * t + LIST * r, Packed.size(key)
        seen = lens + key.pieces
        self.of_tokens = flat[:lists].reshape(5, t)
        self.tokens, self.positions, self.pool_rows, self.places, self.ends = self.of_tokens
        """[tokens] each; ``ends``: ``Extent.window_ends``. Padding has places and ends of -1."""
        self.lists = flat[lists:lens].reshape(r, LIST)
        """``slot_lists``."""
        self.pieces = flat[lens:seen]
        """[pieces]: tokens of each piece; 0 = there is none."""
        self.seen = flat[seen:end].view(bools).reshape(1, t, key.columns)
        """bool: what tokens see of their windows, at the end of the columns."""

    @staticmethod
    def size(key: Key) -> int:
        return 5 * key.tokens + LIST * key.rows + key.pieces + key.tokens * key.columns // 8


class _Prepared:
    """What forwards of a padded size work with."""

    def __init__(self, kernel: TreeKernel, key: Key) -> None:
        self.kernel, self.static = kernel, StaticArrays()
        self.inputs = np.zeros(Packed.size(key), np.int64)
        self.packed = Packed(self.inputs, key, np.bool_)
        """The same."""


@compiled(several(INTS, INTS, INTS, INTS, INTS, INTS), BOOL_TABLE, INTS, INT, INT, INTS_OUT, BOOLS_OUT)
def _pack(
    batch: tuple[np.ndarray, ...],
    seen: np.ndarray,
    byte_starts: np.ndarray,
    last_token: int,
    last_position: int,
    of_tokens: np.ndarray,
    to_seen: np.ndarray,
) -> None:
    """Fills ``Packed.of_tokens`` and ``Packed.seen`` [tokens, columns]."""
    tokens, positions, pool_rows, places, q_lens, kv_lens = batch
    columns, width, at = to_seen.shape[1], seen.shape[1], 0
    for r in range(len(q_lens)):
        for query in range(q_lens[r]):
            of_tokens[0, at] = min(tokens[at], last_token)
            of_tokens[1, at] = min(positions[at], last_position)
            of_tokens[2, at], of_tokens[3, at] = pool_rows[r], places[at]
            of_tokens[4, at] = 8 * byte_starts[r] + (query + 1) * kv_lens[r]  # ``Extent.window_ends``
            to_seen[at, : columns - width] = True
            to_seen[at, columns - width :] = seen[at]
            at += 1
    of_tokens[:3, at:], of_tokens[3:, at:] = 0, -1
    to_seen[at:] = True


class Reader(Protocol):
    """Reads texts that have no graph in a model's other forwards (``PromptForward``)."""

    def fits(self, tokens: int, texts: int) -> bool:
        """Whether it has a graph for so many."""
        ...

    def read(self, batch: TreeBatch) -> Any: ...

    def take_runs(self) -> list[Run]: ...


class Mixed(Protocol):
    """Reads prompts in forwards that verify (``MixedForward``)."""

    was_graph: bool

    @property
    def most_beside(self) -> int: ...

    def verify(self, trees: TreeBatch, texts: TreeBatch) -> tuple[Tensor, Tensor, Tensor]:
        """As ``GpuForward.run`` for ``trees``, and logits [n, vocab] of each text's last token."""
        ...

    def take_runs(self) -> list[Run]: ...


class GpuForward:
    """``ModelForward`` by padded size, on static buffers, with a graph per size where graphs are captured."""

    def __init__(self, parts: Parts, room: LogitsRoom | None = None) -> None:
        """``room``: for logits, if it is another forward's."""
        self.parts, self.device, self.most_tokens = parts, parts.device, parts.sizes.most_tokens
        self.sizes, self.table, self.first_tokens = parts.sizes, parts.table, parts.first
        self.follows = parts.follows
        self.reader: Reader | None = None
        self.mixed: Mixed | None = None
        self.prompt_logits: Tensor | None = None
        """[n, vocab]: logits of the prompts that SGLang calls the model for next, if those were read in a
        verification's forward."""
        self._room = parts.logits if room is None else room
        self._searches = BeamSearches(parts)
        self._prepared: dict[Key, _Prepared] = {}
        self._eager: tuple[TreeKernel, Mark] | None = None  # the last forward without a graph, and its end
        self._runs: list[Run] = []
        self.was_graph = False

    # -- one forward --------------------------------------------------------------------------

    def _extent(self, key: Key, batch: TreeBatch) -> Extent:
        """The geometry of a padded size. One request more than can be there holds the padding, which sees its
        one key."""
        n = len(batch.q_lens)
        q_lens, kv_lens = np.zeros(key.rows, np.int64), np.ones(key.rows, np.int64)
        q_lens[:n], q_lens[n], kv_lens[:n] = batch.q_lens, key.tokens - len(batch), batch.kv_lens
        return Extent(q_lens, kv_lens)

    def _packed(self, prepared: _Prepared, extent: Extent, batch: TreeBatch) -> dict[str, np.ndarray]:
        """The tokens, padded, where their keys are and what they see of these; and the kernel's starts."""
        parts, to = self.parts, prepared.packed
        to.lists[:] = slot_lists(extent, batch.pool_rows, batch.gap)
        _pack(
            (batch.tokens, batch.positions, batch.pool_rows, batch.places, batch.q_lens, batch.kv_lens),
            seen_by(batch),
            extent.byte_starts,
            parts.last_token,
            parts.last_position,
            to.of_tokens,
            to.seen[0],
        )
        return {"inputs": prepared.inputs, "starts": prepared.kernel.plan(extent)}

    def run(self, batch: TreeBatch) -> tuple[Tensor, Tensor]:
        """Logits [T, vocab] and their argmax int64 [T], valid until the next forward."""
        logits, best = self._queue(batch)
        return logits[: len(batch)], best[: len(batch)]

    @property
    def most_beside(self) -> int:
        return 0 if self.mixed is None else self.mixed.most_beside

    def run_beside(self, batch: TreeBatch, texts: TreeBatch) -> tuple[Tensor, Tensor]:
        assert self.mixed is not None
        logits, best, of_texts = self.mixed.verify(batch, texts)
        self.prompt_logits = of_texts.clone()  # samplers write to it, and the next forward
        self._runs += self.mixed.take_runs()
        self.was_graph = self.mixed.was_graph
        return logits, best

    def take_read(self, texts: int) -> Tensor:
        """``prompt_logits``, once. Raises RuntimeError if they are not of so many."""
        logits, self.prompt_logits = self.prompt_logits, None
        if logits is None or len(logits) != texts:
            count = 0 if logits is None else len(logits)
            raise RuntimeError(f"{count} prompts were read, and SGLang asks for {texts}")
        return logits

    def forget_read(self) -> None:
        self.prompt_logits = None

    def feed(self, batch: TreeBatch) -> None:
        reader = self.reader
        if (
            reader is None
            or self._key(batch) in self.sizes.captured
            or not reader.fits(len(batch), len(batch.q_lens))
        ):
            self._queue(batch)
        else:
            reader.read(batch)
            self._runs += reader.take_runs()

    def fill(self, batch: TreeBatch) -> None:
        key = self._key(batch)
        if key in self._prepared and self.follows:  # else FlashInfer would plan it
            prepared = self._prepared[key]
            prepared.static.put(self._packed(prepared, self._extent(key, batch), batch), self.device)

    def _queue(self, batch: TreeBatch) -> Any:
        """What ``_forward`` gives, padding included."""
        key = self._key(batch)
        return self._replay(key, self._extent(key, batch), batch)

    def logits(self, states: tuple[Tensor, Tensor]) -> Tensor:
        # Their argmax is known, and nobody else reads them. Of a padded vocabulary SGLang gives a part.
        return states[0].float().contiguous()

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
        each, rest = divmod(key.tokens, key.rows)
        q_lens = np.full(key.rows, each, np.int64)
        q_lens[:rest] += 1  # as when all requests are there: the kernel is chosen for it
        self._run_padding(key, q_lens)

    def compile_reading(self) -> None:
        """Compiles the attention over texts that have no graph. Triton takes seconds for it, and all requests
        would wait where a draft has missed that much of one."""
        for tokens in self.sizes.tokens.sizes:
            has_graph = self.reader is not None and self.reader.fits(tokens, 1)
            if self.sizes.columns < tokens <= READ_AT_ONCE and not has_graph:
                key = self.sizes.verification(tokens, width=tokens)
                self._run_padding(key, tokens * (np.arange(key.rows) == 0))

    def _run_padding(self, key: Key, q_lens: np.ndarray, pieces: np.ndarray | None = None) -> None:
        """A forward of ``q_lens`` [rows] tokens of each request, all of which are padding, in such pieces."""
        extent, none = Extent(q_lens, np.ones(key.rows, np.int64)), np.zeros(0, np.int64)
        nothing = TreeBatch(none, none, none, none, none, none, np.zeros((0, 1), np.bool_))
        self._replay(key, extent, nothing, pieces)

    def take_runs(self) -> list[Run]:
        runs, self._runs = self._runs, []
        return runs

    def _key(self, batch: TreeBatch) -> Key:
        width = int(batch.q_lens.max()) if batch.seen is None else batch.seen.shape[1]
        return self.sizes.verification(len(batch), len(batch.q_lens), width)

    def _replay(self, key: Key, extent: Extent, batch: TreeBatch, pieces: np.ndarray | None = None) -> Any:
        """``pieces`` int64 [up to key.pieces]: how many tokens each has; padding needs none."""
        self.parts.buffers.require(extent)
        prepared = self._prepared.get(key) or self._prepare(key)
        prepared.static.wait()  # FlashInfer's last plan was copied before that, and the next one is put there
        kernel, arrays = prepared.kernel, self._packed(prepared, extent, batch)
        if pieces is not None:
            prepared.packed.pieces[: len(pieces)], prepared.packed.pieces[len(pieces) :] = pieces, 0
        there = prepared.static.put(arrays, self.device)

        def forward() -> Any:
            kernel.take(there["starts"])
            return self._forward(key, kernel, Packed(there["inputs"], key, torch.bool))

        if batch.drawn is not None or batch.unread is not None:
            self._fill_in(batch, Packed(there["inputs"], key, torch.bool))
        output, run = self.parts.run(key, forward)
        self.was_graph = self.table.is_captured(key)
        if key not in self._prepared:
            self._eager = kernel, run[1]
        self._runs.append(run)
        return output

    def _fill_in(self, batch: TreeBatch, packed: Packed) -> None:
        """What the host does not know."""
        if batch.drawn is not None:
            packed.tokens[: len(batch)].copy_(batch.drawn)
        if batch.unread is not None:
            write_nodes(batch.unread, packed.tokens, packed.seen[0], self.parts.last_token)

    def _prepare(self, key: Key) -> _Prepared:
        """Kept for sizes that have a graph: there are too many of the others. A kernel of these must live
        until its forward is over, since FlashInfer's plan is copied from memory that no allocator watches."""
        if self._eager is not None:
            self._eager[1].wait()
        prepared = _Prepared(self.parts.make_kernel(self.parts.buffers, key.rows, 0), key)
        if key in self.sizes.captured:
            self._prepared[key] = prepared
        return prepared

    def _forward(self, key: Key, kernel: TreeKernel, packed: Packed) -> Any:
        """Logits and their argmax, of all tokens or pieces of the padded size."""
        slots = self.parts.slots(packed.pool_rows, packed.places)
        room, turned = self._room.rows(key.pieces or key.tokens), self._turned(packed)
        pieces = packed.pieces if key.pieces else None
        inputs = Inputs(packed.tokens, packed.positions, slots, room=room, turned=turned, pieces=pieces)
        logits = self._room.keep(self._call(key, kernel, packed, inputs).logits)
        return logits, logits.argmax(dim=-1)

    def _turned(self, packed: Packed) -> Tensor | None:
        """``Inputs.turned``."""
        parts = self.parts
        return None if parts.shift is None else parts.turned(packed.positions, packed.pool_rows)

    def _call(self, key: Key, kernel: TreeKernel, packed: Packed, inputs: Inputs) -> Output:
        buffers = self.parts.buffers
        list_slots(self.parts.req_to_token, packed.lists, buffers.kv_indices)
        with kernel.hiding(packed.ends[None], packed.seen):
            return self.parts.call(inputs, key.rows, kernel)
