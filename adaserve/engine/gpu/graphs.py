"""CUDA graphs over static buffers, and their eager stand-in with the same discipline.

A forward's inputs always lie in the same buffers, padded to one of a few sizes (tiers). On a GPU the
forward of a tier is captured once and replayed; elsewhere, and for sizes beyond the tiers, the same
function is called again. Padding writes to the scratch slot and is never read.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)

WARM_UPS = 2
"""Runs before a capture: kernels are compiled and chosen outside the graph."""


MIN_FREE_BYTES = 1 << 30
"""Left to prefills, whose activations are not allocated yet when graphs are captured."""


class Graph(Protocol):
    """A forward that can be run again on whatever its static inputs hold by then."""

    def replay(self) -> Any:
        """Runs it; the output is overwritten by the next replay."""
        ...


class EagerGraph:
    """Calls the function again."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def replay(self) -> Any:
        return self._function()


class CapturedGraph:
    """One ``torch.cuda.CUDAGraph``; all share SGLang's graph memory pool."""

    def __init__(self, function: Callable[[], Any]) -> None:
        from sglang.srt.distributed.device_communicators.pynccl_allocator import set_graph_pool_id
        from sglang.srt.distributed.parallel_state import graph_capture
        from sglang.srt.model_executor.runner_utils import pool
        from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode

        for _ in range(WARM_UPS):
            function()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        memory = pool.get_or_create_global_graph_memory_pool(torch.cuda)
        set_graph_pool_id(memory)  # --enable-symm-mem asks for it where no graph of SGLang's has set it
        with ExitStack() as stack:
            # The collector may find a kernel that nobody needs. Triton unloads it, and the capture fails.
            gc.disable()
            stack.callback(gc.enable)
            stack.enter_context(model_capture_mode())
            stream = pool.get_or_create_global_graph_capture_stream()
            context = stack.enter_context(graph_capture(stream=stream))
            stack.enter_context(torch.cuda.graph(self._graph, pool=memory, stream=context.stream))
            self.output = function()

    def replay(self) -> Any:
        self._graph.replay()
        return self.output


@dataclass
class CaptureReport:
    """What the graphs of one kind cost."""

    graphs: int = 0
    seconds: float = 0.0
    bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        return {"graphs": self.graphs, "seconds": round(self.seconds, 3), "bytes": self.bytes}


class GraphTable:
    """Graphs by key. ``capture`` False: everything runs eagerly on the same buffers."""

    def __init__(self, capture: bool) -> None:
        self.capture = capture
        self.report = CaptureReport()
        self._graphs: dict[Any, Graph] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._graphs)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._graphs)

    def get(self, key: Any, function: Callable[[], Any]) -> Graph:
        """The graph of ``key``, made of ``function`` at its first use."""
        graph = self._graphs.get(key)
        if graph is None:
            captures = self.capture and not self._is_closed
            graph = self._make(key, function) if captures else EagerGraph(function)
            self._graphs[key] = graph
        return graph

    def has(self, key: Any) -> bool:
        """Whether ``key`` has its graph. Where none are captured, none is missing."""
        return not self.capture or key in self._graphs

    def is_captured(self, key: Any) -> bool:
        """Whether ``key`` has a real graph, and not its eager stand-in."""
        graph = self._graphs.get(key)
        return graph is not None and not isinstance(graph, EagerGraph)

    def close(self) -> None:
        """What has no graph by now runs eagerly."""
        self._is_closed = True

    def _make(self, key: Any, function: Callable[[], Any]) -> Graph:
        # What the device lacks more than before may be another process's.
        before, start_s = torch.cuda.memory_reserved(), time.perf_counter()
        graph = CapturedGraph(function)
        self.report.graphs += 1
        self.report.seconds += time.perf_counter() - start_s
        self.report.bytes += max(0, torch.cuda.memory_reserved() - before)
        return graph


class Ranks(Protocol):
    """SGLang's ``GroupCoordinator``, as far as it is needed here."""

    world_size: int
    cpu_group: Any


def least_free_bytes(ranks: Ranks) -> int:
    """Free memory of the rank that has the least."""
    return least_of(ranks, torch.cuda.mem_get_info()[0])


def least_of(ranks: Ranks, value: int) -> int:
    """The smallest of all ranks' values, the same on every rank: each has to ask as often as the others."""
    if ranks.world_size == 1:
        return value
    least = torch.tensor(value)
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=ranks.cpu_group)
    return int(least)


def capture_all(
    name: str,
    keys: Sequence[Any],
    run: Callable[[Any], None],
    table: GraphTable,
    free_bytes: Callable[[], int],
) -> None:
    """Captures the keys in their order, the largest first, so that the smaller ones reuse its memory; as long
    as there is memory for the prefills that come. ``free_bytes``: must say the same on every rank, since a
    rank that went on alone would wait for the others inside of a forward."""
    for done, key in enumerate(keys):
        if free_bytes() < MIN_FREE_BYTES:
            logger.warning(
                "AdaServe: %d of %d %s graphs were captured, and the others are left out since less than %d "
                "MB are free: lower --mem-fraction-static, --max-depth or --max-running-requests",
                done, len(keys), name, MIN_FREE_BYTES >> 20,
            )  # fmt: skip
            break
        run(key)
    table.close()
    r = table.report
    logger.info(
        "AdaServe: %d %s graphs captured in %.1f s, %.0f MB", r.graphs, name, r.seconds, r.bytes / 1e6
    )
