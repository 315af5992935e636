"""Routers: which replica gets a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

import numpy as np

from adaserve.scheduler.simulator.replica import Replica
from adaserve.scheduler.simulator.workload import SimRequest

Route = Callable[[Sequence[Replica], SimRequest], int]


def round_robin() -> Route:
    """In turn."""
    turn = count()
    return lambda replicas, request: next(turn) % len(replicas)


def least_work(replicas: Sequence[Replica], request: SimRequest) -> int:
    """The replica with the fewest tokens left to produce."""
    return int(np.argmin([r.load_tokens for r in replicas]))


def slo_aware(replicas: Sequence[Replica], request: SimRequest) -> int:
    """Strict requests and those without an SLO go where least work waits; lax ones are packed where they
    still attain.

    A replica's pace is taken from its own recent iterations: a lax request (SLO of at least twice the
    present time per token) joins the busiest replica that has no more than 1.5 times the median work.
    """
    load = np.array([r.load_tokens for r in replicas])
    if np.isfinite(request.tpot_slo_s):
        fits = np.array([r.seconds_per_token for r in replicas]) * 2.0 <= request.tpot_slo_s
        crowded = load > np.median(load) * 1.5
        candidates = np.flatnonzero(fits & ~crowded)
        if len(candidates):
            return int(candidates[np.argmax(load[candidates])])
    return int(np.argmin(load))


_BUILDERS: dict[str, Callable[[], Route]] = {
    "round-robin": round_robin,
    "least-work": lambda: least_work,
    "slo": lambda: slo_aware,
}


def build_router(name: str) -> Route:
    """A router by name. Raises ValueError listing the names."""
    if name not in _BUILDERS:
        raise ValueError(f"unknown router {name!r}; choose one of {', '.join(_BUILDERS)}")
    return _BUILDERS[name]()
