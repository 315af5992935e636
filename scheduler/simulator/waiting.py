"""The prompts that wait at one replica, and which of them a decision looks at."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, islice

import numpy as np
from sortedcontainers import SortedKeyList

from adaserve.scheduler.prefill import (
    MOST_LATE,
    MOST_WAITING,
    PrefillConfig,
    WaitingBatch,
    rank_of,
)
from adaserve.scheduler.simulator.workload import SimRequest


class WaitingPrompts:
    """In the order of the configuration, so that a long queue costs no more than what is looked at of it."""

    def __init__(self, config: PrefillConfig) -> None:
        self._config = config
        self._started: list[SimRequest] = []  # part of the prompt is in the cache
        self._in_time: SortedKeyList = SortedKeyList(key=self._rank)
        self._late: SortedKeyList = SortedKeyList(key=self._rank)  # they should run by now, but state no SLO
        self._lost: SortedKeyList = SortedKeyList(key=self._rank)  # their TTFT SLO has passed

    def __len__(self) -> int:
        return sum(map(len, (self._started, self._in_time, self._late, self._lost)))

    def __iter__(self) -> Iterator[SimRequest]:
        return chain(self._started, self._in_time, self._late, self._lost)

    @property
    def started(self) -> int:
        """How many have part of their prompt in the cache."""
        return len(self._started)

    def add(self, request: SimRequest) -> None:
        """One that has just arrived."""
        self._in_time.add(request)

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
        """The started ones, those that come first of all that can be in time, and those late longest."""
        gives_up = self._config.lost_every_s is not None  # they are in order of when they are due
        while gives_up and self._in_time and self._rank(self._in_time[0]) < now_s:
            request = self._in_time.pop(0)
            (self._lost if math.isfinite(request.ttft_slo_s) else self._late).add(request)
        waiting = islice(self._in_time, MOST_WAITING)
        late = (r for queue in (self._late, self._lost) for r in islice(queue, MOST_LATE))
        return [*self._started, *waiting, *late]

    def _take(self, request: SimRequest) -> None:
        next(q for q in (self._in_time, self._late, self._lost) if request in q).remove(request)

    def _rank(self, request: SimRequest) -> float:
        prompt = float(request.prompt_tokens)
        return float(rank_of(self._config, request.arrival_s, request.ttft_slo_s, prompt))


def waiting_batch(requests: list[SimRequest]) -> WaitingBatch:
    """The requests as a decision sees them."""
    return WaitingBatch(
        arrival_s=np.array([r.arrival_s for r in requests]),
        ttft_slo_s=np.array([r.ttft_slo_s for r in requests]),
        prompt_left=np.array([r.prompt_tokens - r.prefilled for r in requests]),
        started=np.array([r.prefilled > 0 for r in requests], np.bool_),
        tpot_slo_s=np.array([r.tpot_slo_s if r.cap_tokens > 1 else np.inf for r in requests]),
    )
