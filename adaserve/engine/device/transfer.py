"""Device values for the host: queued now, read an iteration later."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class HostCopy:
    """Copies tensors (int64, float64 or bool) in one transfer that nobody waits for."""

    def __init__(self, **tensors: Tensor) -> None:
        self._shapes = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
        flat = torch.cat([_as_int64(t) for t in tensors.values()])
        self._event: torch.cuda.Event | None = None
        if flat.device.type == "cuda":
            self._host = torch.empty(flat.shape, dtype=torch.int64, pin_memory=True)
            self._host.copy_(flat, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = flat

    def read(self) -> dict[str, np.ndarray]:
        """The values; waits if the copy has not arrived, which it has an iteration later."""
        if self._event is not None:
            self._event.synchronize()
        out, start = {}, 0
        values = self._host.numpy()
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
