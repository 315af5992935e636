"""Puts the lean forward under a model that SGLang has loaded, so that every path uses it."""

from __future__ import annotations

import logging
from typing import Any

import torch

from adaserve.cpu.forward import LeanModel
from adaserve.cpu.linear import Storage

logger = logging.getLogger(__name__)

LEAN_ATTRIBUTE = "adaserve_lean"


def install(model: Any, storage: Storage) -> bool:
    """Replaces the decoder stack's forward; False, with a logged reason, where the model isn't covered."""
    from adaserve.cpu.forward import supports

    reason = supports(model)
    if reason is not None:
        logger.warning("AdaServe: SGLang's own CPU forward is used, which is slower: %s", reason)
        return False
    lean = LeanModel.from_sglang(model, storage)
    object.__setattr__(model, LEAN_ATTRIBUTE, lean)

    def forward(
        input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any, *_: Any, **__: Any
    ) -> torch.Tensor:
        from sglang.srt.model_executor.forward_context import get_attn_backend, get_token_to_kv_pool

        pool = get_token_to_kv_pool()
        plan = get_attn_backend().plan
        return lean.forward(
            input_ids, positions, forward_batch.out_cache_loc, pool.k_buffer, pool.v_buffer, plan
        )

    model.model.forward = forward
    return True
