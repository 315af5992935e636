"""The scheduler's SLO statistics in ``/server_info`` and for the live page.

Why: statistics are counted in the scheduler process, pages are served by the HTTP process; SGLang's
internal-state request is its way from one to the other, one entry per data-parallel rank.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook


def register() -> None:
    controller = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
    hook(f"{controller}._add_speculative", _add_adaserve, HookType.AFTER)


def _add_adaserve(_: None, self: Any, state: dict[str, Any]) -> None:
    from adaserve.algorithm import AdaServeAlgorithm

    scheduler = self.scheduler
    if isinstance(scheduler.spec_algorithm, AdaServeAlgorithm):
        state["adaserve"] = scheduler.draft_worker.report()
