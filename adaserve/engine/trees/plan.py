"""Which cached tokens each query of a forward may see, in FlashInfer's flat layout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch


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
    # bool or uint8, per request row-major [q_i x kv_i], concatenated; None: causal, where the q_i queries
    # are the last q_i keys.
    custom_mask: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.qo_indptr.numel() != self.kv_indptr.numel():
            raise ValueError("qo_indptr and kv_indptr must describe the same requests")
        for name in ("qo_indptr", "kv_indptr", "kv_indices"):
            tensor = getattr(self, name)
            if tensor.dtype != torch.int32 or not tensor.is_contiguous():
                object.__setattr__(self, name, tensor.to(torch.int32).contiguous())
        mask = self.custom_mask
        if mask is not None and (mask.dtype not in (torch.bool, torch.uint8) or not mask.is_contiguous()):
            object.__setattr__(self, "custom_mask", mask.to(torch.bool).contiguous())

    @property
    def num_requests(self) -> int:
        return self.qo_indptr.numel() - 1

    @cached_property
    def spans(self) -> list[tuple[int, int, int, int]]:
        """Per request: first query, end of queries, first key, end of keys."""
        qo, kv = self.qo_indptr.tolist(), self.kv_indptr.tolist()
        return list(zip(qo[:-1], qo[1:], kv[:-1], kv[1:], strict=True))

    @cached_property
    def masks(self) -> list[torch.Tensor]:
        """Per request the boolean mask [q_i, kv_i]."""
        result, start = [], 0
        for q0, q1, k0, k1 in self.spans:
            q, kv = q1 - q0, k1 - k0
            if self.custom_mask is None:
                result.append(torch.ones(q, kv, dtype=torch.bool).tril_(kv - q))
            else:
                result.append(self.custom_mask[start : start + q * kv].view(q, kv).bool())
                start += q * kv
        return result
