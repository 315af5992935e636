"""Triton kernels that SGLang calls without asking the platform, replaced where there is no GPU.

Why: on an out-of-tree CPU platform ``_is_cpu`` is false, so these launch a Triton kernel, for which
a CPU has no driver.
"""

from __future__ import annotations

import torch
from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook


def register() -> None:
    from adaserve.host import select

    if select() is None:
        return
    hook(
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func", assign_req_to_token, HookType.REPLACE
    )


def assign_req_to_token(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """``req_to_token[i, start_i : end_i] = next slots of out_cache_loc`` for every request."""
    begin = 0
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in spans:
        req_to_token[row, start:end] = out_cache_loc[begin : begin + end - start]
        begin += end - start
