"""What a server says about its SLOs to routers: forecasts as gauges, and as a section of ``/v1/loads``.

Why: SGLang's load snapshots know requests and tokens, but no SLO. A scheduler publishes one every few
iterations and when it becomes idle; here it does so at least once a second, with a forecast inside. The HTTP
processes read it from shared memory, so that an answer never waits for the scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import msgspec
from sglang.srt.managers import load_snapshot
from sglang.srt.managers.load_snapshot import LoadSnapshot
from sglang.srt.managers.scheduler_components.load_inquirer import SchedulerLoadInquirer
from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook
from adaserve.patches.scheduler.worker_interface import load_of, worker_of
from adaserve.slo.ledger import HEALTH_CHECK

SECTION = "slo"


class SLOLoadSnapshot(LoadSnapshot, omit_defaults=True):  # type: ignore[misc, call-arg]
    """SGLang's snapshot and a forecast, as ``adaserve.slo.forecast_types.Forecast`` in JSON values."""

    slo: dict[str, Any] | None = None

    VALID_SECTIONS = LoadSnapshot.VALID_SECTIONS | {SECTION}

    def to_dict(self, include: set[str] | None = None) -> dict[str, Any]:
        """As SGLang's, with the section ``slo``."""
        load: dict[str, Any] = LoadSnapshot.to_dict(self, include)
        if self.slo is not None and (include is None or include & {"all", SECTION}):
            load[SECTION] = self.slo
        return load


@dataclass(kw_only=True, slots=True, frozen=True)
class SLOLoadInquirer(SchedulerLoadInquirer):  # type: ignore[misc]
    """SGLang's inquirer, which adds the latest forecast."""

    scheduler: Any

    def get_loads(self) -> LoadSnapshot:
        """A snapshot with the section ``slo``."""
        load = SchedulerLoadInquirer.get_loads(self)
        forecast = worker_of(self.scheduler).forecaster.latest
        values = {name: getattr(load, name) for name in load.__struct_fields__}
        return SLOLoadSnapshot(**values, slo=None if forecast is None else msgspec.to_builtins(forecast))


def register() -> None:
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    hook(f"{scheduler}.init_load_inquirer", _with_forecast, HookType.AFTER)
    hook(f"{scheduler}.publish_load_snapshot", _publish, HookType.AROUND)
    hook(f"{scheduler}._abort_on_queued_limit", _arrived, HookType.AFTER)
    # Readers decode with this object; a snapshot without the section is read as before.
    load_snapshot.snapshot_decoder = msgspec.msgpack.Decoder(SLOLoadSnapshot)


def _with_forecast(_: None, self: Any) -> None:
    known = {f.name: getattr(self.load_inquirer, f.name) for f in fields(self.load_inquirer)}
    self.load_inquirer = SLOLoadInquirer(**known, scheduler=self)


def _publish(original: Callable[..., Any], self: Any, force: bool = False) -> Any:
    if self.load_snapshot_writer is None:  # not the first rank
        return original(self, force)
    worker = worker_of(self)
    idle = not (self.running_batch.reqs or self.waiting_queue or self.chunked_req)
    now_s = time.perf_counter()
    if worker.forecaster.is_due(idle, now_s):
        worker.forecaster.renew(load_of(self), now_s)
        if idle:
            worker.ledger.stats.nothing_held()
        force = True
    return original(self, force)


def _arrived(refused: bool, self: Any, req: Any) -> None:
    if not refused and not req.output_ids and not req.rid.startswith(HEALTH_CHECK):
        worker_of(self).forecaster.arrived(req, load_of(self))
