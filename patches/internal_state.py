"""The scheduler's SLO statistics in ``/server_info`` and for the live page; changing policy and prefills.

Why: statistics are counted in the scheduler process, pages are served by the HTTP process; SGLang's
internal-state request is its way from one to the other, one entry per data-parallel rank.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.config import PREFILLS
from adaserve.patches import hook
from adaserve.patches.served_worker import worker_of

POLICY_KEY = "adaserve_policy="
PREFILL_KEY = "adaserve_prefill="
DRAFT_KEY = "adaserve_draft="
DRAFTS = ("first", "held", "present")
NUMBER_KEY = "adaserve_next_request"


def register() -> None:
    controller = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
    hook(f"{controller}._add_speculative", _add_adaserve, HookType.AFTER)
    hook(f"{controller}._update_handlers", _handlers, HookType.AFTER)


def _add_adaserve(_: None, self: Any, state: dict[str, Any]) -> None:
    if (worker := worker_of(self.scheduler)) is not None:
        state["adaserve"] = worker.report()


def _handlers(_: dict[str, Any], self: Any) -> dict[str, Any] | None:
    """``POST /set_internal_state {"server_args": {"adaserve_policy=NAME": 1}}`` changes the policy.

    Where a draft learns, ``adaserve_draft=first`` serves the first one, ``=present`` the learned one, and
    ``=held`` that one without learning. ``adaserve_next_request`` is the number of the next request: as draws
    depend on it, the same requests in the same order get the same texts again.
    Likewise ``adaserve_prefill=slack``, ``=exclusive`` or ``=default`` (by the policy). The name stands in
    the key because SGLang accepts numbers only as values. SGLang's own settings are refused: they belong to
    algorithms and pipelines that do not run here, and some take NaN.
    """
    from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected, _UpdateHandler

    worker = worker_of(self.scheduler)
    if worker is None:
        return None

    def change(key: str, _: Any) -> None:
        worker.policies.choose(key.removeprefix(POLICY_KEY))

    def check_mode(key: str, _: Any) -> None:
        try:
            worker.prefill.check_mode(_mode(key))
        except ValueError as error:
            raise UpdateRejected(str(error)) from error

    def pace(key: str, _: Any) -> None:
        worker.prefill.set_mode(_mode(key))

    def check_draft(key: str, _: Any) -> None:
        if worker.learner is None:
            raise UpdateRejected("no draft learns here: start the server with --learn")

    def check_number(_: str, value: Any) -> None:
        if value != int(value) or value < 0:
            raise UpdateRejected(f"{NUMBER_KEY} is {value}: it should be a whole number from 0 on")

    def change_draft(key: str, _: Any) -> None:
        assert worker.learner is not None
        worker.learner.serve(key.removeprefix(DRAFT_KEY))

    drafts = {DRAFT_KEY + name: _UpdateHandler(check_draft, change_draft) for name in DRAFTS}
    ours = {POLICY_KEY + name: _UpdateHandler(lambda *_: None, change) for name in worker.policies.names}
    modes = {PREFILL_KEY + m: _UpdateHandler(check_mode, pace) for m in (*PREFILLS, "default")}
    number = _UpdateHandler(check_number, lambda _, value: worker.number_requests(int(value)))
    return {**ours, **modes, **drafts, NUMBER_KEY: number}


def _mode(key: str) -> str | None:
    mode = key.removeprefix(PREFILL_KEY)
    return mode if mode in PREFILLS else None
