"""The prompts that wait at one replica, and which of them a decision looks at."""

from __future__ import annotations

import math
from itertools import count

import numpy as np
from sortedcontainers import SortedList

from adaserve.scheduler.admission.order import looked_at, rank_of
from adaserve.scheduler.admission.situation import PrefillConfig, WaitingBatch, tpot_to_meet_s
from adaserve.scheduler.simulator.workload import SimRequest


class WaitingPrompts:
    """In the order of the configuration, so that a long queue costs no more than what is looked at of it."""

    def __init__(self, config: PrefillConfig) -> None:
        self._config = config
        self._places = count()
        self._started: list[SimRequest] = []  # part of the prompt is in the cache
        self._queued: dict[SimRequest, tuple[float, int, SimRequest]] = {}
        self._stated: SortedList = SortedList()  # of ``_queued``, those with a TTFT SLO
        self._patient: SortedList = SortedList()  # those without

    def __len__(self) -> int:
        return len(self._started) + len(self._queued)

    @property
    def started(self) -> int:
        """How many have part of their prompt in the cache."""
        return len(self._started)

    def add(self, request: SimRequest) -> None:
        """One that has just arrived."""
        rank = rank_of(self._config, request.arrival_s, request.ttft_slo_s, float(request.prompt_tokens))
        self._queued[request] = queued = float(rank), next(self._places), request
        self._queue(request).add(queued)

    def start(self, request: SimRequest) -> None:
        """A first chunk of it runs."""
        self._take(request)
        self._started.append(request)

    def leave(self, request: SimRequest) -> None:
        """Its prompt is read, or it is turned away."""
        if request in self._started:
            self._started.remove(request)
        else:
            self._take(request)

    def looked_at(self, now_s: float) -> list[SimRequest]:
        """The started ones, and of the others those that the rule looks at."""
        looked = looked_at(self._config, self._stated, self._patient, now_s)
        return [*self._started, *(request for _, _, request in looked)]

    def _take(self, request: SimRequest) -> None:
        self._queue(request).remove(self._queued.pop(request))

    def _queue(self, request: SimRequest) -> SortedList:
        return self._stated if math.isfinite(request.ttft_slo_s) else self._patient


def waiting_batch(requests: list[SimRequest]) -> WaitingBatch:
    """The requests as a decision sees them."""
    return WaitingBatch(
        arrival_s=np.array([r.arrival_s for r in requests]),
        ttft_slo_s=np.array([r.ttft_slo_s for r in requests]),
        prompt_left=np.array([r.prompt_tokens - r.prefilled for r in requests]),
        started=np.array([r.prefilled > 0 for r in requests], np.bool_),
        tpot_slo_s=np.array([tpot_to_meet_s(r.tpot_slo_s, r.cap_tokens) for r in requests]),
        encode_s=np.zeros(len(requests)),
    )
