"""An iteration asks the device for nothing but the tree sizes: counted operator by operator on a CPU.

On a CPU nothing has to wait, so what would wait on a GPU is told by the operators: reading a value
(``item``), finding true entries, copying to the host, taking a mask as an index.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adaserve.engine.device import verify
from adaserve.engine.device.choose import choose
from adaserve.engine.device.drafter import DeviceDrafter
from adaserve.engine.device.graphs import Tiers
from adaserve.engine.device.transfer import HostCopy
from adaserve.scheduler.latency import default_latency
from adaserve.scheduler.policies import PolicyConfig, build_policy
from tests.engine.device.factories import Requests, TinyModel, device_forward, iteration_plan

WAITS = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::masked_select", "aten::unique2",
         "aten::equal", "aten::is_nonzero", "aten::repeat_interleave.Tensor")  # fmt: skip
TIERS = Tiers((1, 2, 4, 8, 16, 32, 64))


class Watch(TorchDispatchMode):
    """Remembers operators whose result the host, or an output's shape, depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        indices = args[1] if name.startswith(("aten::index.", "aten::index_put")) else ()
        by_mask = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)
        if name in WAITS or by_mask:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def model_unwatched(model: TinyModel) -> Iterator[None]:
    """The model and its reference kernel stand for GPU kernels; they may do as they like."""
    inner = model.__class__.__call__

    def call(self: TinyModel, *args: Any) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            return inner(self, *args)

    model.__class__.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        model.__class__.__call__ = inner  # type: ignore[method-assign]


def noisy(temperature: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.ones_like(temperature), np.ones_like(temperature)


@pytest.fixture
def case() -> tuple[Requests, TinyModel]:
    requests = Requests([5, 17, 9])
    model = TinyModel(requests.slots)
    requests.prefill(model)
    return requests, model


def test_the_watch_sees_what_waits() -> None:
    with Watch() as watch:
        x = torch.arange(3)
        int(x[1])
        x[x > 1]
        x[x > 1] = 0
        torch.nonzero(x)
    assert len(watch.seen) >= 4


@pytest.mark.parametrize("name", ["adaserve", "equal-greedy", "chain-3", "priced"])
@pytest.mark.parametrize("max_depth", [None, [4, 0, 2]])
def test_an_iteration(case: tuple[Requests, TinyModel], name: str, max_depth: list[int] | None) -> None:
    requests, model = case
    running = requests.running(max_depth)
    rows = requests.device_rows(running, [1, 0, 1])
    plan = iteration_plan(running, 4, 3)
    drafter = DeviceDrafter(device_forward(model), noisy, 48, TIERS, 64)
    policy = build_policy(name, PolicyConfig(latency=default_latency()))
    with model_unwatched(model), Watch() as watch:
        draft = drafter.draft(plan, rows)
        assert draft is not None
        grid = draft.grid(3)
        choice = choose(policy, plan, grid, len(draft.active) * draft.shape.nodes)
        v = verify.build(rows, draft, choice.kept.keep, choice.counts)
        _, best = verify.forward(drafter.forward, rows, v, TIERS, 8)
        acceptance = verify.accept(v, best, 5)
        verify.moves(rows, v, acceptance, v.deepest)
        verify.remember(rows, v, acceptance)
        HostCopy(count=acceptance.count, keep=choice.kept.keep)
    assert watch.seen == []
