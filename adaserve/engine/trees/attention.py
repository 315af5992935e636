"""Attention of a tree batch in FlashInfer's flat layout: slots, what each token sees, a reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from adaserve.engine.trees.batch import ContextGap, TreeBatch


@dataclass(frozen=True)
class TreeAttentionPlan:
    """Ragged attention of one forward; built once, used by every layer.

    The tokens of the forward are the queries, request after request. A request's keys are pool slots in an
    order of the caller's choice: usually the prefix, then the tokens of this forward (whose K/V is written
    before anyone attends).
    """

    qo_indptr: torch.Tensor  # int32 [n + 1], queries of request i are [qo_indptr[i], qo_indptr[i + 1])
    kv_indptr: torch.Tensor  # int32 [n + 1], its keys are kv_indices[kv_indptr[i] : kv_indptr[i + 1]]
    kv_indices: torch.Tensor  # int32 [sum kv], pool slots
    # bool, per request row-major [q_i x kv_i], concatenated, of all requests but the last ``texts``, which
    # are causal: their q_i queries are the last q_i keys. None: all are causal.
    custom_mask: torch.Tensor | None = None
    texts: int = 0
    # int64 [T], places of the queries in their texts; needed where a layer has a sliding window.
    positions: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.qo_indptr.numel() != self.kv_indptr.numel():
            raise ValueError("qo_indptr and kv_indptr must describe the same requests")
        for name in ("qo_indptr", "kv_indptr", "kv_indices"):
            tensor = getattr(self, name)
            if tensor.dtype != torch.int32 or not tensor.is_contiguous():
                object.__setattr__(self, name, tensor.to(torch.int32).contiguous())
        mask = self.custom_mask
        if mask is not None and (mask.dtype != torch.bool or not mask.is_contiguous()):
            object.__setattr__(self, "custom_mask", mask.to(torch.bool).contiguous())

    @property
    def num_requests(self) -> int:
        return self.qo_indptr.numel() - 1

    @property
    def masked(self) -> int:
        """The first so many requests have a mask."""
        return 0 if self.custom_mask is None else self.num_requests - self.texts

    def beside(self, texts: TreeAttentionPlan) -> TreeAttentionPlan:
        """That of one forward of this one's requests and of ``texts``, which are causal."""
        assert texts.custom_mask is None

        def joined(name: str) -> torch.Tensor:
            mine, others = getattr(self, name), getattr(texts, name)
            return torch.cat((mine, others[1:] + mine[-1]))

        positions = None
        if self.positions is not None and texts.positions is not None:
            positions = torch.cat((self.positions, texts.positions))
        return TreeAttentionPlan(
            joined("qo_indptr"),
            joined("kv_indptr"),
            torch.cat((self.kv_indices, texts.kv_indices)),
            self.custom_mask,
            self.texts + texts.num_requests,
            positions,
        )

    @cached_property
    def spans(self) -> list[tuple[int, int, int, int]]:
        """Per request: first query, end of queries, first key, end of keys."""
        qo, kv = self.qo_indptr.tolist(), self.kv_indptr.tolist()
        return list(zip(qo[:-1], qo[1:], kv[:-1], kv[1:], strict=True))

    @cached_property
    def masks(self) -> list[torch.Tensor]:
        """Per request the boolean mask [q_i, kv_i]."""
        result, start = [], 0
        for i, (q0, q1, k0, k1) in enumerate(self.spans):
            q, kv = q1 - q0, k1 - k0
            if i >= self.masked or self.custom_mask is None:
                result.append(torch.ones(q, kv, dtype=torch.bool).tril_(kv - q))
            else:
                result.append(self.custom_mask[start : start + q * kv].view(q, kv))
                start += q * kv
        return result


@dataclass(frozen=True)
class Scores:
    """What a layer makes of the products of queries and keys."""

    scaling: float
    window: int = 0
    """A token sees itself and so many before it (sliding windows: Gemma 2, section 2); 0 = all of them."""
    cap: float = 0.0
    """A scaled product s becomes cap x tanh(s / cap) (soft capping: Gemma 2, section 2); 0 = it stays."""
    sinks: torch.Tensor | None = None
    """[heads]: a score of each head that takes its share of every softmax and has no key (attention sinks:
    Xiao et al. 2024, section 3.3; GPT-OSS)."""

    @staticmethod
    def of(layer: Any, sinks: torch.Tensor | None = None) -> Scores:
        """Of SGLang's ``RadixAttention``, to which windows of -1 are none, and what it is called with."""
        return Scores(layer.scaling, max(0, layer.sliding_window_size), float(layer.logit_cap), sinks)

    def times(self, scale: float) -> Scores:
        """Those of keys that are kept divided by ``scale``."""
        return self if scale == 1 else replace(self, scaling=self.scaling * scale)

    @property
    def are_plain(self) -> bool:
        """Whether a mask and the scaling say all."""
        return self.window == 0 and self.cap == 0 and self.sinks is None


def indptr(lengths: np.ndarray) -> np.ndarray:
    """int64 [n + 1]: where each of the consecutive pieces starts, and the end."""
    out = np.zeros(len(lengths) + 1, np.int64)
    lengths.cumsum(out=out[1:])
    return out


def gather_slots(
    req_to_token: torch.Tensor, pool_rows: np.ndarray, lengths: np.ndarray, gap: ContextGap | None = None
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
    mask = None if batch.seen is None else tree_mask(batch.q_lens, batch.kv_lens, batch.seen)
    return TreeAttentionPlan(
        qo_indptr=torch.from_numpy(indptr(batch.q_lens).astype(np.int32)),
        kv_indptr=torch.from_numpy(indptr(batch.kv_lens).astype(np.int32)),
        kv_indices=torch.from_numpy(kv_slots),
        custom_mask=None if mask is None else torch.from_numpy(mask),
        positions=torch.from_numpy(batch.positions),
    )


def verification_plan(req_to_token: torch.Tensor, batch: TreeBatch) -> TreeAttentionPlan:
    """``attention_plan`` of tokens that see nothing of their windows but each other. There they stand in
    their own order, parents first. By its column a node may stand before its parent, so that its sums would
    be added up in another order than where its path is decoded, and have other bits."""
    kv_slots, seen = gather_slots(req_to_token, batch.pool_rows, batch.kv_lens, batch.gap), batch.seen
    if seen is not None and batch.gap is None:
        width, row = seen.shape[1], batch.row
        query = np.arange(len(batch)) - (batch.q_lens.cumsum() - batch.q_lens)[row]
        column = batch.places - batch.kv_lens[row] + width
        if (column != query).any():
            place = np.full((len(batch.q_lens), width), width)
            place[row, column] = query
            order = place.argsort(axis=1, kind="stable")
            windows = batch.kv_lens.cumsum()[:, None] - width
            kv_slots[windows + np.arange(width)] = kv_slots[windows + order]
            batch = replace(batch, seen=np.take_along_axis(seen, order[row], axis=1))
    return attention_plan(req_to_token, batch, kv_slots)


def tree_mask(q_lens: np.ndarray, kv_lens: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """bool [sum of q x kv], row-major per request: everything but what ``seen`` hides in the windows."""
    ends = np.cumsum(np.repeat(kv_lens, q_lens))
    mask = np.ones(ends[-1] if len(ends) else 0, np.bool_)
    mask[(ends - seen.shape[1])[:, None] + np.arange(seen.shape[1])] = seen
    return mask


def causal_plan(kv_slots: torch.Tensor, q_lens: np.ndarray, kv_lens: np.ndarray) -> TreeAttentionPlan:
    """Each row's q tokens are the last ones of its keys, which stand at ``kv_slots``, row after row."""
    before = kv_lens - q_lens.cumsum()  # first positions, less the places of first queries
    return TreeAttentionPlan(
        qo_indptr=torch.from_numpy(indptr(q_lens).astype(np.int32)),
        kv_indptr=torch.from_numpy(indptr(kv_lens).astype(np.int32)),
        kv_indices=kv_slots,
        positions=torch.from_numpy(before.repeat(q_lens) + np.arange(q_lens.sum())),
    )


def attend(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    plan: TreeAttentionPlan,
    scores: Scores,
) -> torch.Tensor:
    """q [T, heads, D] against each request's slots -> [T, heads * D]; a query that sees nothing gives 0.

    Where ``scores`` have a window, keys stand at their positions, all but candidates, of which those that the
    mask shows are near enough: windows are longer than trees are deep.
    """
    out = torch.zeros_like(q)
    for (q0, q1, k0, k1), shown in zip(plan.spans, plan.masks, strict=True):
        if q0 == q1 or k0 == k1:
            continue
        first, mask = 0, shown
        if scores.window:
            assert plan.positions is not None
            oldest = plan.positions[q0:q1, None] - scores.window
            first = max(0, int(oldest.min()))  # of the keys that any of them sees
            mask = shown[:, first:] & (torch.arange(first, k1 - k0, device=q.device) >= oldest)
        slots = plan.kv_indices[k0 + first : k1]
        keys = k_buffer[slots].float().transpose(0, 1).unsqueeze(0)
        values = v_buffer[slots].float().transpose(0, 1).unsqueeze(0)
        queries = q[q0:q1].transpose(0, 1).unsqueeze(0)
        if plan.custom_mask is not None:  # hidden slots may hold anything, and 0 x NaN is NaN
            for part in (keys, values):
                part.nan_to_num_(0.0, 0.0, 0.0)
        # One decoding query of a causal plan sees everything: a mask would only cost time.
        seen = None if plan.custom_mask is None and q1 - q0 == 1 else mask
        if scores.cap or scores.sinks is not None:
            heads = _attend_by_hand(queries, keys, values, seen, scores)
        else:
            heads = functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=seen, scale=scores.scaling, enable_gqa=True
            )
        out[q0:q1] = heads[0].transpose(0, 1)
        if plan.custom_mask is not None:
            out[q0:q1].masked_fill_(~mask.any(dim=-1)[:, None, None], 0.0)
    return out.flatten(1)


def _attend_by_hand(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor | None, scores: Scores
) -> torch.Tensor:
    """``scaled_dot_product_attention`` of [1, heads, n, D], which has neither caps nor sinks."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (part.repeat_interleave(group, dim=1) for part in (keys, values))
    product = q @ keys.transpose(-2, -1) * scores.scaling
    if scores.cap:
        product = scores.cap * torch.tanh(product / scores.cap)
    if seen is not None:
        product.masked_fill_(~seen, -torch.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.float().view(1, -1, 1, 1).expand(*product.shape[:3], 1)
        return torch.cat((product, sinks), dim=-1).softmax(dim=-1)[..., :-1] @ values
    return product.softmax(dim=-1) @ values
