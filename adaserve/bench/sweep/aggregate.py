"""What all cases of a sweep show: attainment and goodput with error bars, and which policy wins by how much.

Policies of a point and seed served the same requests, so they are compared request by request: bars come from
a bootstrap over slices of the run (all requests of a slice stay together, since requests that queue behind
each other meet or miss their SLOs together).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from adaserve.bench.sweep.plan import PLAIN, STOCK, Point, SweepPlan, default_policy, is_baseline
from adaserve.bench.sweep.store import Store
from adaserve.slo.metrics import RequestRecord

SLICES = 10
"""Slices that a run's arrivals are cut into for the bootstrap."""
DRAWS = 2000
NOISE_POINTS = 1.5
"""Attainment differences below this many percentage points mean nothing on a shared host."""
_LOW, _HIGH = 5.0, 95.0

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Slice:
    """Sums over the requests of one slice of one seed's run."""

    requests: float
    attained: float
    good_tokens: float


@dataclass(frozen=True)
class Interval:
    """A figure and the 90% interval of its bootstrap."""

    value: float
    low: float
    high: float

    def to_json(self) -> list[float | None]:
        return [round(v, 5) if math.isfinite(v) else None for v in (self.value, self.low, self.high)]


@dataclass(frozen=True)
class Outcome:
    """A policy at a point, over all seeds that ran."""

    point: Point
    policy: str
    cases: tuple[Mapping[str, Any], ...]  # lines of cases.jsonl
    slices: Mapping[tuple[int, int], Slice]  # by (seed, number)

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted(c["seed"] for c in self.cases))

    def attainment(self) -> Interval:
        drawn = _drawn([self], self.seeds)
        return _interval(*drawn.ratio(0, "attained", "requests"))

    def goodput(self) -> Interval:
        """Tokens/s of requests that attained."""
        duration_s = sum(c["duration_s"] for c in self.cases)
        value, draws = _drawn([self], self.seeds).total(0, "good_tokens")
        return _interval(value / duration_s, draws / duration_s)

    def class_attainment(self) -> dict[str, float]:
        """Share of each class's requests that met their SLO."""
        totals: dict[str, list[float]] = {}
        for case in self.cases:
            for name, c in case["classes"].items():
                pair = totals.setdefault(name, [0.0, 0.0])
                pair[0] += c["attained"]
                pair[1] += c["requests"]
        return {name: met / n if n else math.nan for name, (met, n) in sorted(totals.items())}

    def mean(self, *path: str) -> float | None:
        """Mean over seeds of a number in the cases' lines; None where it is missing."""
        found = [v for c in self.cases if isinstance(v := _at(c, path), int | float)]
        return float(np.mean(found)) if found else None

    def seconds(self) -> dict[str, float]:
        """Seconds of the worker per part, all seeds together; empty without a server's report."""
        total: dict[str, float] = {}
        for case in self.cases:
            for name, value in ((case.get("server") or {}).get("seconds") or {}).items():
                total[name] = total.get(name, 0.0) + value
        return total


@dataclass(frozen=True)
class Comparison:
    """A policy against the best of several others at one point, on the same requests."""

    policy: str
    rival: str
    points: Interval  # attainment of the policy - that of the rival, percentage points
    violations: Interval  # rival's violations / the policy's; inf = the policy had none
    goodput: Interval  # the policy's / the rival's

    @property
    def verdict(self) -> str:
        """better, equal (within the noise), unclear or below."""
        if self.points.value >= NOISE_POINTS and self.points.low > 0:
            return "better"
        if self.points.value >= -NOISE_POINTS:
            return "equal" if abs(self.points.value) < NOISE_POINTS else "unclear"
        return "unclear" if self.points.high > -NOISE_POINTS else "below"


def _at(line: Mapping[str, Any], path: Sequence[str]) -> Any:
    value: Any = line
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


@dataclass(frozen=True)
class _Draws:
    """Bootstrap weights [draws, slices] and the sums of each outcome's slices."""

    weights: FloatArray
    sums: Mapping[str, FloatArray]  # name -> [outcomes, slices]

    def total(self, k: int, name: str) -> tuple[float, FloatArray]:
        mine = self.sums[name][k]
        return float(mine.sum()), self.weights @ mine

    def ratio(self, k: int, above: str, below: str) -> tuple[float, FloatArray]:
        (a, many_a), (b, many_b) = self.total(k, above), self.total(k, below)
        with np.errstate(divide="ignore", invalid="ignore"):
            return a / b if b else math.nan, many_a / many_b


def _drawn(outcomes: Sequence[Outcome], seeds: Iterable[int]) -> _Draws:
    """The same resampled slices for all outcomes; slices are drawn within their seed."""
    wanted = set(seeds)
    keys = sorted({k for o in outcomes for k in o.slices if k[0] in wanted})
    rng = np.random.default_rng(0)
    weights = np.zeros((DRAWS, len(keys)))
    for seed in sorted(wanted):
        mine = np.array([i for i, k in enumerate(keys) if k[0] == seed], int)
        if len(mine):
            weights[:, mine] = rng.multinomial(len(mine), np.full(len(mine), 1 / len(mine)), size=DRAWS)
    empty = Slice(0.0, 0.0, 0.0)
    sums = {
        name: np.array([[getattr(o.slices.get(k, empty), name) for k in keys] for o in outcomes], float)
        for name in ("requests", "attained", "good_tokens")
    }
    return _Draws(weights, sums)


def _interval(value: float, draws: FloatArray) -> Interval:
    usable = draws[~np.isnan(draws)]
    if not len(usable):
        return Interval(value, math.nan, math.nan)
    low, high = np.percentile(usable, (_LOW, _HIGH), method="lower")
    return Interval(value, float(low), float(high))


def slices_of(records: Iterable[RequestRecord], seed: int, seconds: float) -> dict[tuple[int, int], Slice]:
    """Requests summed over equal slices of the planned arrivals."""
    sums: dict[tuple[int, int], list[float]] = {}
    for r in records:
        number = min(SLICES - 1, int(r.scheduled_s / seconds * SLICES))
        total = sums.setdefault((seed, number), [0.0, 0.0, 0.0])
        total[0] += 1
        total[1] += r.attained
        total[2] += r.output_tokens if r.attained else 0
    return {key: Slice(*total) for key, total in sums.items()}


class Results:
    """All finished cases of a folder, by point and policy."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.head = store.head()
        self.plan = SweepPlan.from_json(self.head["plan"])
        groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for line in store.finished().values():
            groups.setdefault((line["point"], line["policy"]), []).append(line)
        self.outcomes = {
            (Point.parse(point), policy): self._outcome(Point.parse(point), policy, lines)
            for (point, policy), lines in groups.items()
        }

    def _outcome(self, point: Point, policy: str, lines: list[dict[str, Any]]) -> Outcome:
        slices: dict[tuple[int, int], Slice] = {}
        for line in lines:
            seconds = self.plan.seconds_of(point)
            slices |= slices_of(self.store.records(line["id"]), line["seed"], seconds)
        return Outcome(point, policy, tuple(lines), slices)

    @property
    def default(self) -> str:
        """The policy that is judged: the server's default, or its substitute in this sweep."""
        measured = {p for _, p in self.outcomes}
        for name in (default_policy(), "priced", "adaserve"):
            if name in measured:
                return name
        return next((p for p in sorted(measured) if p not in (PLAIN, STOCK)), PLAIN)

    def policies(self, axis: str) -> list[str]:
        """Policies of an axis that have a result somewhere on it, in the plan's order."""
        points = [p for _, p in self.plan.points(axis)]
        return [n for n in self.plan.policies_of(axis) if any((p, n) in self.outcomes for p in points)]

    def get(self, point: Point, policy: str) -> Outcome | None:
        return self.outcomes.get((point, policy))

    def points(self) -> list[Point]:
        """Every point of the plan that has results, axis by axis."""
        planned = (p for axis in self.plan.axes for _, p in self.plan.points(axis))
        return [p for p in dict.fromkeys(planned) if any(q == p for q, _ in self.outcomes)]

    def at(self, point: Point) -> dict[str, Outcome]:
        """Policies at a point, in the plan's order; SGLang without speculation is not one of them."""
        names = dict.fromkeys((*self.plan.policies, *self.plan.side_policies))
        return {n: o for n in names if (o := self.get(point, n)) is not None}

    def against_baselines(self, point: Point, policy: str) -> Comparison | None:
        """The policy against the best baseline that ignores SLOs."""
        here = self.at(point)
        rivals = [o for n, o in here.items() if is_baseline(n) and n != policy]
        return compare(here[policy], rivals) if policy in here else None

    def idle(self, key: str) -> tuple[float, float, Interval] | None:
        """``none``, SGLang without speculation, and the ratio of paired rounds, as medians over the rounds.

        ``key``: ``tpot_ms`` of one request or ``saturated_rps``. None while that was not measured."""
        rounds = self.head.get("idle_rounds")
        if not rounds:
            return None
        ours, theirs = (np.array(rounds[name][key], float) for name in (PLAIN, STOCK))
        ratios = ours / theirs
        draws = np.random.default_rng(0).choice(ratios, (DRAWS, len(ratios)))
        ratio = _interval(float(np.median(ratios)), np.median(draws, axis=1))
        return float(np.median(ours)), float(np.median(theirs)), ratio

    def against(self, point: Point, policy: str, rival: str) -> Comparison | None:
        here = self.at(point)
        return compare(here[policy], [here[rival]]) if {policy, rival} <= set(here) else None


def compare(mine: Outcome, rivals: Sequence[Outcome]) -> Comparison | None:
    """``mine`` against the rival with the highest attainment; goodput against the rival with the highest
    goodput. Only seeds that both have count. None without rivals."""
    best: tuple[float, Comparison] | None = None
    goodputs: list[tuple[float, Interval]] = []
    for rival in rivals:
        seeds = set(mine.seeds) & set(rival.seeds)
        if not seeds:
            continue
        drawn = _drawn([mine, rival], seeds)
        (a, many_a), (b, many_b) = (drawn.ratio(k, "attained", "requests") for k in (0, 1))
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.divide(1 - many_b, 1 - many_a)
        speed = _duration(rival, seeds) / _duration(mine, seeds)
        (g, many_g), (h, many_h) = (drawn.total(k, "good_tokens") for k in (0, 1))
        with np.errstate(divide="ignore", invalid="ignore"):
            good = _interval(speed * g / h if h else math.inf, speed * many_g / many_h)
        goodputs.append((h / _duration(rival, seeds), good))
        found = Comparison(
            mine.policy,
            rival.policy,
            _interval(100 * (a - b), 100 * (many_a - many_b)),
            _interval((1 - b) / (1 - a) if a < 1 else math.inf if b < 1 else 1.0, ratio),
            good,
        )
        if best is None or b > best[0]:
            best = (b, found)
    if best is None:
        return None
    hardest = max(goodputs, key=lambda pair: pair[0])[1]
    c = best[1]
    return Comparison(c.policy, c.rival, c.points, c.violations, hardest)


def _duration(outcome: Outcome, seeds: set[int]) -> float:
    return float(sum(c["duration_s"] for c in outcome.cases if c["seed"] in seeds))
