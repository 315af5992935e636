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
    """Where the bits of a forward's windows stand. Pieces (requests) in token order:

    ``q_lens``, ``kv_lens`` int64 [n]; ``start`` int64 [T] on the device: first key of each token's window,
    before which it sees every key; ``width`` keys from there on are as told, if its request has so many.
    """

    def __init__(self, q_lens: np.ndarray, kv_lens: np.ndarray, start: Tensor, width: int) -> None:
        device = start.device
        q_starts, byte_starts = starts(q_lens), starts((q_lens * kv_lens + 7) // 8)
        row = np.repeat(np.arange(len(q_lens)), q_lens)
        query = np.arange(len(row)) - q_starts[row]
        first_bit = to_device(8 * byte_starts[row] + query * kv_lens[row], device)
        key = start[:, None] + torch.arange(width, device=device)
        bit = first_bit[:, None] + key
        self.bytes = int(byte_starts[-1])
        self._inside = key < to_device(kv_lens[row], device)[:, None]
        self._byte = torch.div(bit, 8, rounding_mode="floor").clamp(0, max(0, self.bytes - 1)).flatten()
        # Adding 256 - 2^b to a byte in which bit b is set clears it.
        self._clear = (256 - 2 ** (bit % 8)).to(torch.uint8)

    def write(self, mask: Tensor, visible: Tensor) -> None:
        """Fills the front of ``mask`` (uint8): token t sees key ``start[t] + c`` where ``visible[t, c]``."""
        front = mask[: self.bytes]
        front.fill_(255)
        hidden = torch.where(self._inside & ~visible, self._clear, 0)
        front.index_add_(0, self._byte, hidden.flatten())


def unpack(mask: Tensor, byte_start: int, queries: int, keys: int) -> Tensor:
    """bool [queries, keys] of one request: what ``MaskLayout.write`` wrote, for the reference kernel."""
    count = queries * keys
    piece = mask[byte_start : byte_start + (count + 7) // 8]
    bits = (piece[:, None].int() >> torch.arange(8, device=mask.device)) & 1
    return bits.flatten()[:count].view(queries, keys).bool()


def gather_slots(req_to_token: Tensor, pool_rows: Tensor, lengths: np.ndarray) -> Tensor:
    """int32 [sum]: KV slots of the first ``lengths[r]`` positions of every request."""
    pieces = Ragged(lengths, req_to_token.device)
    return req_to_token[pool_rows[pieces.row], pieces.column].int()
