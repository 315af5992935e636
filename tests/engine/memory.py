"""What a piece of code takes of a device's memory, counted on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MostBytes(TorchDispatchMode):
    """``most``: bytes of new tensors that were alive at the same time. What an operator takes for itself, as
    sorting does on a GPU, is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_place(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and _place(t) not in given:
                storage = t.untyped_storage()
                self._alive[_place(t)] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {at: kept for at, kept in self._alive.items() if not kept[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._alive.values()))
        return out


def _place(t: torch.Tensor) -> int:
    return t.untyped_storage().data_ptr()
