"""A custom logit processor that fails ends its request, in prefills too.

Why: SGLang's sampler draws the first token of a request and calls the client's code there. What that raises
would end the scheduler (``adaserve/engine/processors.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType
from torch import Tensor

from adaserve.identity import is_ours
from adaserve.patches import hook


def register() -> None:
    hook("sglang.srt.layers.sampler.apply_custom_logit_processor", _apply, HookType.AROUND)


def _apply(original: Callable[..., None], logits: Tensor, info: Any, *rest: Any, **more: Any) -> None:
    from sglang.srt.runtime_context import get_spec

    from adaserve.engine.processors import apply_processors

    if is_ours(get_spec().speculative_algorithm):
        apply_processors(logits, info)
    else:
        original(logits, info, *rest, **more)
