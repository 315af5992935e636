"""Flat attention inputs on the device, in FlashInfer's layout, without waiting for the device.

One list of KV slots per request serves every forward of an iteration: its cached prefix, then its window
(root and candidates, written or not). What a token sees of it is a bit mask, packed as FlashInfer wants it:
row-major q x kv bits per request, least significant bit first, every request starting on a byte.
Lengths are known to the host; slots, masks and tokens are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

SCRATCH_SLOT = 0
"""SGLang's KV pools keep slot 0 free for what padded tokens write."""


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """A host array on the device; the copy to a GPU is queued, not waited for."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def starts(lengths: np.ndarray) -> np.ndarray:
    """int64 [n + 1]: where each of the consecutive pieces starts, and the end."""
    out = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=out[1:])
    return out


@dataclass(frozen=True)
class Ragged:
    """Pieces of lengths known to the host, laid out one after the other on the device."""

    lengths: np.ndarray  # int64 [n]
    device: torch.device

    @cached_property
    def starts(self) -> np.ndarray:
        return starts(self.lengths)

    @property
    def total(self) -> int:
        return int(self.starts[-1])

    @cached_property
    def row(self) -> Tensor:
        """int64 [total]: piece of every entry."""
        return to_device(np.repeat(np.arange(len(self.lengths)), self.lengths), self.device)

    @cached_property
    def starts_of(self) -> Tensor:
        """int64 [n] on the device."""
        return to_device(self.starts[:-1], self.device)

    @cached_property
    def column(self) -> Tensor:
        """int64 [total]: place of every entry inside its piece."""
        return torch.arange(self.total, device=self.device) - self.starts_of[self.row]


class MaskLayout:
    """Where the bit of (token, key) stands. ``q_lens``, ``kv_lens`` int64 [n], pieces in token order."""

    def __init__(self, q_lens: np.ndarray, kv_lens: np.ndarray, device: torch.device) -> None:
        bits = q_lens * kv_lens
        pieces = Ragged((bits + 7) // 8, device)
        self.byte_starts = pieces.starts  # int64 [n + 1]
        row = pieces.row
        bit = pieces.column[:, None] * 8 + torch.arange(8, device=device)
        keys = to_device(np.maximum(kv_lens, 1), device)[row][:, None]
        first_token = to_device(starts(q_lens)[:-1], device)[row][:, None]
        query = torch.div(bit, keys, rounding_mode="floor")
        # Bits that fill up the last byte belong to no token; whose limit they are compared with is the same.
        self._inside = bit < to_device(bits, device)[row][:, None]
        self._token = (first_token + query).clamp(max=max(0, int(q_lens.sum()) - 1))
        self._key = bit - query * keys
        self._weights = 2 ** torch.arange(8, device=device)

    def pack(self, limit: Tensor, window: Tensor, visible: Tensor) -> Tensor:
        """uint8 [bytes]. Token t sees keys below ``limit[t]``, and key ``window[t] + c`` where
        ``visible[t, c]``; int64 [T], int64 [T], bool [T, W]."""
        width = visible.shape[1]
        column = self._key - window[self._token]
        inside = (column >= 0) & (column < width)
        at = self._token * width + column.clamp(0, max(0, width - 1))
        seen = (self._key < limit[self._token]) | (inside & visible.flatten()[at])
        return ((seen & self._inside) * self._weights).sum(dim=1).to(torch.uint8)


def unpack(mask: Tensor, byte_start: int, queries: int, keys: int) -> Tensor:
    """bool [queries, keys] of one request: the inverse of ``MaskLayout.pack``, for the reference kernel."""
    count = queries * keys
    piece = mask[byte_start : byte_start + (count + 7) // 8]
    bits = (piece[:, None].int() >> torch.arange(8, device=mask.device)) & 1
    return bits.flatten()[:count].view(queries, keys).bool()


def gather_slots(req_to_token: Tensor, pool_rows: Tensor, lengths: np.ndarray) -> Tensor:
    """int32 [sum]: KV slots of the first ``lengths[r]`` positions of every request."""
    pieces = Ragged(lengths, req_to_token.device)
    return req_to_token[pool_rows[pieces.row], pieces.column].int()
