"""KV slots that one decode iteration may write.

Why: SGLang reserves twice the largest tree per request and iteration to cover that lengths lag under
its overlap schedule. Our window is the root and the candidates; only under overlap the lag of one
iteration, at most ``max_depth + 1`` tokens, comes on top. The smaller reserve avoids retractions.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.identity import is_ours
from adaserve.patches import hook


def register() -> None:
    hook("sglang.srt.mem_cache.allocation_sizing.get_alloc_reserve_per_decode", _reserve, HookType.AROUND)
    hook(
        "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
        _row_headroom,
        HookType.AROUND,
    )


def _window() -> int | None:
    """Slots for one iteration, None when another speculative algorithm runs."""
    from sglang.srt.runtime_context import get_schedule, get_spec

    spec = get_spec()
    if not is_ours(spec.speculative_algorithm):
        return None
    lag = 0 if get_schedule().disable_overlap_schedule else spec.speculative_num_steps + 1
    return int(spec.speculative_num_draft_tokens + lag)


def _reserve(original: Any) -> int:
    window = _window()
    return original() if window is None else window


def _row_headroom(original: Any) -> int:
    window = _window()
    return original() if window is None else max(original(), window + 4)
