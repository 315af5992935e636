"""The kernels behind tree attention: which one is chosen, and Triton's against SDPA."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adaserve.config import AdaServeConfig
from adaserve.engine.gpu import flashinfer_planner, kernel_choice
from adaserve.engine.gpu.attention import AttentionBuffers, SdpaKernel, TreeKernel, set_out
from adaserve.engine.gpu.attention_kernel import (
    BUSY,
    LONG,
    SHORT,
    TILE,
    Cut,
    TritonKernel,
    Workspace,
    tiles_of,
)
from adaserve.engine.gpu.attention_layout import Extent
from adaserve.engine.gpu.attention_shape import AttentionShape
from adaserve.engine.gpu.device import served_sizes
from adaserve.engine.gpu.flashinfer_kernel import FlashInferKernel
from adaserve.engine.gpu.forward import GpuForward
from adaserve.engine.gpu.graphs import GraphTable
from adaserve.engine.gpu.kernel_choice import usable
from adaserve.engine.gpu.model import Inputs, Output, Parts
from adaserve.engine.gpu.sizes import READ_AT_ONCE
from adaserve.engine.trees.attention import Scores
from adaserve.engine.trees.batch import TreeBatch
from tests.engine.gpu.factories import CPU
from tests.engine.gpu.scripts import python

COMPARED = """
from torch import tensor
from tests.engine.gpu.triton_check import CPU, Scores, compare, far_slots, prompts
print(*(compare(seed, CPU, q_heads=n) for seed, n in enumerate((4, 2, 10, 14))), prompts(), far_slots())
sinks = tensor([1.5, -2.0, 3.0, 0.0]).bfloat16()
more = Scores(0.3, window=40, sinks=sinks), Scores(0.3, cap=2.0), Scores(0.3, window=300, cap=1.5)
print(*(compare(seed, CPU, scores=scores) for seed in (0, 1) for scores in more))
"""


def test_triton_reads_our_arrays_as_sdpa_does() -> None:
    """In Triton's interpreter. The first line has one, two, five and seven heads for each key head; its last
    figures are of prompts, and of a pool that 32 bits cannot address. Those of the second are of scores with
    windows, caps and sinks."""
    plain, more = (list(map(float, line.split())) for line in python(COMPARED, interpret=True).splitlines())
    *worst, far = plain
    assert len(worst) == 5 and max(worst) < 1e-5 and far < 4e-3
    assert len(more) == 6 and max(more) < 1e-5


HIDDEN = """
from math import inf, nan
from tests.engine.gpu.triton_check import hidden
print(*(bool((hidden(number) == hidden(0.0)).all()) for number in (7.0, inf, nan)))
"""


def test_numbers_that_no_token_sees_do_not_matter() -> None:
    """Slots of candidates that are not verified hold what an earlier request left, which may have
    overflowed."""
    assert python(HIDDEN, interpret=True).split() == ["True"] * 3


MIXED = """
from torch import bfloat16, float16, float32, float8_e4m3fn, float8_e5m2
from tests.engine.gpu.triton_check import mixed
print(mixed(bfloat16, float16), mixed(float32, float16))
print(mixed(float16, float8_e4m3fn), mixed(float32, float8_e4m3fn), mixed(float16, float8_e5m2))
"""


def test_a_pool_of_another_type_than_the_model_is_read() -> None:
    """As with ``--kv-cache-dtype bf16`` and a model in fp16, but the interpreter cannot multiply bf16."""
    assert max(map(float, python(MIXED, interpret=True).split())) < 2e-2


SPILLED = """
import torch
from adaserve.engine.gpu.attention_kernel import TILE, Workspace, _attend
from adaserve.engine.gpu.attention_shape import AttentionShape
from tests.engine.gpu.compiling import kind_of, spilled_bytes

half, quarter = torch.float16, torch.float8_e4m3fn

def served(group, dim, window, cap, kept):
    workspace = Workspace(AttentionShape(8 * group, 8, dim, 1.0, half, half), torch.device("cpu"))
    sizes = ((1, 16, 16), (9, 64, 64), (65, 512, 512), (65, 512, 8), (65, 64, 1), (17, 16, 1), (65, 256, 4))
    cuts = {(cut.rows, cut.warps): cut for cut in (workspace.cut(*size) for size in sizes)}
    for cut in cuts.values():
        q, pool = torch.zeros(512, 8 * group, dim, dtype=half), torch.zeros(9, 8, dim, dtype=kept)
        slots, tiles = torch.zeros(16, dtype=torch.int32), torch.zeros(cut.tiles, TILE, dtype=torch.int32)
        ends, seen = torch.zeros(512, dtype=torch.int64), torch.zeros(512, 512, dtype=torch.uint8)
        shared, strides = (workspace.partial, workspace.counters), (8 * group * dim, dim, *[8 * dim, dim] * 2)
        kind = kind_of(
            _attend, q, pool, pool, q, slots, tiles, ends, seen, *shared, ends if window else tiles, tiles,
            0.5, cap, window, *strides, 512, 512, 1, 512, 512, group, dim, dim, cut.rows, cut.keys,
            window > 0, cap > 0, False,
        )
        yield cut, spilled_bytes(_attend, kind, num_warps=cut.warps, num_stages=cut.stages)

for group, dim, *case in (
    (4, 64, 0, 0.0, half), (4, 128, 0, 0.0, half), (4, 128, 0, 0.0, quarter), (2, 256, 511, 72.0, half),
):
    for cut, spilled in served(group, dim, *case):
        print(spilled, dim, cut.rows, cut.warps)
"""


def test_tiles_are_held_in_registers() -> None:
    """Those of 64 rows and 128 dimensions spilled 66 KB in two warps. The last ones are of Gemma 2's kind."""
    lines = [line.split() for line in python(SPILLED, interpret=False).splitlines()]
    assert len(lines) > 5 and {rows for _, _, rows, _ in lines} == {"16", "32", "64"}
    assert not [line for line in lines if int(line[0]) > 256]


@pytest.mark.parametrize("seed", range(20))
def test_tiles(seed: int) -> None:
    """Against numpy: ragged requests, some without tokens, and tiles that are left over."""
    rng = np.random.default_rng(seed)
    n, group, rows = int(rng.integers(1, 66)), int(rng.integers(1, 8)), 16 << seed % 3
    q_lens, kv_lens = rng.integers(0, 40, n), rng.integers(1, 3000, n)
    each = -(-q_lens * group // rows)
    cut = Cut(rows, int(each.sum()) + seed % 4, 1, heads=1 + seed % 8, warps=4)
    request = np.arange(n).repeat(each)
    right = np.zeros((cut.tiles, TILE), np.int32)
    used = right[: len(request)]
    used[:, 0] = (q_lens.cumsum() - q_lens)[request]
    used[:, 1] = (np.arange(len(request)) - (each.cumsum() - each)[request]) * rows
    used[:, 2] = q_lens[request] * group
    used[:, 3], used[:, 4] = (kv_lens.cumsum() - kv_lens)[request], kv_lens[request]
    right[:, 5] = SHORT if len(request) * cut.heads <= BUSY else LONG
    got = tiles_of(q_lens, kv_lens, group, cut)
    assert got.dtype == np.int32 and np.array_equal(got, right)


def test_too_many_tiles_are_refused() -> None:
    """And not written behind their array."""
    with pytest.raises(AssertionError):
        tiles_of(np.array([9, 9]), np.array([20, 20]), 4, Cut(16, 5, 1, 1, 4))


HEADS = AttentionShape(4, 2, 8, 0.5, torch.float32, torch.float32)


def kernel_that(refuses: str) -> Any:
    """Makes kernels of which one method fails: when FlashInfer compiles, or when a graphics card runs it."""

    def refused(*_: Any) -> Any:
        raise RuntimeError(f"Ninja build failed.\nfatal error: no {refuses}")

    def make(buffers: AttentionBuffers, rows: int, place: int) -> SdpaKernel:
        kernel = SdpaKernel(buffers)
        setattr(kernel, refuses, refused)
        return kernel

    return make


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(32, 8), (16, 8), (14, 2), (32, 32)])
def test_texts_of_any_length_are_read_by_kernels_that_are_compiled(q_heads: int, kv_heads: int) -> None:
    """Of a draft that has missed much. Graphs compile theirs."""
    heads, kinds = AttentionShape(q_heads, kv_heads, 64, 1.0, torch.float16, torch.float16), set[Any]()
    workspace = Workspace(heads, CPU)

    class Kernel(SdpaKernel):
        def plan(self, extent: Extent) -> np.ndarray:
            cut = workspace.cut(len(extent.q_lens), int(extent.qo_starts[-1]), int(extent.q_lens.max()))
            kinds.add((cut.rows, cut.keys, cut.warps, cut.stages))
            return super().plan(extent)

    def call(inputs: Inputs, rows: int, kernel: TreeKernel) -> Output:
        return Output(torch.zeros(len(inputs.tokens), 9))

    sizes = served_sizes(AdaServeConfig(), most_rows=64)
    parts = Parts(
        call, lambda buffers, *_: Kernel(buffers), GraphTable(capture=False),
        AttentionBuffers.allocate(1 << 14, 1 << 18, CPU), replace(sizes, captured=frozenset(sizes.drafts())),
        torch.zeros(65, 512, dtype=torch.int32), candidates=3, last_position=511, last_token=8,
    )  # fmt: skip
    forward, generator = GpuForward(parts), np.random.default_rng(0)
    forward.compile_reading()
    compiled = set(kinds)
    for _ in range(60):
        others = generator.integers(1, 90, generator.integers(0, 8))
        q_lens = np.array([generator.integers(25, READ_AT_ONCE + 1), *others])
        q_lens = q_lens[q_lens.cumsum() <= READ_AT_ONCE]
        n, tokens = len(q_lens), np.zeros(q_lens.sum(), np.int64)
        forward.run(TreeBatch.causal(tokens, np.arange(n), np.full(n, 50), q_lens))
    assert 1 <= len(compiled) <= 4 and kinds == compiled


@pytest.mark.parametrize("refuses", ["plan", "run"])
def test_a_kernel_that_does_not_work_is_replaced(refuses: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        name, make = usable(kernel_that(refuses), HEADS, CPU)
    assert name == "triton" and isinstance(make(AttentionBuffers.allocate(1, 1, CPU), 1, 0), TritonKernel)
    assert f"serves: fatal error: no {refuses}" in caplog.text and "Traceback" in caplog.text


def test_a_kernel_that_works_serves() -> None:
    make = kernel_that("nothing")
    assert usable(make, HEADS, CPU) == ("flashinfer", make)


@pytest.mark.parametrize(
    ("setting", "device", "name"),
    [
        ("auto", "cpu", "sdpa"),
        ("triton", "cpu", "sdpa"),
        ("triton", "cuda", "triton"),
        ("auto", "cuda", "triton"),
    ],
)
def test_the_setting_chooses(setting: Any, device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttentionShape, "of", lambda runner: HEADS)
    monkeypatch.setattr(kernel_choice, "own_kernel", lambda heads, device: None)
    assert kernel_choice.kernel_maker(setting, None, torch.device(device), 8, 64)[0] == name


def test_flashinfer_is_not_used_for_windows_in_trees(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(AttentionShape, "of", lambda runner: replace(HEADS, plain_scores=False))
    monkeypatch.setattr(kernel_choice, "own_kernel", lambda heads, device: None)
    assert kernel_choice.kernel_maker("flashinfer", None, torch.device("cuda"), 8, 64)[0] == "triton"
    assert "FlashInfer does not serve trees with sliding windows" in caplog.text


def planned_bytes(q_heads: int, kv_heads: int, dim: int, rows: int, tokens: int, tile: int) -> int:
    """What FlashInfer 0.7.2 allocates in its plan on a GPU of 132 SMs, written down from scheduler.cuh."""
    group = q_heads // kv_heads
    tiles = max(2 * 132 // kv_heads, -(-tokens * group // tile) + rows - 1)
    partial = -(-tiles * tile // group)
    return 4 * q_heads * partial * dim + 4 * q_heads * partial + 32


@pytest.mark.parametrize("tile", [16, 64, 128])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dim"), [(32, 8, 128), (32, 32, 128), (40, 40, 128), (14, 2, 64)]
)
@pytest.mark.parametrize(("rows", "tokens"), [(2, 1), (65, 1024), (129, 2048), (257, 4096)])
def test_flashinfer_has_room_for_its_plans(
    q_heads: int, kv_heads: int, dim: int, rows: int, tokens: int, tile: int
) -> None:
    heads = AttentionShape(q_heads, kv_heads, dim, 1.0, torch.float16, torch.float16)
    room = flashinfer_planner.workspace_bytes(heads, rows, tokens)
    assert planned_bytes(q_heads, kv_heads, dim, rows, tokens, tile) <= room
    if (kv_heads, rows) == (8, 65):
        assert room == flashinfer_planner.WORKSPACE_BYTES, "nothing more for the models that are served most"
    # With more requests for the sake of smaller tiles, too.
    group = q_heads // kv_heads
    for longest in (1, 3, 16, 100):
        planned = flashinfer_planner.planned_rows(heads, rows, tokens, longest, room)
        chosen = planned_tile(planned, tokens, group)
        assert planned >= rows and planned_bytes(q_heads, kv_heads, dim, planned, tokens, chosen) <= room


def planned_tile(rows: int, tokens: int, group: int) -> int:
    """What FlashInfer 0.7.2 chooses where CUDA graphs are on, from scheduler.cuh and utils.cuh."""
    longest = (tokens - rows + 1) * group
    return 128 if longest > 64 else 64 if longest > 16 else 16


@pytest.mark.parametrize(
    ("rows", "tokens", "longest", "tile"),
    [(64, 192, 3, 16), (8, 24, 3, 16), (64, 128, 2, 16), (64, 384, 6, 64), (65, 512, 8, 64), (2, 1, 1, 16),
     (65, 64, 1, 16), (2, 256, 200, 128)],
)  # fmt: skip
def test_tiles_are_as_large_as_the_requests_ask_for(rows: int, tokens: int, longest: int, tile: int) -> None:
    """Drafts and verifications of a model whose key heads serve four heads each."""
    heads = AttentionShape(32, 8, 128, 1.0, torch.float16, torch.float16)
    planned = flashinfer_planner.planned_rows(
        heads, rows, tokens, longest, flashinfer_planner.WORKSPACE_BYTES
    )
    assert planned_tile(planned, tokens, 4) == tile
    assert flashinfer_planner.planned_rows(heads, rows, tokens, longest, 0) == rows, (
        "there is no room for more"
    )


def test_flashinfer_copies_and_clears_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would be a kernel more in every layer of every forward. Queries come as a part of wider rows."""
    ran: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Wrapper:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def reset_workspace_buffer(self, *_: Any) -> None: ...

        def plan(self, *_: Any, **__: Any) -> None: ...

        def run(self, q: torch.Tensor, pool: tuple[torch.Tensor, ...], *, out: torch.Tensor) -> torch.Tensor:
            assert all(part.shape == (7, 1, 2, 4) for part in pool), "pages of one slot"
            ran.append((q, out))
            return out.copy_(q)

    monkeypatch.setitem(
        sys.modules, "flashinfer", SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    )
    room, pool = torch.empty(1 << 20, dtype=torch.uint8), torch.zeros(7, 2, 4)
    heads = AttentionShape(4, 2, 4, 0.5, torch.float32, torch.float32)
    kernel = FlashInferKernel(AttentionBuffers.allocate(99, 99, CPU), 1, heads, room, room)
    kernel.plan(Extent(np.array([3]), np.array([5])))
    q = torch.arange(3 * 8 * 4.0).view(3, 8, 4)[:, :4]
    result = kernel.run(q, pool, pool, Scores(0.5))
    ((given, out),) = ran
    assert given.data_ptr() == q.data_ptr() and given.stride() == q.stride()
    assert out.is_contiguous() and out.shape == q.shape and out.dtype == q.dtype
    assert torch.equal(result, q.flatten(1))


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """What FlashInfer's own wrapper, on a CPU, gives to its compiled planner."""
    import flashinfer.prefill

    plans: list[list[Any]] = []

    def plan(*args: Any) -> list[int]:
        plans.append([a.tolist() if isinstance(a, torch.Tensor) and len(a) < 99 else a for a in args])
        return [len(plans)]

    module, empty = SimpleNamespace(plan=plan, paged_run=lambda *_: None), torch.empty

    def pageable(*args: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        return empty(*args, **named)

    monkeypatch.setattr(flashinfer.prefill, "get_batch_prefill_module", lambda *_: module)
    monkeypatch.setattr(torch, "empty", pageable)
    return plans


LLAMA = AttentionShape(32, 8, 128, 1.0, torch.float16, torch.float16)
QUERIES, SLOTS = 3, 4
"""Places of both starts among the planner's arguments."""


def test_requests_of_no_tokens_are_planned(planner: list[list[Any]]) -> None:
    """As many in every plan of a kernel, since its graph depends on it; with no keys and no mask."""
    room = torch.empty(1 << 20, dtype=torch.uint8)
    kernel, masks = FlashInferKernel(AttentionBuffers.allocate(99, 99, CPU), 3, LLAMA, room, room), []
    for q_lens, kv_lens in (((3, 3, 3), (9, 5, 7)), ((3, 1, 5), (4, 4, 4))):
        set_out(kernel, Extent(np.array(q_lens), np.array(kv_lens)), CPU)
        masks.append(kernel._bytes.tolist())
        assert kernel._queries.tolist() == planner[-1][QUERIES]
        assert kernel._slots.tolist() == planner[-1][SLOTS]
    assert planner[0][QUERIES : SLOTS + 1] == [[0, 3, 6, 9, 9, 9, 9], [0, 9, 14, 21, 21, 21, 21]], (
        "for tiles of 16"
    )
    assert masks == [[0, 4, 6, 9, 9, 9, 9], [0, 2, 3, 6, 6, 6, 6]]


def test_later_plans_are_those_of_flashinfers_wrapper(planner: list[list[Any]]) -> None:
    """But for what it uploads: nothing, since where queries, slots and masks start comes with the tokens."""
    first, later = Extent(np.array([2, 2]), np.array([9, 5])), Extent(np.array([1, 3]), np.array([700, 41]))
    room, buffers = torch.empty(1 << 20, dtype=torch.uint8), AttentionBuffers.allocate(999, 999, CPU)
    kernel = FlashInferKernel(buffers, 2, LLAMA, room, room)
    kernel.plan(first)
    with Copies() as copies:
        starts = kernel.plan(later)
    assert copies.made == 0
    kernel.take(torch.from_numpy(starts))
    fresh = FlashInferKernel(buffers, 2, LLAMA, room, room)
    set_out(fresh, later, CPU)
    kernels = [[x for x in args if not isinstance(x, torch.Tensor)] for args in planner[1:]]
    assert kernels[0] == kernels[1] and torch.equal(kernel._starts, fresh._starts)
    # What the next run asks for is there: types, scale and the newest plan.
    q, pool = torch.zeros(4, 32, 128).half(), torch.zeros(3, 8, 128).half()
    assert kernel.run(q, pool, pool, Scores(1.0)).shape == (4, 32 * 128)
    assert kernel._wrapper._plan_info == [2] and kernel._wrapper._sm_scale == LLAMA.scaling


class Copies(TorchDispatchMode):
    """Counts copies that copy something."""

    made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0] is not args[1] and args[0].numel():
            self.made += 1
        return func(*args, **(kwargs or {}))
