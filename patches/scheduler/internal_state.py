"""The scheduler's SLO statistics in ``/server_info`` and for the live page; changing policy and prefills.

Why: statistics are counted in the scheduler process, pages are served by the HTTP process; SGLang's
internal-state request is its way from one to the other, one entry per data-parallel rank. What a scheduler
refuses SGLang answers with ``[false]``, and the reason is in its log alone. Here the client gets it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.boundary import RequestError
from adaserve.checked import shown
from adaserve.config import PREFILLS
from adaserve.patches import hook
from adaserve.patches.scheduler.worker_interface import WorkerInterface, load_of, worker_of

MODES: dict[str, str | None] = {**{name: name for name in PREFILLS}, "default": None}
DRAFTS = ("first", "held", "present")
MAX_MS = 1e6
"""As of --baseline-ms."""
MAX_NUMBER = 1 << 53
"""Above it a number in JSON may be another one than was meant."""
KNOWN = (
    f"adaserve_policy=NAME, adaserve_prefill={'|'.join(MODES)}, adaserve_draft={'|'.join(DRAFTS)}, "
    "adaserve_baseline_ms and adaserve_next_request"
)


def register() -> None:
    controller = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
    hook(f"{controller}._add_speculative", _add_adaserve, HookType.AFTER)
    hook(f"{controller}.set_internal_state", _change, HookType.AROUND)
    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    hook(f"{manager}.set_internal_state", _told, HookType.AROUND)


def _add_adaserve(_: None, self: Any, state: dict[str, Any]) -> None:
    worker, load = worker_of(self.scheduler), load_of(self.scheduler)
    kv_use = self.scheduler.pool_stats_observer.get_pool_stats().get_max_pool_usage()
    queue = len(load.waiting) + (load.started is not None)
    worker.ledger.stats.load(len(load.running), queue, kv_use)
    state["adaserve"] = worker.report()


def _change(_: Callable[[Any, Any], Any], self: Any, recv_req: Any) -> Any:
    """``POST /set_internal_state {"server_args": {"adaserve_policy=NAME": 1}}``: all of it, or nothing.

    SGLang's own settings are refused: they belong to algorithms and pipelines that do not run here, and some
    take NaN. The reason travels as the output's ``rid``, which nothing else uses.
    """
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    worker = worker_of(self.scheduler)
    try:
        changes = [change_of(worker, key, value) for key, value in recv_req.server_args.items()]
    except ValueError as error:
        return SetInternalStateReqOutput(updated=False, rid=str(error))
    for change in changes:
        change()
    return SetInternalStateReqOutput(updated=True)


def change_of(worker: WorkerInterface, key: str, value: float) -> Callable[[], object]:
    """What a setting changes. A name stands in the key because SGLang accepts only numbers as values. Raises
    ValueError.

    Where a draft learns, ``adaserve_draft=first`` serves the first one, ``=present`` the learned one, and
    ``=held`` that one without learning. ``adaserve_next_request`` is the number of the next request: as draws
    depend on it, the same requests in the same order get the same texts again.
    ``adaserve_prefill=default`` goes by the policy. ``adaserve_baseline_ms`` fixes the baseline, as the flag
    does.
    """
    setting, _, name = key.partition("=")
    if setting == "adaserve_policy":
        worker.policies.get(name)
        return partial(worker.policies.choose, name)
    if setting == "adaserve_prefill" and name in MODES:
        return partial(worker.prefill.set_mode, MODES[name])
    if setting == "adaserve_draft" and name in DRAFTS:
        if worker.learner is None:
            raise ValueError("no draft learns here: start the server with --learn")
        return partial(worker.learner.serve, name)
    if key == "adaserve_baseline_ms":
        if not 0 < value < MAX_MS:
            raise ValueError(f"{key} is {value}: it should be above 0 and below {MAX_MS:.0f}")
        return partial(worker.fix_baseline, value / 1e3)
    if key == "adaserve_next_request":
        if not (0 <= value < MAX_NUMBER and value == int(value)):
            raise ValueError(f"{key} is {value}: it should be a whole number from 0 to {MAX_NUMBER - 1}")
        return partial(worker.number_requests, int(value))
    raise ValueError(f"{shown(key)} is not a setting that can be changed: these are {KNOWN}")


async def _told(_: Callable[[Any, Any], Awaitable[list[bool]]], self: Any, obj: Any) -> list[bool]:
    """Raises RequestError where a scheduler refuses."""
    self.auto_create_handle_loop()
    outputs = await self.set_internal_state_communicator(obj)
    if why := next((out.rid for out in outputs if not out.updated), None):
        raise RequestError(why)
    return [True] * len(outputs)
