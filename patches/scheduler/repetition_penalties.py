"""A prompt whose request has a repetition penalty waits for no compiler.

Why: SGLang leaves the three operators of this penalty to torch.compile. On a GPU the first such request, and
the first prefill with two of them, would start a compiler in the scheduler's loop, where everybody waits.
Only prompts are concerned: candidates have their own penalties (``engine.penalties``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from sglang.srt.plugins.hook_registry import HookType
from torch import Tensor

from adaserve.patches import hook


def register() -> None:
    target = "sglang.srt.sampling.penaltylib.repetition_penalty.apply_scaling_penalties"
    hook(target, operator_by_operator, HookType.AROUND)


def operator_by_operator(compiled: Callable[[Tensor, Tensor], None], logits: Tensor, factors: Tensor) -> None:
    """What ``compiled`` was made of; in place."""
    inspect.unwrap(compiled)(logits, factors)
