"""How well the TPOT of a request is predicted at its arrival, and how well it could be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adaserve.scheduler.admission.prediction import TPOTPredictor
from adaserve.scheduler.interface import FloatArray, IterationOutcome
from adaserve.scheduler.simulator.played import PlayedReplica
from adaserve.scheduler.simulator.run import SimulationConfig, build_replica
from adaserve.scheduler.simulator.workload import SimRequest
from adaserve.slo.classes import SLO
from adaserve.slo.delivered_tpot import MIN_TOKENS, DeliveredTPOT

CLOSE = 0.15
"""A prediction this close to the delivered TPOT counts as right."""

ENOUGH = 20
"""Rows of a class's other requests that say how fast the class was while a request ran."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """TPOT of one request, seconds."""

    slo_class: str
    delivered_s: float
    by_load_s: float  # from the batch and the queue at its arrival alone
    predicted_s: float  # as a server says it: with what its class got lately
    foreseen_s: float  # by someone who knows every iteration to come, and of its text only the class


def predict_requests(requests: Sequence[SimRequest], config: SimulationConfig) -> list[Predicted]:
    """Serves ``requests`` on one replica and predicts the TPOT of each when it arrives. In the order of their
    arrivals, without those whose answers are very short."""
    replica = build_replica(config)
    replica.outcomes = []
    watch = _Watch(replica, config)
    said: dict[str, tuple[float, float]] = {}
    for request in requests:
        while replica.busy and replica.now_s < request.arrival_s:
            replica.step()
            watch.learn(said)
        said[request.rid] = watch.predict(request)
        replica.submit(request)
    while replica.busy:
        replica.step()
    made = [r for r in requests if r.finished and r.produced >= MIN_TOKENS]
    foreseen = _foreseen(made, replica.outcomes)
    return [Predicted(r.slo_class, _tpot_s(r), *said[r.rid], foreseen[r.rid]) for r in made]


def close_share(predicted: Sequence[float], delivered: Sequence[float] | FloatArray) -> float:
    """Share of the predictions that are within CLOSE of what was delivered. Those that are NaN do not count;
    NaN if there are no others."""
    error = np.asarray(predicted) / np.asarray(delivered) - 1.0
    error = error[~np.isnan(error)]
    return float((np.abs(error) <= CLOSE).mean()) if len(error) else float("nan")


class _Watch:
    """The forecasting side of a server, beside a simulated replica."""

    def __init__(self, replica: PlayedReplica, config: SimulationConfig) -> None:
        self._replica, self._slots = replica, config.replica.max_running
        self._predictor, self._delivered = TPOTPredictor(config.replica.latency), DeliveredTPOT()
        self._seen, self._ended = 0, 0

    def learn(self, said: dict[str, tuple[float, float]]) -> None:
        """Takes in the iterations and the finished requests that are new."""
        outcomes = self._replica.outcomes or []
        for outcome in outcomes[self._seen :]:
            self._predictor.observe(outcome)
        self._seen = len(outcomes)
        for r in self._replica.done[self._ended :]:
            if r.produced:
                self._delivered.add(_slo(r), r.produced, _tpot_s(r), said[r.rid][0], r.last_token_s)
        self._ended = len(self._replica.done)

    def predict(self, request: SimRequest) -> tuple[float, float]:
        """Its TPOT by the load alone, and as a server says it; seconds."""
        rows, waiting = len(self._replica.rows), len(self._replica.waiting)
        n = self._predictor.with_one_more(rows, waiting, self._slots)
        slo = _slo(request)
        by_load_s = self._predictor.tpot_s(slo.kind, n)
        return by_load_s, self._delivered.predict(slo, by_load_s, request.arrival_s)


def _slo(request: SimRequest) -> SLO:
    return SLO(request.slo_class, request.tpot_slo_s, request.ttft_slo_s)


def _tpot_s(request: SimRequest) -> float:
    return (request.last_token_s - request.first_token_s) / max(1, request.produced)


def _foreseen(requests: Sequence[SimRequest], outcomes: Sequence[IterationOutcome]) -> dict[str, float]:
    """Seconds per iteration while each request ran, over the mean pace of the others of its class, or of all
    others where its class had few; NaN where it was alone."""
    ends: FloatArray = np.array([o.end_s for o in outcomes])
    found = {}
    for r in requests:
        first, last = np.searchsorted(ends, [r.first_token_s, r.last_token_s], side="right")
        mates = [
            (name, new)
            for o in outcomes[first:last]
            for rid, name, new in zip(
                o.plan.running.rids, o.plan.running.slo_class, o.new_tokens.tolist(), strict=True
            )
            if rid != r.rid
        ]
        own = [new for name, new in mates if name == r.slo_class]
        paces = own if len(own) >= ENOUGH else [new for _, new in mates]
        cycle_s = (r.last_token_s - r.first_token_s) / max(1, r.iterations)
        found[r.rid] = cycle_s / float(np.mean(paces)) if paces else float("nan")
    return found
