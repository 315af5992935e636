"""Medusa heads on a GPU: all levels of a tree in one graph, from one hidden state of each request.

They read and propose the same as on CPU hosts (``engine.cpu.medusa``), except that grammars are not applied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from adaserve.checkpoints.medusa import MedusaHeads, load_medusa, require_target
from adaserve.engine.device import KeepGoing, Ready, Run, Search
from adaserve.engine.gpu.beam_search import best_children, nothing, queued_beams, transform
from adaserve.engine.gpu.draft_heads import keep_states
from adaserve.engine.gpu.fused_levels import FusedLevels
from adaserve.engine.gpu.model import Parts
from adaserve.engine.gpu.sizes import SearchKey
from adaserve.engine.hidden_states import HiddenStates, final_states
from adaserve.engine.sources.token_map import output_matrix
from adaserve.engine.transfer import StaticArrays
from adaserve.engine.trees.batch import TreeBatch
from adaserve.engine.trees.shape import TreeShape, tree_shape
from adaserve.errors import UnsupportedError


@dataclass
class _Prepared:
    """What a graph reads, at addresses that stay."""

    columns: Tensor  # int64 [nodes]
    found: Tensor  # int64 [3, R, nodes]: where the candidates are left
    static: StaticArrays = field(default_factory=StaticArrays)


class GpuMedusa:
    """``ParallelHeads`` on the hidden states of the target, which ``hidden`` keeps.

    ``parts``: the target's, with graphs and sizes for searches. ``lm_heads``: [V, H] of each head.
    ``dtype``: the target's.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        parts: Parts,
        hidden: HiddenStates,
        lm_heads: Sequence[Tensor],
        dtype: torch.dtype,
    ) -> None:
        there = partial(torch.Tensor.to, device=parts.device, dtype=dtype)
        self.hidden, self.table, self._parts = hidden, parts.table, parts
        self._weight, self._bias = there(heads.weight).transpose(-1, -2), there(heads.bias)[:, :, None]
        self._lm_heads = [there(matrix) for matrix in lm_heads]
        self._prepared: dict[SearchKey, _Prepared] = {}
        self._runs: list[Run] = []

    @property
    def most_steps(self) -> int:
        return len(self._lm_heads)

    def search(self, first: TreeBatch, search: Search, keep: KeepGoing | None) -> Ready:
        """Queues all levels at once; nothing waits until the candidates are read."""
        arrays = {name: getattr(search, name) for name in ("base", "pool_rows", "scale", "spread", "keys")}
        found, run = self._run(self._parts.sizes.search(search.shape, len(search.base)), search.shape, arrays)
        self._runs.append(run)
        return queued_beams(found, len(search.base), len(search.shape.beams))

    def rehearse(self, batch: TreeBatch, width: int) -> int:
        """The deepest search that has a graph, over the batch's requests."""
        sizes, a = self._parts.sizes, len(batch.q_lens)
        shape = tree_shape(min(sizes.depth, self.most_steps), min(width, sizes.width), None)
        arrays = {**nothing(a), "base": batch.kv_lens - batch.q_lens, "pool_rows": batch.pool_rows}
        self._runs.append(self._run(sizes.search(shape, a), shape, arrays)[1])
        return len(shape.beams)

    def capture(self, key: SearchKey) -> None:
        """Makes the graph of ``key``, which must not branch, on nothing but padding."""
        if len(key.beams) <= self.most_steps:
            self._run(key, tree_shape(len(key.beams), key.beams[0], None), nothing(0))

    def take_runs(self) -> list[Run]:
        runs, self._runs = self._runs, []
        return runs

    def _run(self, key: SearchKey, shape: TreeShape, arrays: dict[str, np.ndarray]) -> tuple[Tensor, Run]:
        """int64 [3, R, nodes], ``Levels.found``."""
        prepared = self._prepared.get(key)
        if prepared is None:
            columns = torch.from_numpy(shape.columns).to(self._parts.device)
            found = torch.empty(3, key.rows, shape.nodes, dtype=torch.int64, device=columns.device)
            prepared = _Prepared(columns, found)
            if key in self._parts.sizes.captured:
                self._prepared[key] = prepared
        there = prepared.static.put(arrays, self._parts.device, key.rows)
        return self._parts.run(key, partial(self._search, key.rows, shape, prepared, there))

    @torch.no_grad()
    def _search(
        self, rows: int, shape: TreeShape, prepared: _Prepared, there: Mapping[str, Tensor]
    ) -> Tensor:
        base, levels = there["base"][:, None], FusedLevels(shape, rows, prepared.columns, prepared.found)
        depth = len(shape.beams)
        # Padding has no cached tokens, and reads the scratch slot.
        slots = self._parts.slots(there["pool_rows"], there["base"] - 1)
        states = self._states(self.hidden.read(slots), depth)
        for step in range(1, depth + 1):
            logits = functional.linear(states[step - 1], self._lm_heads[step - 1])
            best = best_children(self._parts, shape, logits[:, None], transform(there, 1), base + (step - 1))
            if step == 1:
                levels.start(*(values[:, 0] for values in best))
            else:  # all nodes of a level have the same children
                levels.grow(step, *(values.expand(-1, shape.beams[step - 2], -1) for values in best))
        return levels.found

    def _states(self, hidden: Tensor, heads: int) -> Tensor:
        """[heads, R, H]: what the first heads make of ``hidden`` [R, H]."""
        x = hidden.to(self._weight.dtype).expand(heads, -1, -1)
        for layer in range(self._weight.shape[1]):
            x = x + functional.silu(torch.baddbmm(self._bias[:heads, layer], x, self._weight[:heads, layer]))
        return x


def gpu_medusa(parts: Parts, target: Any, folder: Path) -> GpuMedusa:
    """The forward of the heads in ``folder``, which from now on get the hidden states of the ``ModelRunner``
    ``target``. Raises UnsupportedError if they were made for another target, or need an output matrix that is
    quantized."""
    heads, config = load_medusa(folder), target.model_config
    require_target(heads, folder, config.hidden_size, config.vocab_size)
    lm_heads = heads.lm_heads
    if lm_heads is None:
        if (matrix := output_matrix(target.model)) is None:
            raise UnsupportedError(
                f"the Medusa heads in {folder} use the target's output matrix, which is quantized here: "
                "serve a checkpoint of the target that keeps it in 16 bits"
            )
        lm_heads = (matrix[: config.vocab_size],) * len(heads)
    hidden = final_states(target, config.hidden_size)
    keep_states(target, hidden)
    return GpuMedusa(heads, parts, hidden, lm_heads, target.dtype)
