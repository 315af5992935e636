"""Flat attention inputs on the device, in FlashInfer's layout, without waiting for the device.

What a token sees of its request's KV slots is a bit mask, packed as FlashInfer wants it: row-major q x kv
bits per request, least significant bit first, every request starting on a byte. All but a window at the end
of the keys is seen anyway. Where the windows end is worked out on the host; what is hidden in them may be
known to the device alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from adaserve.engine.trees.batch import ContextGap, TreeBatch
from adaserve.engine.trees.verify import SCRATCH_SLOT
from adaserve.scheduler.compiled import INTS, compiled


@dataclass(frozen=True)
class Extent:
    """Host-known geometry of one forward, padding rows included."""

    q_lens: np.ndarray  # int64 [R]
    kv_lens: np.ndarray  # int64 [R]

    @cached_property
    def starts(self) -> np.ndarray:
        """int64 [3, R + 1]: ``qo_starts``, ``kv_starts`` and ``byte_starts``."""
        starts: np.ndarray = _starts(self.q_lens, self.kv_lens)
        return starts

    @property
    def qo_starts(self) -> np.ndarray:
        """int64 [R + 1]"""
        return self.starts[0]

    @property
    def kv_starts(self) -> np.ndarray:
        """int64 [R + 1]"""
        return self.starts[1]

    @property
    def byte_starts(self) -> np.ndarray:
        """int64 [R + 1]: where each request's mask starts."""
        return self.starts[2]

    @property
    def window_ends(self) -> np.ndarray:
        """int64 [T]: the bit of the mask behind each token's window."""
        before = 8 * self.byte_starts[:-1] - self.qo_starts[:-1] * self.kv_lens
        kv_lens = self.kv_lens.repeat(self.q_lens)
        return before.repeat(self.q_lens) + np.arange(1, len(kv_lens) + 1) * kv_lens

    def ends_of(self, q: int) -> np.ndarray:
        """int64 [R, q]: ``window_ends`` where every request has q tokens."""
        return 8 * self.byte_starts[:-1, None] + self.kv_lens[:, None] * np.arange(1, q + 1)


@compiled(INTS, INTS)
def _starts(q_lens: np.ndarray, kv_lens: np.ndarray) -> np.ndarray:
    starts = np.zeros((3, len(q_lens) + 1), np.int64)
    for r in range(len(q_lens)):
        starts[0, r + 1] = starts[0, r] + q_lens[r]
        starts[1, r + 1] = starts[1, r] + kv_lens[r]
        starts[2, r + 1] = starts[2, r] + ((q_lens[r] * kv_lens[r] + 7) >> 3)
    return starts


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


LIST = 5
"""Numbers of each request in ``slot_lists``."""


def slot_lists(extent: Extent, pool_rows: np.ndarray, gap: ContextGap | None = None) -> np.ndarray:
    """int64 [R, LIST], what ``list_slots`` reads: where a request's slots go, how many they are, its row of
    the request pool, where its gap is and how long. Padding behind the requests has a row of -1, and lists
    the scratch slot."""
    lists, n = np.zeros((len(extent.kv_lens), LIST), np.int64), len(pool_rows)
    lists[:, 0], lists[:, 1], lists[:, 2] = extent.kv_starts[:-1], extent.kv_lens, -1
    lists[:n, 2] = pool_rows
    if gap is not None:
        lists[:n, 3], lists[:n, 4] = gap.start, gap.length
    return lists


def list_slots(req_to_token: Tensor, lists: Tensor, out: Tensor) -> None:
    """Fills ``out``, int32: KV slots of each request's leading places, without its gap."""
    if out.is_cuda:
        from adaserve.engine.gpu.attention_layout_kernel import list_fused

        return list_fused(req_to_token, lists, out)
    table, slots = req_to_token.numpy(), out.numpy()
    for start, length, row, gap_at, gap_length in lists.numpy().tolist():
        places = np.arange(length)
        places[gap_at:] += gap_length
        slots[start : start + length] = SCRATCH_SLOT if row < 0 else table[row, places]


def change_tree_mask(mask: Tensor, ends: Tensor, seen: Tensor, shows: bool) -> None:
    """Clears, or ``shows`` again, the bits of what tokens do not see of their windows: all columns that are
    not in ``seen`` bool [R, q, width]. ``ends`` int64 [R, q]: ``Extent.window_ends``; -1 = hides nothing."""
    if mask.is_cuda:
        from adaserve.engine.gpu.attention_layout_kernel import change_fused

        return change_fused(mask.view(torch.int32), ends, seen, shows)
    width = seen.shape[-1]
    hidden = ~seen & (ends >= 0)[..., None]
    at = torch.where(hidden, ends[..., None] + torch.arange(-width, 0), 0)
    weight = torch.where(hidden, 1 << (at & 7), 0)
    mask.index_add_(0, (at >> 3).flatten(), (weight if shows else -weight).flatten().to(torch.uint8))
