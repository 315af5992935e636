"""What an iteration waits for, launches and uploads, counted operator by operator on a CPU.

On a CPU nothing has to wait, so what would wait on a GPU is told by the operators: reading a value
(``item``), finding true entries, taking a mask as an index. What may be waited for are the copies to the
host: of the last outcome, and of the candidates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adaserve.engine.device import forward, parts
from adaserve.engine.device.transfer import QueuedCopy, put
from tests.engine.device.factories import TinyModel
from tests.engine.device.test_worker import Run

WAITS = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::masked_select", "aten::unique2",
         "aten::equal", "aten::is_nonzero", "aten::repeat_interleave.Tensor")  # fmt: skip
VIEWS = ("view", "slice", "select", "expand", "unsqueeze", "squeeze", "t.default", "transpose", "alias",
         "as_strided", "detach", "split", "_unsafe_view", "permute", "lift_fresh", "reshape")  # fmt: skip
"""Operators that launch nothing."""


class Watch(TorchDispatchMode):
    """Counts what would be launched; remembers what the host, or an output's shape, would wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        indices = args[1] if name.startswith(("aten::index.", "aten::index_put")) else ()
        by_mask = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)
        if name in WAITS or by_mask:
            self.waits.append(name)
        self.launches += not name.removeprefix("aten::").startswith(VIEWS)
        return func(*args, **(kwargs or {}))


@contextmanager
def model_unwatched() -> Iterator[None]:
    """The models and their reference kernel stand for graphs; they may do as they like."""
    inner = TinyModel.__call__

    def call(self: TinyModel, *args: Any) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            return inner(self, *args)

    TinyModel.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        TinyModel.__call__ = inner  # type: ignore[method-assign]


def test_the_watch_sees_what_waits() -> None:
    with Watch() as watch:
        x = torch.arange(3)
        int(x[1])
        x[x > 1]
        x[x > 1] = 0
        torch.nonzero(x)
    assert len(watch.waits) >= 4 and watch.launches >= 4


MOST_LAUNCHES = {"none": 36, "adaserve": 268, "chain-3": 182, "fixed-tree": 266, "priced": 266}
"""Of one iteration outside the models, at depth 4 at most: what it takes today. Lower them when you can."""
MOST_WAITS = 3
"""SGLang's sequence lengths, the last outcome, the candidates."""


@pytest.mark.parametrize("policy", MOST_LAUNCHES)
def test_an_iteration(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, read, uploads = Run(policy, overlap=True), [], []
    run.step()
    inner = QueuedCopy.read

    def counted(self: QueuedCopy) -> Any:
        if self._values is None:
            read.append(self)
        return inner(self)

    def uploaded(arrays: Any, device: Any) -> Any:
        uploads.append(sorted(arrays))
        return put(arrays, device)

    monkeypatch.setattr(QueuedCopy, "read", counted)
    for module in (forward, parts):
        monkeypatch.setattr(module, "put", uploaded)
    with model_unwatched(), Watch() as watch:
        run.worker._decode(run.batch(), None)
    assert watch.waits == []
    drafted = run.worker._arriving is not None and run.worker._arriving.proposal.trees.n_nodes > 0
    assert len(read) == 1 + drafted, "the last outcome, and the candidates"
    assert 1 + len(read) <= MOST_WAITS
    assert watch.launches <= MOST_LAUNCHES[policy]
    # A verification; a search's tokens, its requests, and the mask of each number of beams, three at most.
    assert len(uploads) <= 1 + 5 * drafted, uploads
