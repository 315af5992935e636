"""An answer that has begun is not turned away.

Why: SGLang puts a request whose KV slots it takes back into the queue again. Where that is full
(``--max-queued-requests``), it answers like to one that has just come: with 503, in the middle of the text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.identity import is_ours
from adaserve.patches import hook


def register() -> None:
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    hook(f"{scheduler}._abort_on_queued_limit", _refused, HookType.AROUND)


def _refused(original: Callable[[Any, Any], bool], self: Any, recv_req: Any) -> bool:
    """Whether a request that is about to be queued is turned away."""
    if recv_req.retraction_count and is_ours(self.spec_algorithm):
        return False
    return original(self, recv_req)
