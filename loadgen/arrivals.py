"""Synthetic arrival times: Poisson, gamma bursts, ramps and peaks. Pure and seeded."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from adaserve.loadgen.errors import LoadgenError
from adaserve.loadgen.setting_types import Rate, Setting, must

MAX_REQUESTS = 5_000_000
"""A schedule is built in memory before anything is sent."""
Kind = Literal["poisson", "gamma", "constant", "ramp", "peak"]
FloatArray = npt.NDArray[np.float64]


class Arrivals(Setting):
    """How requests arrive. Rates are requests per second.

    poisson   exponential gaps with mean 1 / rps
    gamma     gamma gaps with coefficient of variation ``cv`` (1 = Poisson, above = bursts): the option
              ``--burstiness`` is the distribution's shape, 1 / cv^2
    constant  equal gaps
    ramp      Poisson with a rate that goes linearly from ``rps`` to ``to_rps`` over the run
    peak      Poisson with rate ``rps``, rising to ``to_rps`` at ``at`` (share of the run) in a bell
              of standard deviation ``width`` (share of the run)
    """

    kind: Annotated[Kind, must("be poisson, gamma, constant, ramp or peak")] = "poisson"
    rps: Rate = 1.0
    cv: Annotated[float, Field(ge=0.01, le=100), must("lie between 0.01 and 100")] = 1.0
    to_rps: Rate = 0.0
    at: Annotated[float, Field(ge=-1e3, le=1e3), must("be a share of the run, 0 to 1")] = 0.5
    width: Annotated[float, Field(ge=1e-3, le=1e3), must("lie between 0.001 and 1000")] = 0.1

    def rate_at(self, share: FloatArray) -> FloatArray:
        """Requests/s at a share (0 to 1) of the run."""
        if self.kind == "ramp":
            return self.rps + (self.to_rps - self.rps) * share
        if self.kind == "peak":
            bell = np.exp(-0.5 * ((share - self.at) / self.width) ** 2)
            return self.rps + (self.to_rps - self.rps) * bell
        return np.full_like(share, self.rps)

    def longest_s(self, count: int) -> float:
        """How long ``count`` requests take to arrive at ``rps`` in the worst case, ten standard deviations
        above the mean."""
        spread = max(1.0, self.cv**2)
        return (count + 10 * math.sqrt(count * spread) + 10 * spread) / self.rps


def arrival_times(arrivals: Arrivals, duration_s: float, rng: np.random.Generator) -> FloatArray:
    """Sorted times in [0, duration_s), seconds."""
    if not 0 < duration_s < math.inf:
        raise LoadgenError(f"the duration must be a positive number of seconds, not {duration_s!r}")
    most = max(arrivals.rps, arrivals.to_rps) * duration_s
    if most > MAX_REQUESTS:
        raise LoadgenError(
            f"{most:.3g} requests are more than one run can plan ({MAX_REQUESTS:,}): lower the rate or the "
            "duration"
        )
    if arrivals.kind in ("ramp", "peak"):
        return _thinned(arrivals, duration_s, rng)
    if arrivals.rps == 0:
        return np.zeros(0)
    if arrivals.kind == "constant":
        times = np.arange(math.ceil(duration_s * arrivals.rps)) / arrivals.rps
    else:
        times = np.cumsum(_gaps(arrivals, duration_s, rng))
    return times[times < duration_s]


def _gaps(arrivals: Arrivals, duration_s: float, rng: np.random.Generator) -> FloatArray:
    mean = 1.0 / arrivals.rps
    expected = duration_s * arrivals.rps
    n = int(expected + 10 * math.sqrt(expected * max(1.0, arrivals.cv**2)) + 10 * max(1.0, arrivals.cv**2))
    shape = 1.0 / arrivals.cv**2 if arrivals.kind == "gamma" else 1.0
    return rng.gamma(shape, mean / shape, n)


def _thinned(arrivals: Arrivals, duration_s: float, rng: np.random.Generator) -> FloatArray:
    """Inhomogeneous Poisson process by thinning (Lewis and Shedler)."""
    peak = max(arrivals.rps, arrivals.to_rps)
    if peak == 0:
        return np.zeros(0)
    times = np.sort(rng.uniform(0, duration_s, rng.poisson(peak * duration_s)))
    return times[rng.uniform(0, peak, len(times)) < arrivals.rate_at(times / duration_s)]
