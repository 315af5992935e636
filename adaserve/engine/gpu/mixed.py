"""Verifications that read prompts in the same forward.

A verification of few tokens leaves compute unused, and while a prompt has a forward of its own all running
requests wait. Here both are one graph: every verified token and the last token of each prompt give logits,
and what a prompt's tokens see is written out as what a tree's do.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor

from adaserve.engine.gpu.attention_layout import seen_by
from adaserve.engine.gpu.forward import GpuForward
from adaserve.engine.gpu.graphs import GraphTable
from adaserve.engine.gpu.prompts import MAX_TOKENS
from adaserve.engine.gpu.sizes import Key, Sizes, Tiers
from adaserve.engine.trees.batch import TreeBatch

MIN_TOKENS = 32
"""Of a graph."""


class MixedForward(GpuForward):
    """Reads up to ``MAX_TOKENS`` tokens of prompts beside whatever the target verifies."""

    def __init__(self, target: GpuForward) -> None:
        parts, verified = target.parts, target.sizes.tokens.sizes[-1]
        tokens = Tiers(tuple(t for t in Tiers.up_to(MAX_TOKENS + verified).sizes if t >= MIN_TOKENS))
        self.keys = [mixed_key(t, parts.sizes) for t in reversed(tokens.sizes)]
        sizes = replace(parts.sizes, tokens=tokens, captured=frozenset(self.keys))
        own = replace(parts, sizes=sizes, table=GraphTable(parts.table.capture))
        super().__init__(own, room=parts.logits)
        self._served = parts.sizes

    @property
    def most_beside(self) -> int:
        """As in ``ModelForward``. Where memory was too short for a graph of each size there are none."""
        return MAX_TOKENS if all(map(self.table.has, self.keys)) else 0

    def _fitting(self, batch: TreeBatch, pieces: int) -> Key:
        """The padded size; what has no graph is not padded."""
        assert batch.seen is not None
        key = mixed_key(self.sizes.tokens.fit(len(batch)), self._served)
        rows, width = len(batch.q_lens), batch.seen.shape[1]
        if key in self.keys and rows < key.rows and width <= key.columns and pieces <= key.pieces:
            return key
        return Key(len(batch), rows + 1, -(-width // 8) * 8, pieces)

    def capture(self, key: Key) -> None:  # type: ignore[override]
        """The kernel is chosen for one long text, beside requests of which one token is verified."""
        q_lens = (np.arange(key.rows) < key.tokens).astype(np.int64)
        q_lens[0] += key.tokens - q_lens.sum()
        self._run_padding(key, q_lens, q_lens[: key.pieces])
        self.take_runs()

    def verify(self, trees: TreeBatch, texts: TreeBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [T, vocab] of the T verified tokens and their argmax int64 [T], and fp32 [n, vocab] of the
        last token of each text; valid until the target's next forward."""
        batch = beside(trees, texts)
        pieces = np.concatenate((np.ones(len(trees), np.int64), texts.q_lens))
        key = self._fitting(batch, len(pieces))
        logits, best = self._replay(key, self._extent(key, batch), batch, pieces)
        return logits[: len(trees)], best[: len(trees)], logits[len(trees) : len(pieces)]


def mixed_key(tokens: int, served: Sizes) -> Key:
    """For verifications of ``served`` sizes. Windows are as wide as a prompt can be."""
    columns = -(-max(tokens, served.columns) // 8) * 8
    return Key(tokens, min(tokens, served.most_rows) + 1, columns, min(tokens, served.tokens.sizes[-1]))


def beside(trees: TreeBatch, texts: TreeBatch) -> TreeBatch:
    """One batch of the requests of both, of whose windows as much is written out as the widest needs."""
    windows = seen_by(trees), seen_by(texts)
    width, tokens = max(w.shape[1] for w in windows), len(trees) + len(texts)
    seen = np.ones((tokens, width), np.bool_)
    seen[: len(trees), width - windows[0].shape[1] :] = windows[0]
    seen[len(trees) :, width - windows[1].shape[1] :] = windows[1]
    names = ("tokens", "positions", "places", "pool_rows", "q_lens", "kv_lens")
    joined = {name: np.concatenate((getattr(trees, name), getattr(texts, name))) for name in names}
    return TreeBatch(**joined, seen=seen)
