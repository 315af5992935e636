"""Padded sizes, graphs by key, and copies that arrive later."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.distributed.device_communicators import pynccl_allocator

from adaserve.config import AdaServeConfig
from adaserve.engine.gpu import beam_search, model
from adaserve.engine.gpu.attention import AttentionBuffers, SdpaKernel
from adaserve.engine.gpu.attention_layout import Extent, unpack
from adaserve.engine.gpu.device import MAX_BEAMS, GpuDevice, served_sizes
from adaserve.engine.gpu.graphs import (
    MIN_FREE_BYTES,
    CapturedGraph,
    EagerGraph,
    GraphTable,
    capture_all,
)
from adaserve.engine.gpu.sizes import READ_AT_ONCE, Key, SearchKey, Sizes, Tiers
from adaserve.engine.transfer import QueuedCopy, StaticArrays, put
from adaserve.engine.trees.batch import TreeBatch
from adaserve.engine.trees.shape import tree_shape
from tests.engine.gpu.factories import CPU, SIZES, Requests, TinyModel, device_forward, iteration_plan


@pytest.mark.parametrize("most", [1, 2, 7, 16, 64, 100, 512])
def test_tiers_waste_little(most: int) -> None:
    tiers, fine = Tiers.up_to(most), Tiers.up_to(most, steps=4)
    assert tiers.sizes[-1] == most
    for size in range(1, most + 1):
        padded = tiers.fit(size)
        assert size <= padded <= most and padded in tiers.sizes
        assert padded <= max(2 * size, 1) if size < 16 else padded <= 1.5 * size
        assert size < 32 or fine.fit(size) <= 1.25 * size
    assert len(tiers.sizes) <= 6 + 8 * max(1, most.bit_length() - 3), "graphs cost memory and time at start"
    assert len(fine.sizes) <= 24


def test_beyond_the_tiers() -> None:
    tiers = Tiers((1, 2, 4))
    assert [tiers.fit(n) for n in (5, 8, 9)] == [8, 8, 12] and 8 not in tiers.sizes


@pytest.mark.parametrize("sizes", [(), (2, 1), (0, 1), (1, 1)])
def test_odd_tiers(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="positive and rising"):
        Tiers(sizes)


def test_a_graph_runs_on_what_its_inputs_hold() -> None:
    static, table, made = torch.zeros(3), GraphTable(capture=False), []

    def forward() -> torch.Tensor:
        made.append(1)
        return static * 2

    for value in (1.0, 5.0):
        static.fill_(value)
        assert table.get("key", forward).replay().tolist() == [2 * value] * 3
    assert len(table) == 1 and len(made) == 2
    assert isinstance(table.get("key", forward), EagerGraph)
    assert table.report.to_json() == {"graphs": 0, "seconds": 0.0, "bytes": 0}


def test_graphs_end_where_memory_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left runs all the same, and nothing is captured while requests are served."""
    table, captured, ran = GraphTable(capture=True), [], []

    def capture(self: GraphTable, key: int, function: Any) -> EagerGraph:
        captured.append(key)
        return EagerGraph(function)

    def run(key: int) -> None:
        table.get(key, lambda: ran.append(key)).replay()

    monkeypatch.setattr(GraphTable, "_make", capture)
    free = iter([MIN_FREE_BYTES + 5, MIN_FREE_BYTES, MIN_FREE_BYTES - 1])
    capture_all("draft", [3, 2, 1], run, table, lambda: next(free))
    for key in (1, 3):
        run(key)
    assert captured == [3, 2] and ran == [3, 2, 1, 3]


def test_memory_of_graphs_is_this_process_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may take some of the device's meanwhile."""
    reserved = free = 90 << 30

    def capture(function: Any) -> EagerGraph:
        nonlocal reserved, free
        reserved, free = reserved + 3000, free - (20 << 30)
        return EagerGraph(function)

    monkeypatch.setattr("adaserve.engine.gpu.graphs.CapturedGraph", capture)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 140 << 30))
    table = GraphTable(capture=True)
    for key in (1, 2):
        table.get(key, lambda: None)
    assert (table.report.graphs, table.report.bytes) == (2, 6000)


def test_no_garbage_is_collected_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hold a kernel, and a capture in which one is unloaded fails. SGLang's collectives are told where
    graphs have their memory."""
    utils, session = "sglang.srt.model_executor.runner_utils", nullcontext(SimpleNamespace(stream=None))
    for name in ("memory_pool", "capture_stream"):
        monkeypatch.setattr(f"{utils}.pool.get_or_create_global_graph_{name}", lambda *_: "pool")
    monkeypatch.setattr(pynccl_allocator, "_graph_pool_id", None)
    monkeypatch.setattr(f"{utils}.capture_mode.model_capture_mode", nullcontext)
    monkeypatch.setattr("sglang.srt.distributed.parallel_state.graph_capture", lambda stream: session)
    for name in ("synchronize", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    collects: list[bool] = []
    CapturedGraph(lambda: collects.append(gc.isenabled()))
    assert collects == [True, True, False] and gc.isenabled()
    assert pynccl_allocator._graph_pool_id == "pool"


def recorded(make: Callable[..., Any], events: list[str], made: list[weakref.ref[Any]]) -> Callable[..., Any]:
    """Makes kernels, and notes when; which of them still live shows in ``made``."""

    def make_kernel(*arguments: Any) -> Any:
        events.append("make")
        kernel = make(*arguments)
        made.append(weakref.ref(kernel))
        return kernel

    return make_kernel


def test_a_kernel_without_a_graph_lives_until_its_forward_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan is copied from memory that would be used again; the next one waits for the forward."""
    requests, events, made = Requests([5, 17]), [], []
    forward = device_forward(requests, TinyModel(requests.slots), [])

    class Mark:
        def wait(self) -> None:
            assert made[-1]() is not None
            events.append("wait")

    monkeypatch.setattr(model, "mark", lambda device: Mark())
    kernels = recorded(forward.parts.make_kernel, events, made)
    forward.parts = dataclasses.replace(forward.parts, make_kernel=kernels)
    for _ in range(2):
        tokens = TreeBatch.roots(np.array([3, 4]), requests.pool_rows, np.array(requests.lengths), 1)
        forward.run(tokens)
    assert events == ["make", "wait", "make"]


def test_kernels_of_a_search_without_a_graph_live_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are planned before the first step runs."""
    requests, events, made = Requests([5, 17]), [], []
    monkeypatch.setattr(beam_search, "FEW_TOKENS", 0)
    draft = TinyModel(requests.slots)
    requests.prefill(draft)
    device = GpuDevice(*(device_forward(requests, draft, []) for _ in range(2)))
    parts, running = device.drafts[0].parts, requests.running()

    class Mark:
        def wait(self) -> None:
            events.append("wait")
            assert all(kernel() is not None for kernel in made)

    monkeypatch.setattr(model, "mark", lambda device: Mark())
    searches = device.drafts[0]._searches
    searches._parts = dataclasses.replace(parts, make_kernel=recorded(parts.make_kernel, events, made))
    for _ in range(2):
        plan = iteration_plan(running, 3, 3)
        assert requests.source(device, [0, 0]).propose(plan, requests.rows(running), None)
    assert events == ["make", "make", "wait", "make", "make"]


@pytest.mark.parametrize(
    ("rows", "width", "plans"), [(1, 3, 1), (8, 2, 1), (16, 3, 1), (24, 3, 2), (1, 1, 2)]
)
def test_steps_of_few_requests_share_a_plan(rows: int, width: int, plans: int) -> None:
    """The first step then has as many tokens of each request as those that follow."""
    requests, made = Requests([5, 17]), []
    forward = device_forward(requests, TinyModel(requests.slots), [])

    class Kernel(SdpaKernel):
        def plan(self, extent: Extent) -> np.ndarray:
            made.append(extent)
            return super().plan(extent)

    searches = forward._searches
    searches._parts = dataclasses.replace(searches._parts, make_kernel=lambda buffers, *_: Kernel(buffers))
    forward.capture(SearchKey(rows, (width,) * 4))
    assert len(made) == plans and set(made[0].q_lens) == {max(2, width) if plans == 1 else 2}


@pytest.mark.parametrize("cached", [1, 2, 9])
def test_padding_before_a_short_text_sees_something(cached: int) -> None:
    """Attention to nothing is NaN, and would be written where other padding reads."""
    base, q, width = np.array([cached]), 6, 4
    places = base + np.arange(1 - q, 1)
    extent, buffers = Extent(np.array([q]), base + width), AttentionBuffers.allocate(8, 64, CPU)
    ends = torch.from_numpy(np.where(places < 0, -1, extent.window_ends)[None])
    with buffers.hiding(ends, torch.from_numpy(beam_search.text_seen(q, width))[None]):
        seen = unpack(buffers.mask, 0, q, cached + width)
    assert seen.any(1).all()
    assert seen[-1].tolist() == [True] * (cached + 1) + [False] * (width - 1), "the root: up to itself"
    assert seen[-2].tolist() == [True] * cached + [False] * width


def test_keys() -> None:
    sizes = Sizes(Tiers((1, 4)), Tiers((1, 4)), most_rows=64, most_tokens=64, depth=5, widths=(3, 3))
    keys = list(sizes.searches())
    assert len(keys) == len(set(keys)) == 2 * 5 * 3, "one graph for a whole draft: by rows, depth and width"
    assert keys[0] == SearchKey(4, (3,) * 5), "the largest first, or the smaller ones cannot reuse its memory"
    assert list(sizes.drafts()) == [*keys, *sizes.verifications()], "a draft reads what it missed, too"
    long = Sizes(Tiers((1,)), Tiers((1, READ_AT_ONCE, 512)), most_rows=64, most_tokens=512)
    assert [key.tokens for key in long.drafts() if isinstance(key, Key)] == [READ_AT_ONCE, 1]
    assert sizes.search(tree_shape(2, 3, None), rows=3) == SearchKey(4, (3, 3))
    assert sizes.search(tree_shape(2, 2, (2, 1)), rows=3) not in keys, "others are run without a graph"
    assert sizes.verification(3).tokens == 4 and sizes.verification(3).rows == 5
    few = Sizes(Tiers((1, 4)), Tiers((1, 4)), most_rows=2, most_tokens=64)
    assert few.verification(4).rows == 3, "the requests that can be there, and one for the padding"
    assert few.verification(4, rows=6).rows == 7
    assert [k.tokens for k in few.verifications()] == [4, 1]


def test_sizes_that_are_served() -> None:
    """Wide searches have graphs for few requests, and nobody's forward is larger than there is room for."""
    sizes = served_sizes(AdaServeConfig(max_width=8, forced_depth=0), most_rows=64)
    assert dict(zip(sizes.rows.sizes, sizes.widths, strict=True)) == {
        1: 8, 2: 8, 4: 8, 8: 4, 12: 3, 16: 3, 24: 3, 32: 3, 48: 3, 64: 3,
    }  # fmt: skip
    assert (sizes.columns, sizes.most_tokens) == (1 + 5 * 8, 64 * (1 + 5 * 3))
    assert served_sizes(AdaServeConfig(max_width=8, forced_depth=0), most_rows=2).tokens.sizes[-1] == 2 * 41
    policies = AdaServeConfig(max_width=8).for_policies(most_beams=MAX_BEAMS)
    for n in range(1, 65):
        assert SearchKey(sizes.rows.fit(n), (policies.widest(n),) * 5) in set(sizes.searches())


def test_packed_uploads() -> None:
    arrays = {
        "tokens": np.array([3, -1, 1 << 40]),
        "seen": np.array([[True, False, True]]),
        "scale": np.array([0.5, -2.0], np.float32),
        "keys": np.array([(1 << 64) - 1], np.uint64),
        "none": np.zeros((2, 0), np.int64),
        "clear": np.array([255, 128, 7], np.uint8),
        "columns": np.arange(6).reshape(2, 3)[:, ::2],
    }
    there = put(arrays, CPU)
    for name, values in arrays.items():
        assert there[name].shape == values.shape
        assert np.array_equal(there[name].numpy().astype(values.dtype), values), name
    assert there["seen"].dtype == torch.bool and there["scale"].dtype == torch.float32
    assert there["keys"].tolist() == [-1], "the bits of an unsigned number"


def test_uploads_to_one_place() -> None:
    static = StaticArrays()
    first = static.put({"tokens": np.arange(4), "scale": np.ones(3, np.float32)}, CPU)
    again = static.put({"tokens": np.arange(4) + 9, "scale": np.zeros(3, np.float32)}, CPU)
    assert first["tokens"] is again["tokens"], "the host makes no views while the device waits"
    assert first["tokens"].tolist() == [9, 10, 11, 12] and first["scale"].tolist() == [0, 0, 0]
    with pytest.raises(AssertionError, match="stay where they are"):
        static.put({"tokens": np.arange(5), "scale": np.ones(3, np.float32)}, CPU)


def test_copies() -> None:
    tensors = {
        "count": torch.tensor([3, -1]),
        "logprob": torch.tensor([[0.25, -torch.inf], [float("nan"), -1e-300]], dtype=torch.float64),
        "keep": torch.tensor([[True, False, True]]),
        "none": torch.zeros(2, 0, dtype=torch.int64),
    }
    copy = QueuedCopy(tensors)
    got = copy.read()
    assert set(got) == set(tensors) and copy.read() is got
    for name, tensor in tensors.items():
        assert got[name].shape == tuple(tensor.shape) and got[name].dtype == tensor.numpy().dtype
        torch.testing.assert_close(torch.from_numpy(got[name].copy()), tensor, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(TypeError, match="float32"):
        QueuedCopy({"x": torch.zeros(1)})


def test_the_next_plan_waits_for_the_copy_of_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer copies its plans from pinned memory, and a draft reads what it has missed in several
    forwards of one size, between which nobody waits."""
    requests, done = Requests([5, 17]), list[str]()
    forward = device_forward(requests, TinyModel(requests.slots), SIZES.verifications())

    class Kernel(SdpaKernel):
        def plan(self, extent: Extent) -> np.ndarray:
            done.append("plan")
            return super().plan(extent)

    forward.parts = dataclasses.replace(forward.parts, make_kernel=lambda buffers, *_: Kernel(buffers))
    monkeypatch.setattr(StaticArrays, "wait", lambda _: done.append("wait"))
    for place in (3, 4):
        done.clear()
        at = np.array([place])
        forward.run(TreeBatch.roots(at, requests.pool_rows[:1], at, 1))
    assert done[:2] == ["wait", "plan"]


def test_a_graph_is_captured_for_all_requests_at_once() -> None:
    """FlashInfer's tiles follow from the longest request of the first plan."""
    requests, planned = Requests([5, 17]), []
    forward = device_forward(requests, TinyModel(requests.slots), [key := Key(12, 5, 64)])

    class Kernel(SdpaKernel):
        def plan(self, extent: Extent) -> np.ndarray:
            planned.append(extent.q_lens.tolist())
            return super().plan(extent)

    forward.parts = dataclasses.replace(forward.parts, make_kernel=lambda buffers, *_: Kernel(buffers))
    forward.capture(key)
    assert planned == [[3, 3, 2, 2, 2]]
