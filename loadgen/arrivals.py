"""Synthetic arrival times: Poisson, gamma bursts, ramps and peaks. Pure and seeded."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from adaserve.loadgen.errors import LoadgenError

MAX_REQUESTS = 5_000_000
"""A schedule is built in memory before anything is sent."""
KINDS = ("poisson", "gamma", "constant", "ramp", "peak")
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How requests arrive. Rates are requests per second.

    poisson   exponential gaps with mean 1 / rps
    gamma     gamma gaps with coefficient of variation ``cv`` (1 = Poisson, above = bursts)
    constant  equal gaps
    ramp      Poisson whose rate goes linearly from ``rps`` to ``to_rps`` over the run
    peak      Poisson with rate ``rps``, rising to ``to_rps`` at ``at`` (share of the run) in a bell
              of standard deviation ``width`` (share of the run)
    """

    kind: str = "poisson"
    rps: float = 1.0
    cv: float = 1.0
    to_rps: float = 0.0
    at: float = 0.5
    width: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise LoadgenError(f"unknown arrivals kind {self.kind!r}: known are {', '.join(KINDS)}")
        for name in ("rps", "to_rps"):
            rate = getattr(self, name)
            if not _finite(rate) or rate < 0:
                raise LoadgenError(f"arrivals: {name} must be a rate of 0 or more requests/s, not {rate!r}")
        if not _finite(self.cv) or not 0.01 <= self.cv <= 100:
            raise LoadgenError(f"arrivals: cv (burstiness) must lie between 0.01 and 100, not {self.cv!r}")
        if not _finite(self.width) or not 1e-3 <= self.width <= 1e3:
            raise LoadgenError(f"arrivals: width must lie between 0.001 and 1000, not {self.width!r}")
        if not _finite(self.at) or abs(self.at) > 1e3:
            raise LoadgenError(f"arrivals: at must be a share of the run (0 to 1), not {self.at!r}")

    def rate_at(self, share: FloatArray) -> FloatArray:
        """Requests/s at a share (0 to 1) of the run."""
        if self.kind == "ramp":
            return self.rps + (self.to_rps - self.rps) * share
        if self.kind == "peak":
            bell = np.exp(-0.5 * ((share - self.at) / self.width) ** 2)
            return self.rps + (self.to_rps - self.rps) * bell
        return np.full_like(share, self.rps)


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


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15
