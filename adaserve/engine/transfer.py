"""Values between host and device in one asynchronous copy each way."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from adaserve.engine.cuda_events import record

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


class _Piece(NamedTuple):
    """Where an array stands among packed bytes."""

    name: str
    start: int
    shape: tuple[int, ...]
    kind: np.dtype
    is_bool: bool

    def of(self, packed: Tensor) -> Tensor:
        count = math.prod(self.shape) * self.kind.itemsize
        flat = packed[self.start : self.start + count].view(_TORCH[self.kind]).view(self.shape)
        return flat.bool() if self.is_bool else flat


def _pieces(arrays: Mapping[str, np.ndarray], rows: int = 0) -> tuple[list[_Piece], int]:
    """Where arrays stand, those of fewer than ``rows`` with room for as many; and bytes in all."""
    pieces, end = [], 0
    for name, values in arrays.items():
        kind, shape = values.dtype, values.shape
        if rows > shape[0]:
            shape = (rows, *shape[1:])
        pieces.append(_Piece(name, end, shape, _SIGNED.get(kind, kind), kind.kind == "b"))
        end += -(-math.prod(shape) * kind.itemsize // _ALIGN) * _ALIGN
    return pieces, max(end, _ALIGN)


def _pack(
    arrays: Mapping[str, np.ndarray], pieces: Sequence[_Piece], size: int, device: torch.device
) -> Tensor:
    """All values in pinned memory."""
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = packed.numpy()
    for piece, values in zip(pieces, arrays.values(), strict=True):
        np.ndarray(values.shape, values.dtype, host, piece.start)[...] = values
    return packed


class Uploaded(Mapping[str, Tensor]):
    """Arrays that were packed and copied. Views are made when they are asked for: what is needed while the
    device is busy costs nothing before."""

    def __init__(self, packed: Tensor, pieces: Sequence[_Piece]) -> None:
        self._packed, self._pieces = packed, {piece.name: piece for piece in pieces}
        self._views: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        view = self._views.get(name)
        if view is None:
            view = self._views[name] = self._pieces[name].of(self._packed)
        return view

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


def put(arrays: Mapping[str, np.ndarray], device: torch.device) -> Uploaded:
    """Host arrays on the device: packed, and copied once from pinned memory. uint64 arrives as int64."""
    pieces, size = _pieces(arrays)
    return Uploaded(_pack(arrays, pieces, size, device).to(device, non_blocking=True), pieces)


class StaticArrays:
    """Device memory for arrays of fixed names, types and shapes, which a CUDA graph reads. No bools.

    They are packed in pinned memory that stays as well, since to ask for some takes longer than to fill it.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._places: list[np.ndarray] = []  # of the arrays in pinned memory
        self._views: dict[str, Tensor] = {}
        self._sent: torch.cuda.Event | None = None  # when the last copy was made

    def wait(self) -> None:
        """Returns once the last copy was made: at once, unless nobody has waited for what the graph gave."""
        if self._sent is not None and not self._sent.query():
            self._sent.synchronize()

    def put(self, arrays: Mapping[str, np.ndarray], device: torch.device, rows: int = 0) -> dict[str, Tensor]:
        """As ``put``, always into the same memory, with zeros behind those of fewer than ``rows``."""
        if not self._names:
            self._open(arrays, device, rows)
        else:
            self.wait()
        for name, place, (given, values) in zip(self._names, self._places, arrays.items(), strict=True):
            count, room = len(values), len(place)
            fits = name == given and values.dtype == place.dtype and values.shape[1:] == place.shape[1:]
            fits = fits and count <= room == max(rows, count)
            assert fits, "a graph reads these, so they must stay where they are"
            if count == room:
                place[...] = values
            else:
                place[:count] = values
                place[count:] = 0
        self._there.copy_(self._packed, non_blocking=True)
        if self._sent is not None:
            record(self._sent, self._there.device)
        return self._views

    def _open(self, arrays: Mapping[str, np.ndarray], device: torch.device, rows: int) -> None:
        pieces, size = _pieces(arrays, rows)
        is_cuda = device.type == "cuda"
        self._packed = torch.zeros(size, dtype=torch.uint8, pin_memory=is_cuda)
        self._there = torch.empty(size, dtype=torch.uint8, device=device)
        self._names, self._views = [*arrays], {piece.name: piece.of(self._there) for piece in pieces}
        host = self._packed.numpy()
        self._places = [
            np.ndarray(piece.shape, values.dtype, host, piece.start)
            for piece, values in zip(pieces, arrays.values(), strict=True)
        ]
        self._sent = torch.cuda.Event() if is_cuda else None


class QueuedCopy:
    """Tensors (int64, float64, float16 or bool) on their way to the host, in one transfer."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._pieces: list[tuple[str, slice, tuple[int, ...], torch.dtype]] = []
        end = 0
        parts = [_as_int64(t) for t in tensors.values()]
        for (name, t), part in zip(tensors.items(), parts, strict=True):
            start, end = end, end + len(part)
            self._pieces.append((name, slice(start, end), tuple(t.shape), t.dtype))
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        self._event: torch.cuda.Event | None = None
        self._values: dict[str, np.ndarray] | None = None
        if flat.device.type == "cuda":
            self._host = torch.empty(flat.shape, dtype=torch.int64, pin_memory=True)
            self._host.copy_(flat, non_blocking=True)
            self._event = torch.cuda.Event()
            record(self._event, flat.device)
        else:
            self._host = torch.from_numpy(flat.numpy().copy())  # it may be written to again

    def read(self) -> dict[str, np.ndarray]:
        """The values; waits if the copy has not arrived."""
        if self._values is None:
            if self._event is not None:
                self._event.synchronize()
            self._values = self._unpack(self._host.numpy())
        return self._values

    def _unpack(self, values: np.ndarray) -> dict[str, np.ndarray]:
        out = {}
        for name, where, shape, dtype in self._pieces:
            piece = values[where]
            if dtype == torch.float64:
                piece = piece.view(np.float64)
            elif dtype == torch.float16:
                piece = piece.view(np.float16)[: math.prod(shape)]
            elif dtype == torch.bool:
                piece = piece.astype(np.bool_)
            out[name] = piece.reshape(shape)
        return out


def _as_int64(t: Tensor) -> Tensor:
    if t.dtype == torch.float64:
        return t.contiguous().view(torch.int64).flatten()
    if t.dtype == torch.float16:
        return torch.nn.functional.pad(t.flatten(), (0, -t.numel() % 4)).view(torch.int64)
    if t.dtype not in (torch.int64, torch.bool):
        raise TypeError(f"cannot pack {t.dtype}; use int64, float64, float16 or bool")
    return t.long().flatten()
