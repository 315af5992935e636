"""A draft's whole search as it is served, with a table in place of its model: on a GPU from a graph, so that
what cannot be captured shows before a server starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adaserve.engine.device import Beams, Search
from adaserve.engine.gpu.attention import AttentionBuffers, SdpaKernel, TreeKernel
from adaserve.engine.gpu.forward import GpuForward
from adaserve.engine.gpu.graphs import Graph, GraphTable
from adaserve.engine.gpu.model import Inputs, Output, Parts
from adaserve.engine.gpu.sizes import SearchKey, Sizes, Tiers
from adaserve.engine.trees.batch import TreeBatch
from adaserve.engine.trees.shape import tree_shape

VOCABULARY, CACHED = 3000, 5


@dataclass(frozen=True)
class _Table:
    """What follows a token, wherever it stands; it needs no attention."""

    logits: Tensor  # [V, V]

    def __call__(self, inputs: Inputs, rows: int, kernel: TreeKernel) -> Output:
        return Output(self.logits[inputs.tokens][inputs.wanted])


class Recorded:
    """A ``Graph`` without SGLang, whose captures need its process groups."""

    def __init__(self, function: Callable[[], Any]) -> None:
        function()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.output = function()

    def replay(self) -> Any:
        self._graph.replay()
        return self.output


class _Graphs(GraphTable):
    def _make(self, key: Any, function: Callable[[], Any]) -> Graph:
        return Recorded(function)


def check_search(rows: int, depth: int, width: int, device: torch.device) -> dict[str, Any]:
    """Candidates that differ from the CPU's. Rounding may exchange two that are about equally likely."""
    right, got = (_found(rows, depth, width, d) for d in (torch.device("cpu"), device))
    pairs = (right.tokens, got.tokens), (right.parents, got.parents)
    wrong = sum(int((a != b).sum()) for a, b in pairs)
    return {"rows": rows, "depth": depth, "width": width, "wrong": wrong,
            "right": wrong <= right.tokens.size // 50}  # fmt: skip


def _found(rows: int, depth: int, width: int, device: torch.device) -> Beams:
    shape, every = tree_shape(depth, width, None), np.arange(rows)
    room, tiers = CACHED + rows + shape.width, Tiers((rows,))
    parts = Parts(
        _Table(torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0)).to(device)),
        lambda buffers, rows, place: SdpaKernel(buffers),
        _Graphs(capture=device.type == "cuda"),
        AttentionBuffers.allocate(rows * room, rows * (1 + width) * room, device),
        Sizes(tiers, tiers, rows, rows, depth, (width,), frozenset({SearchKey(rows, shape.beams)})),
        torch.arange(rows * room, dtype=torch.int32, device=device).view(rows, room),
        candidates=max(width, 3),
        last_position=room,
        last_token=VOCABULARY - 1,
    )
    first = TreeBatch.roots(every, every, CACHED + every, shape.width)
    ones = np.ones(rows, np.float32)
    search = Search(shape, CACHED + every, every, ones, ones / 2, every.astype(np.uint64))
    return GpuForward(parts).search(first, search, None).read()
