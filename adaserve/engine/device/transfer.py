"""Values between host and device in one asynchronous copy each way."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

_ALIGN = 8

_SIGNED: dict[np.dtype, np.dtype] = {
    np.dtype(np.uint64): np.dtype(np.int64),
    np.dtype(np.bool_): np.dtype(np.uint8),
}
"""Types that are copied as others of the same size."""

_TORCH = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.uint8): torch.uint8,
}


def put(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Host arrays on the device: packed, and copied once from pinned memory. uint64 arrives as int64."""
    pieces, end = [], 0
    for name, values in arrays.items():
        kind = _SIGNED.get(values.dtype, values.dtype)
        pieces.append((name, np.ascontiguousarray(values).view(kind), end, values.dtype == np.bool_))
        end += -(-values.nbytes // _ALIGN) * _ALIGN
    packed = torch.empty(max(end, _ALIGN), dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = packed.numpy()
    for _, values, at, _ in pieces:
        host[at : at + values.nbytes] = values.reshape(-1).view(np.uint8)
    there = packed.to(device, non_blocking=True)
    out = {}
    for name, values, at, is_bool in pieces:
        flat = there[at : at + values.nbytes].view(_TORCH[values.dtype]).view(values.shape)
        out[name] = flat.bool() if is_bool else flat
    return out


class QueuedCopy:
    """Tensors (int64, float64 or bool) on their way to the host, in one transfer."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._shapes = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
        flat = torch.cat([_as_int64(t) for t in tensors.values()])
        self._event: torch.cuda.Event | None = None
        self._values: dict[str, np.ndarray] | None = None
        if flat.device.type == "cuda":
            self._host = torch.empty(flat.shape, dtype=torch.int64, pin_memory=True)
            self._host.copy_(flat, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = flat

    def read(self) -> dict[str, np.ndarray]:
        """The values; waits if the copy has not arrived."""
        if self._values is None:
            if self._event is not None:
                self._event.synchronize()
            self._values = self._unpack(self._host.numpy())
        return self._values

    def _unpack(self, values: np.ndarray) -> dict[str, np.ndarray]:
        out, start = {}, 0
        for name, (shape, dtype) in self._shapes.items():
            count = int(np.prod(shape))
            piece = values[start : start + count]
            start += count
            if dtype == torch.float64:
                piece = piece.view(np.float64)
            elif dtype == torch.bool:
                piece = piece.astype(np.bool_)
            out[name] = piece.reshape(shape)
        return out


def _as_int64(t: Tensor) -> Tensor:
    if t.dtype == torch.float64:
        return t.contiguous().view(torch.int64).flatten()
    if t.dtype not in (torch.int64, torch.bool):
        raise TypeError(f"cannot pack {t.dtype}; use int64, float64 or bool")
    return t.long().flatten()
