"""Flat attention inputs on the device, in FlashInfer's layout, without waiting for the device.

What a token sees of its request's KV slots is a bit mask, packed as FlashInfer wants it: row-major q x kv
bits per request, least significant bit first, every request starting on a byte. All but a window at the end
of the keys is seen anyway. Where the window's bits stand is worked out on the host; what they are may be
known to the device alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from adaserve.engine.trees.attention import indptr
from adaserve.engine.trees.batch import Gap, TreeBatch


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


_CLEAR = (256 - (1 << np.arange(8))).astype(np.uint8)
"""By bit of a byte: what clears it when it is added."""


def window_bits(extent: Extent, width: int, seen: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(byte int64, clear uint8) [T, width]: the mask's byte of each window bit, and what clears it.

    Adding 256 - 2^b to a byte in which bit b is set clears that bit. Columns that a request of fewer keys
    lacks get 0, which changes nothing, and so do those in ``seen`` (bool [T, width]).
    """
    kv = np.repeat(extent.kv_lens, extent.q_lens)
    start = 8 * extent.byte_starts[:-1] - (extent.qo_starts[:-1] - 1) * extent.kv_lens - width
    first = np.repeat(start, extent.q_lens) + np.arange(len(kv)) * kv
    bit = first[:, None] + np.arange(width)
    byte, clear = bit >> 3, _CLEAR[bit & 7]
    if seen is not None:
        clear[seen] = 0
    if kv.min(initial=width) < width:
        lacks = np.arange(width) < (width - kv)[:, None]
        byte[lacks] = clear[lacks] = 0
    return byte, clear


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
    """bool [queries, keys] of one request: what ``AttentionBuffers`` says, for the reference kernel."""
    count = queries * keys
    piece = mask[byte_start : byte_start + (count + 7) // 8]
    bits = (piece[:, None].int() >> torch.arange(8, device=mask.device)) & 1
    return bits.flatten()[:count].view(queries, keys).bool()


def slot_lists(
    table_width: int, pool_rows: np.ndarray, kv_lens: np.ndarray, gap: Gap | None = None
) -> dict[str, np.ndarray]:
    """Where ``gather_slots`` finds the slots of requests, int64 [n] each; ``table_width``: places in a row
    of the request pool."""
    ends = np.cumsum(kv_lens)
    starts = ends - kv_lens
    lists = {"kv_ends": ends, "kv_shift": pool_rows * table_width - starts}
    if gap is not None:
        lists |= {"gap_at": starts + gap.start, "gap_length": gap.length}
    return lists


def gather_slots(req_to_token: Tensor, lists: Mapping[str, Tensor], out: Tensor) -> None:
    """Fills ``out`` (int32, as long as the last end): KV slots of each request's leading places, request
    after request, those in a gap left out."""
    every = torch.arange(len(out), device=out.device)
    row = torch.searchsorted(lists["kv_ends"], every, right=True)
    at = every + lists["kv_shift"][row]
    if "gap_at" in lists:
        at += lists["gap_length"][row] * (every >= lists["gap_at"][row])
    torch.take(req_to_token, at, out=out)
