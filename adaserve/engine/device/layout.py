"""Flat attention inputs on the device, in FlashInfer's layout, without waiting for the device.

What a token sees of its request's KV slots is a bit mask, packed as FlashInfer wants it: row-major q x kv
bits per request, least significant bit first, every request starting on a byte. All but a window at the end
of the keys is seen anyway. Where the window's bits stand is worked out on the host; what they are may be
known to the device alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from adaserve.engine.trees.attention import indptr
from adaserve.engine.trees.batch import TreeBatch


@dataclass(frozen=True)
class Extent:
    """Host-known geometry of one forward, padding rows included."""

    q_lens: np.ndarray  # int64 [R]
    kv_lens: np.ndarray  # int64 [R]

    @cached_property
    def qo_starts(self) -> np.ndarray:
        """int64 [R + 1]"""
        return indptr(self.q_lens)

    @cached_property
    def kv_starts(self) -> np.ndarray:
        """int64 [R + 1]"""
        return indptr(self.kv_lens)

    @cached_property
    def byte_starts(self) -> np.ndarray:
        """int64 [R + 1]: where each request's mask starts."""
        return indptr((self.q_lens * self.kv_lens + 7) // 8)


def window_bits(extent: Extent, width: int) -> tuple[np.ndarray, np.ndarray]:
    """(byte int64, clear uint8) [T, width]: the mask's byte of each window bit, and what clears it.

    Adding 256 - 2^b to a byte in which bit b is set clears that bit. Columns that a request of fewer keys
    lacks get 0, which changes nothing.
    """
    row = np.repeat(np.arange(len(extent.q_lens)), extent.q_lens)
    query = np.arange(len(row)) - extent.qo_starts[row]
    kv = extent.kv_lens[row]
    key = (kv - width)[:, None] + np.arange(width)
    bit = (8 * extent.byte_starts[row] + query * kv)[:, None] + key
    clear = (256 - (1 << (bit % 8))).astype(np.uint8)
    inside = key >= 0
    return np.where(inside, bit // 8, 0), np.where(inside, clear, 0).astype(np.uint8)


def write_mask(mask: Tensor, used: int, byte: Tensor, clear: Tensor, seen: Tensor) -> None:
    """Fills the first ``used`` bytes of ``mask`` (uint8); ``seen`` bool [T, width], the others as above."""
    front = mask[:used]
    front.fill_(255)
    front.index_add_(0, byte.flatten(), torch.where(seen, 0, clear).flatten())


def seen_by(batch: TreeBatch) -> np.ndarray:
    """bool [T, width]: the batch's window, written out where it is causal."""
    if batch.seen is not None:
        return batch.seen
    widest = int(batch.q_lens.max())
    first = np.repeat(np.cumsum(batch.q_lens) - batch.q_lens, batch.q_lens)
    query = np.arange(len(batch)) - first
    last: np.ndarray = widest - np.repeat(batch.q_lens, batch.q_lens) + query
    return np.arange(widest) <= last[:, None]


def unpack(mask: Tensor, byte_start: int, queries: int, keys: int) -> Tensor:
    """bool [queries, keys] of one request: what ``write_mask`` wrote, for the reference kernel."""
    count = queries * keys
    piece = mask[byte_start : byte_start + (count + 7) // 8]
    bits = (piece[:, None].int() >> torch.arange(8, device=mask.device)) & 1
    return bits.flatten()[:count].view(queries, keys).bool()


def unpack_bits(mask: Tensor, used: int, out: Tensor) -> None:
    """Fills the first ``used`` rows of ``out`` (uint8 [capacity, 8]): not 0 where the byte's bit is set."""
    weight = 1 << torch.arange(8, dtype=torch.uint8, device=mask.device)
    torch.bitwise_and(mask[:used, None], weight, out=out[:used])


def gather_slots(
    req_to_token: Tensor,
    pool_rows: Tensor,
    kv_ends: Tensor,
    total: int,
    gap: tuple[int, Tensor] | None = None,
) -> Tensor:
    """int32 [total]: KV slots of each request's leading places, request after request.

    ``pool_rows`` int64 [n]; ``kv_ends`` int64 [n]: where each request's entries end; ``total`` the last end;
    ``gap``: start and lengths int64 [n] of the places that are left out.
    """
    every = torch.arange(total, device=req_to_token.device)
    row = torch.searchsorted(kv_ends, every, right=True)
    starts = torch.nn.functional.pad(kv_ends, (1, 0))
    place = every - starts[row]
    if gap is not None:
        start, length = gap
        place = place + length[row] * (place >= start)
    return req_to_token[pool_rows[row], place].int()
