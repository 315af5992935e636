"""Which waiting requests are refused, so that they do not make others late (``--shed``)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from weakref import WeakSet

from adaserve.engine.admission.forecaster import Forecaster
from adaserve.patches.scheduler.worker_interface import Load, Refusal
from adaserve.slo.classes import SLOConfig
from adaserve.slo.ledger import SLOLedger

SATURATED = "rejected-saturated"
EXPIRED = "rejected-ttl-expired"

RETRY_RANGE_S = (1, 60)

MAX_JUDGED = 16
"""Requests that are judged before an iteration: each needs a prediction, and all that run wait for it."""


class Shedder:
    """Judges each request once when it has to wait, and again when its TTFT SLO has passed.

    A request that was retracted has had its first token, so it is never refused.
    """

    def __init__(self, enabled: bool, forecaster: Forecaster, ledger: SLOLedger, classes: SLOConfig) -> None:
        self.enabled = enabled
        self._forecaster, self._ledger, self._classes = forecaster, ledger, classes
        self._judged: WeakSet[Any] = WeakSet()
        self._left = 0  # of ``MAX_JUDGED``

    def refusals(self, load: Load, now_s: float) -> list[tuple[Any, Refusal]]:
        """Requests of the queue that are refused now, each with the reason."""
        self._left = MAX_JUDGED
        refused: list[tuple[Any, Refusal]] = []
        staying: list[Any] = []
        ahead = replace(load, waiting=staying)  # which grows as the queue is gone through
        for req in load.waiting:
            if not self._left:
                break
            refusal = None if req.output_ids else self._judge(req, ahead, now_s)
            if refusal is None:
                staying.append(req)
            else:
                refused.append((req, refusal))
                self._ledger.stats.shed(self._ledger.slo(req).slo_class, refusal.reason)
        return refused

    def _judge(self, req: Any, ahead: Load, now_s: float) -> Refusal | None:
        """``ahead``: the queue before the request."""
        slo = self._ledger.slo(req)
        judged = req in self._judged
        if math.isinf(slo.ttft_s) and (judged or self._classes.get(slo.slo_class).running_share >= 1.0):
            return None
        waited_s = now_s - self._ledger.arrival_s(req)
        expired = waited_s > slo.ttft_s
        if judged and not expired:
            return None
        self._left -= 1
        self._judged.add(req)
        wait_s = self._forecaster.wait_s(req, ahead, now_s)
        aim = f"the TTFT SLO of {slo.ttft_s * 1e3:.0f} ms"
        if expired:
            return Refusal(EXPIRED, f"{aim} has passed while the request waited", _within(wait_s))
        if waited_s + wait_s > slo.ttft_s:
            late_s = waited_s + wait_s - slo.ttft_s
            says = f"{aim} would be missed: the prompt would wait for about {wait_s:.1f} s"
            return Refusal(SATURATED, says, _within(late_s))
        if wait_s > 0 and (over := self._over_share(slo.slo_class, ahead)):
            return Refusal(SATURATED, over, _within(wait_s))
        return None

    def _over_share(self, name: str, load: Load) -> str:
        """A sentence if the class has its share of the running requests, or more."""
        share = self._classes.get(name).running_share
        if share >= 1.0:
            return ""
        started = [] if load.started is None else [load.started]
        mine = sum(self._ledger.slo(r).slo_class == name for r in (*load.running, *started, *load.waiting))
        most = max(1, int(share * load.slots))
        if mine < most:
            return ""
        return f"class {name!r} has {mine} requests here, its share is {most} while others wait"


def _within(seconds: float) -> int:
    """Whole seconds for Retry-After."""
    low, high = RETRY_RANGE_S
    return min(high, max(low, math.ceil(seconds)))
