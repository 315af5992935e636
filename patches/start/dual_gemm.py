"""Llama and Qwen 2 models without the package ``cutlass`` (nvidia-cutlass-dsl).

Why: on a CUDA host every MLP of these models asks ``DualGemm`` for a fused gate and up projection, and the
question alone imports ``cutlass``. The kernel exists for Blackwell only and the package is half a gigabyte,
so a host without it should serve with two matrix products, as other GPUs do, instead of failing to build the
model.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook


def register() -> None:
    if find_spec("cutlass") is None:
        hook("sglang.srt.layers.dual_gemm.DualGemm._select_mode", _no_kernel, HookType.REPLACE)


def _no_kernel(self: Any, gate_up_proj: Any, hidden_size: int) -> None:
    """No mode: SGLang's layers then run the two products one after the other."""
