"""What SGLang itself asks of a request's grammar is limited in time, as what the worker asks of it is.

Why: a matcher that takes seconds for a token stops everybody's iteration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.identity import is_ours
from adaserve.patches import hook


def register() -> None:
    processor = (
        "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    )
    hook(f"{processor}._accept_grammar_tokens", _accept, HookType.AROUND)


def _accept(original: Callable[..., list[int]], self: Any, req: Any, tokens: Any) -> list[int]:
    from sglang.srt.runtime_context import get_spec

    from adaserve.engine.patience import limited_time

    if not is_ours(get_spec().speculative_algorithm):
        return original(self, req, tokens)
    with limited_time(req):
        return original(self, req, tokens)
