"""What SGLang does for GPUs without asking the platform, replaced where there is none.

Why: on an out-of-tree CPU platform ``_is_cpu`` is false, so SGLang launches Triton kernels, for which a CPU
has no driver: one for every model, one for the shared expert of Qwen 2 models with experts, and one for
models that cap their logits, as Gemma 2 does. And it names the copy of each result to the host for profiles
of a GPU's streams. Here nothing is copied, but the name alone took 0.1 ms of every iteration.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType

from adaserve.host.device import on_cpu
from adaserve.patches import hook


def register() -> None:
    if not on_cpu():
        return
    hook(
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func", assign_req_to_token, HookType.REPLACE
    )
    hook(
        "sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add",
        add_gated_expert,
        HookType.REPLACE,
    )
    capping = "sglang.kernels.ops.activation.softcap.softcap_inplace_logits"
    hook(capping, cap_logits, HookType.REPLACE)
    copy = "sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu"
    hook(copy, _without_name, HookType.AROUND, always=True)


def _without_name(copy: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Calls what is inside the decorator that names it."""
    inspect.unwrap(copy)(*args, **kwargs)


def assign_req_to_token(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """``req_to_token[i, start_i : end_i] = next slots of out_cache_loc`` for every request."""
    table, slots, begin = req_to_token.numpy(), out_cache_loc.numpy(), 0
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in spans:
        table[row, start:end] = slots[begin : begin + end - start]
        begin += end - start


def add_gated_expert(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    final_hidden_states: torch.Tensor,
) -> None:
    """``final_hidden_states += sigmoid(hidden_states @ gate_weight) * shared_output``, in fp32 as in the
    kernel."""
    gate = torch.sigmoid(hidden_states.float() @ gate_weight.float())
    final_hidden_states.copy_(final_hidden_states.float() + gate[:, None] * shared_output.float())


def cap_logits(full_logits: torch.Tensor, final_logit_softcapping: float) -> torch.Tensor:
    """``full_logits``, changed in place."""
    return full_logits.div_(final_logit_softcapping).tanh_().mul_(final_logit_softcapping)
