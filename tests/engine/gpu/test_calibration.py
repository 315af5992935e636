"""What is measured at a start is what is served: captured sizes, and nothing but their forwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from adaserve.engine.costs import measure
from adaserve.engine.device_timing import HostMark
from adaserve.engine.gpu.device import GpuDevice
from adaserve.engine.gpu.sizes import Sizes, Tiers
from adaserve.engine.trees.batch import TreeBatch
from adaserve.patches.start.kv_sizing import MAX_CAPTURED_TOKENS
from tests.engine.gpu.factories import SIZES, Requests, TinyModel, device_forward


def at(seconds: float) -> HostMark:
    mark = HostMark()
    mark.time_s = seconds
    return mark


def test_only_forwards_count() -> None:
    """Not what ran before, and not what the host does around them."""
    runs: list[tuple[HostMark, HostMark]] = [(at(0.0), at(100.0))]

    def take_runs() -> list[tuple[HostMark, HostMark]]:
        taken = runs.copy()
        runs.clear()
        return taken

    target: Any = SimpleNamespace(device=torch.device("cpu"), parts=SimpleNamespace(shift=None))
    device = GpuDevice(target)
    model: Any = SimpleNamespace(take_runs=take_runs)
    step = lambda: runs.extend([(at(1.0), at(3.0)), (at(7.0), at(8.5))])  # noqa: E731
    assert device.time([model], step) == pytest.approx(3.5)


@pytest.mark.parametrize("most_rows", [8, 64])
def test_measured_verifications_have_graphs(most_rows: int) -> None:
    """Also those of more tokens than four for each request that can be there."""
    tokens = (1, 3, 16, 64, 256, 384, 512)
    sizes = Sizes(Tiers.up_to(64), Tiers.up_to(MAX_CAPTURED_TOKENS, steps=4), most_rows, most_tokens=1024)
    captured, seen = set(sizes.verifications()), []

    def step(batch: TreeBatch) -> int:
        seen.append(sizes.verification(len(batch), len(batch.q_lens)))
        return 1

    device: Any = SimpleNamespace(time=lambda model, run: run() or 1.0)
    context_len = 1024 + measure.LONGEST_TREE
    room = measure.Room(device, torch.zeros(64, 2048, dtype=torch.int32), 1 << 20, most_rows, context_len)
    grid = measure.Grid(tokens, (), (128,), repeats=1, stop_s=5.0)
    timed = measure._Timed(room, [], step, 1, lambda _: None, "verify")
    points = measure._sweep(timed, tokens, 4, grid)
    assert points[: len(tokens), 0].tolist() == list(tokens)
    assert points[len(tokens) :, :3].tolist() == [
        [n * q, n * c, n] for n in (1, 4) for q in (1, 4) for c in (128, 1024)
    ]
    assert set(seen) <= captured


def test_graphs_share_their_logits() -> None:
    requests, model = Requests([5, 9]), TinyModel(slots=400)
    forward = device_forward(requests, model, SIZES.verifications())

    def run(queries: int) -> torch.Tensor:
        batch = TreeBatch.causal(
            np.arange(2 * queries), requests.pool_rows, np.array([5, 9]), np.full(2, queries)
        )
        return forward.run(batch)[0]

    small, large = run(1), run(4)
    assert small.data_ptr() == large.data_ptr()
    assert forward.logits((large, large.argmax(1))).data_ptr() == large.data_ptr(), "nothing is copied"
