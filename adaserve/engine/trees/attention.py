"""A tree batch in the flat attention layout of FlashInfer, on a host: slots, and what each token sees."""

from __future__ import annotations

import numpy as np
import torch

from adaserve.engine.trees.batch import Gap, TreeBatch
from adaserve.engine.trees.plan import TreeAttentionPlan


def indptr(lengths: np.ndarray) -> np.ndarray:
    """int64 [n + 1]: where each of the consecutive pieces starts, and the end."""
    out = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=out[1:])
    return out


def gather_slots(
    req_to_token: torch.Tensor, pool_rows: np.ndarray, lengths: np.ndarray, gap: Gap | None = None
) -> np.ndarray:
    """int32 [sum]: KV slots of the first ``lengths[r]`` places of every request that are not in its gap."""
    ptr, table = indptr(lengths), req_to_token.numpy()
    slots = np.empty(ptr[-1], np.int32)
    for row, at, length in zip(pool_rows.tolist(), ptr.tolist(), lengths.tolist(), strict=False):
        slots[at : at + length] = table[row, :length]
    if gap is not None:
        for r in np.flatnonzero(gap.length).tolist():
            rest = lengths[r] - gap.start
            resumed = gap.start + gap.length[r]
            slots[ptr[r + 1] - rest : ptr[r + 1]] = table[pool_rows[r], resumed : resumed + rest]
    return slots


def token_slots(req_to_token: torch.Tensor, batch: TreeBatch, back: int = 0) -> torch.Tensor:
    """int64 [T]: the KV slot that each token writes, or that of the place so far before its own."""
    slots = req_to_token.numpy()[batch.pool_rows[batch.row], batch.places - back]
    return torch.from_numpy(slots.astype(np.int64))


def attention_plan(
    req_to_token: torch.Tensor, batch: TreeBatch, kv_slots: np.ndarray | None = None
) -> TreeAttentionPlan:
    """``kv_slots``: the batch's ``gather_slots``, where the caller has them already."""
    if kv_slots is None:
        kv_slots = gather_slots(req_to_token, batch.pool_rows, batch.kv_lens, batch.gap)
    mask = None if batch.seen is None else window_mask(batch.q_lens, batch.kv_lens, batch.seen)
    return TreeAttentionPlan(
        qo_indptr=torch.from_numpy(indptr(batch.q_lens).astype(np.int32)),
        kv_indptr=torch.from_numpy(indptr(batch.kv_lens).astype(np.int32)),
        kv_indices=torch.from_numpy(kv_slots),
        custom_mask=None if mask is None else torch.from_numpy(mask),
    )


def window_mask(q_lens: np.ndarray, kv_lens: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """bool [sum of q x kv], row-major per request: everything but what ``seen`` hides in the windows."""
    ends = np.cumsum(np.repeat(kv_lens, q_lens))
    mask = np.ones(ends[-1] if len(ends) else 0, np.bool_)
    mask[(ends - seen.shape[1])[:, None] + np.arange(seen.shape[1])] = seen
    return mask


def causal_plan(kv_slots: torch.Tensor, q_lens: np.ndarray, kv_lens: np.ndarray) -> TreeAttentionPlan:
    """For slots that are in no request's list: each row's q tokens are the last ones of its kv entries."""
    return TreeAttentionPlan(
        qo_indptr=torch.from_numpy(indptr(q_lens).astype(np.int32)),
        kv_indptr=torch.from_numpy(indptr(kv_lens).astype(np.int32)),
        kv_indices=kv_slots.to(torch.int32),
    )
