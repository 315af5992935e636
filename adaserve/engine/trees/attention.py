"""Flat attention inputs of one tree forward, in FlashInfer's layout, for any device."""

from __future__ import annotations

import numpy as np
import torch

from adaserve.engine.trees.plan import TreeAttentionPlan


def indptr(lengths: np.ndarray) -> np.ndarray:
    out = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=out[1:])
    return out


def gather_slots(
    req_to_token: torch.Tensor, pool_indices: torch.Tensor, starts: np.ndarray, lengths: np.ndarray
) -> torch.Tensor:
    """KV slots of positions ``starts[r] : starts[r] + lengths[r]`` of every row, flat, int64."""
    ptr = indptr(lengths)
    if req_to_token.device.type == "cpu":
        table, slots = req_to_token.numpy(), np.empty(ptr[-1], np.int64)
        spans = zip(pool_indices.tolist(), starts.tolist(), ptr.tolist(), lengths.tolist(), strict=False)
        for row, start, at, length in spans:
            slots[at : at + length] = table[row, start : start + length]
        return torch.from_numpy(slots)
    rows = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    columns = torch.from_numpy(np.arange(ptr[-1]) + np.repeat(starts - ptr[:-1], lengths))
    device = req_to_token.device
    return req_to_token[pool_indices[rows.to(device)], columns.to(device)].long()


def causal_plan(kv_slots: torch.Tensor, q_lens: np.ndarray, kv_lens: np.ndarray) -> TreeAttentionPlan:
    """Each row's q tokens are the last ones of its kv entries."""
    return _plan(kv_slots, q_lens, kv_lens, None)


def tree_plan(
    kv_slots: torch.Tensor, q_lens: np.ndarray, kv_lens: np.ndarray, visible: np.ndarray
) -> TreeAttentionPlan:
    """``visible`` bool [T, W]: which window columns (the last W kv entries) each token sees."""
    width = visible.shape[1]
    kv_of_token = np.repeat(kv_lens, q_lens)
    ends = np.cumsum(kv_of_token)
    mask = np.ones(ends[-1] if len(ends) else 0, np.bool_)
    mask[(ends - width)[:, None] + np.arange(width)] = visible
    return _plan(kv_slots, q_lens, kv_lens, torch.from_numpy(mask))


class PlanTemplate:
    """``tree_plan`` for forwards that differ only in what their tokens see: ``beams`` tokens per row."""

    def __init__(self, kv_slots: torch.Tensor, beams: int, kv_lens: np.ndarray, width: int) -> None:
        self.beams = beams
        ends = np.cumsum(np.repeat(kv_lens, beams))
        self._mask = np.ones(ends[-1], np.bool_)
        self._window = (ends - width)[:, None] + np.arange(width)
        device = kv_slots.device
        rows = len(kv_lens)
        self._qo = torch.arange(0, (rows + 1) * beams, beams, dtype=torch.int32, device=device)
        self._kv = torch.from_numpy(indptr(kv_lens).astype(np.int32)).to(device)
        self._slots = kv_slots.to(torch.int32)

    def plan(self, visible: np.ndarray) -> TreeAttentionPlan:
        """``visible`` bool [rows * beams, width]. The mask is valid until the next call."""
        self._mask[self._window] = visible
        mask = torch.from_numpy(self._mask).to(self._slots.device)
        return TreeAttentionPlan(self._qo, self._kv, self._slots, mask)


def _plan(
    kv_slots: torch.Tensor, q_lens: np.ndarray, kv_lens: np.ndarray, mask: torch.Tensor | None
) -> TreeAttentionPlan:
    device = kv_slots.device
    return TreeAttentionPlan(
        qo_indptr=torch.from_numpy(indptr(q_lens).astype(np.int32)).to(device),
        kv_indptr=torch.from_numpy(indptr(kv_lens).astype(np.int32)).to(device),
        kv_indices=kv_slots.to(torch.int32),
        custom_mask=None if mask is None else mask.to(device),
    )
