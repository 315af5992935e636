"""What all cases of a sweep show: attainment and goodput with error bars, and which policy wins by how much.

Systems of a point played the same blocks, so they are compared block by block: bars say how far blocks
differ. All requests of a block stay together, since requests that queue behind each other meet or miss their
SLOs together, and what disturbs the host disturbs all of them. Blocks are few, so the bars are intervals of
Student's t: a bootstrap over two blocks would hold the truth half of the time, and one over one block never.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import t

from adaserve.bench.sweep.plan import Point, SweepError, SweepPlan
from adaserve.bench.sweep.store import SCHEMA_VERSION, Store
from adaserve.bench.sweep.systems import PLAIN, STOCK, default_policy, is_rival
from adaserve.slo.metrics import RequestRecord

DRAWS = 2000
NOISE_POINTS = 1.5
"""Attainment differences below this many percentage points mean nothing on a shared host."""
_HIGH = 0.95

FloatArray = npt.NDArray[np.float64]


THIRD = 1 / 3
"""Systems are judged at the highest load at which the best rival still attains this."""


@dataclass(frozen=True)
class Block:
    """Sums over the requests of one block. A request attains when it meets both SLOs."""

    requests: float = 0.0
    attained: float = 0.0
    good_tokens: float = 0.0
    met_tpot: float = 0.0
    met_ttft: float = 0.0

    @classmethod
    def of(cls, records: Sequence[RequestRecord]) -> Block:
        return cls(
            len(records),
            sum(r.attained for r in records),
            sum(r.output_tokens for r in records if r.attained),
            sum(r.met_tpot for r in records),
            sum(r.met_ttft for r in records),
        )


@dataclass(frozen=True)
class Interval:
    """A figure and its 90% interval over blocks; the ends are nan where one block is all there is."""

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
    blocks: Mapping[tuple[int, int], Block]  # by (seed, number)

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted({seed for seed, _ in self.blocks}))

    def attainment(self, objective: str = "attained") -> Interval:
        """Share of requests that met both SLOs, or one: ``met_tpot``, ``met_ttft``."""
        return _interval(*_Sums.of([self], self.blocks).ratio(0, objective, "requests"), 0.0, 1.0)

    def goodput(self) -> Interval:
        """Tokens/s of requests that attained."""
        duration_s = sum(c["duration_s"] for c in self.cases)
        value, parts = _Sums.of([self], self.blocks).total(0, "good_tokens")
        return _interval(value / duration_s, parts / duration_s, 0.0)

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
        """Mean over blocks of a number in the cases' lines; None where it is missing."""
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
    goodput: Interval  # the policy's / the rival's; nan = the rival had none

    @property
    def verdict(self) -> str:
        """better, equal (within the noise), unclear or below; none where one block is all there is."""
        if math.isnan(self.points.low):
            return "none"
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
class _Sums:
    """Sums over the blocks that all of some outcomes have: of each block, and of all of them."""

    blocks: Mapping[str, FloatArray]  # name -> [outcomes, blocks]

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], keys: Iterable[tuple[int, int]]) -> _Sums:
        wanted = sorted(keys)
        return cls(
            {
                f.name: np.array([[getattr(o.blocks[k], f.name) for k in wanted] for o in outcomes], float)
                for f in fields(Block)
            }
        )

    def total(self, k: int, name: str) -> tuple[float, FloatArray]:
        """The sum, and how far each block lies from the others' mean: those parts add up to 0."""
        mine = self.blocks[name][k]
        return float(mine.sum()), mine - mine.mean() if len(mine) else mine

    def ratio(self, k: int, above: str, below: str) -> tuple[float, FloatArray]:
        """The ratio of two sums, and by how much each block moves it (the ratio's linearization)."""
        a, b = self.blocks[above][k], self.blocks[below][k]
        if not b.sum():
            return math.nan, np.full(len(b), math.nan)
        value = float(a.sum() / b.sum())
        return value, (a - value * b) / b.sum()


def _half(parts: FloatArray) -> float:
    """Half the width of the 90% interval of a figure that each block moves by its part: Student's t, since
    blocks are few. nan with one block, which says nothing about chance."""
    n = len(parts)
    return float(t.ppf(_HIGH, n - 1) * math.sqrt(n) * parts.std(ddof=1)) if n > 1 else math.nan


def _interval(value: float, parts: FloatArray, least: float = -math.inf, most: float = math.inf) -> Interval:
    half = _half(parts)
    return Interval(value, max(value - half, least), min(value + half, most))


def _ratio_interval(value: float, blocks: FloatArray, parts: FloatArray) -> Interval:
    """Of the ratio of two sums over blocks [2, blocks], where ``parts`` are those of its logarithm. A sum to
    which one block alone adds something says no more than one block does."""
    half = _half(parts) if np.count_nonzero(blocks, axis=1).min() > 1 else math.nan
    return Interval(value, value * math.exp(-half), value * math.exp(half))


def _median_interval(ratios: FloatArray) -> Interval:
    """The median of paired rounds, and 90% of its bootstrap: one round of six may be far off."""
    draws = np.median(np.random.default_rng(0).choice(ratios, (DRAWS, len(ratios))), axis=1)
    low, high = np.percentile(draws, (5.0, 95.0), method="lower")
    return Interval(float(np.median(ratios)), float(low), float(high))


class Results:
    """All finished blocks of a folder that the plan reports, by point and system."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.head = store.head()
        if self.head["schema_version"] != SCHEMA_VERSION:
            raise SweepError(
                f"{store.folder} was measured by an older version, without blocks and TTFT SLOs: "
                "draw it with that version"
            )
        self.plan = SweepPlan.from_json(self.head["plan"])
        groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for line in store.finished().values():
            if line["seed"] not in self.plan.seeds:
                continue  # lengths were chosen on it
            groups.setdefault((line["point"], line["policy"]), []).append(line)
        self.outcomes = {
            (Point.parse(point), policy): self._outcome(Point.parse(point), policy, lines)
            for (point, policy), lines in groups.items()
        }

    def _outcome(self, point: Point, policy: str, lines: list[dict[str, Any]]) -> Outcome:
        blocks = {(line["seed"], line["block"]): Block.of(self.store.records(line["id"])) for line in lines}
        return Outcome(point, policy, tuple(lines), blocks)

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

    def against_best(self, point: Point, policy: str, gated: bool = False) -> Comparison | None:
        """The policy against the best rival as it is, or with the same gate and prefills."""
        here = self.at(point)
        rivals = [o for n, o in here.items() if is_rival(n, gated) and n != policy]
        return compare(here[policy], rivals) if policy in here else None

    def judged(self, gated: bool = False) -> Point | None:
        """The highest load at which the best rival still attains a third; None where no load is such."""
        if "load" not in self.plan.axes:
            return None
        best: dict[Point, float] = {}
        for _, point in self.plan.points("load"):
            found = [o.attainment().value for n, o in self.at(point).items() if is_rival(n, gated)]
            if found:
                best[point] = max(found)
        return max((p for p, value in best.items() if value >= THIRD), key=lambda p: p.load, default=None)

    def idle(self, key: str) -> tuple[float, float, Interval] | None:
        """``none``, SGLang without speculation, and the ratio of paired rounds, as medians over the rounds.

        ``key``: ``tpot_ms`` of one request or ``saturated_rps``. None while that was not measured."""
        rounds = self.head.get("idle_rounds")
        if not rounds:
            return None
        ours, theirs = (np.array(rounds[name][key], float) for name in (PLAIN, STOCK))
        return float(np.median(ours)), float(np.median(theirs)), _median_interval(ours / theirs)

    def against(self, point: Point, policy: str, rival: str) -> Comparison | None:
        here = self.at(point)
        return compare(here[policy], [here[rival]]) if {policy, rival} <= set(here) else None


def compare(mine: Outcome, rivals: Sequence[Outcome]) -> Comparison | None:
    """``mine`` against the rival with the highest attainment; goodput against the rival with the highest
    goodput. Only blocks that both have count. None without rivals."""
    found = [(o, c) for o in rivals if (c := _against(mine, o)) is not None]
    if not found:
        return None
    c = max(found, key=lambda pair: pair[0].attainment().value)[1]
    hardest = max(found, key=lambda pair: pair[0].goodput().value)[1]
    return replace(c, goodput=hardest.goodput)


def _against(mine: Outcome, rival: Outcome) -> Comparison | None:
    """On the blocks that both have; None where there are none."""
    keys = set(mine.blocks) & set(rival.blocks)
    if not keys:
        return None
    sums = _Sums.of([mine, rival], keys)
    (a, parts_a), (b, parts_b) = (sums.ratio(k, "attained", "requests") for k in (0, 1))
    speed = _duration(rival, keys) / _duration(mine, keys)
    (g, parts_g), (h, parts_h) = (sums.total(k, "good_tokens") for k in (0, 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        missed = sums.blocks["requests"] - sums.blocks["attained"]
        violations = _ratio_interval(
            (1 - b) / (1 - a) if a < 1 else math.inf if b < 1 else 1.0,
            missed,
            parts_a / (1 - a) - parts_b / (1 - b),
        )
        goodput = _ratio_interval(
            speed * g / h if h else math.nan, sums.blocks["good_tokens"], parts_g / g - parts_h / h
        )
    points = _interval(100 * (a - b), 100 * (parts_a - parts_b))
    return Comparison(mine.policy, rival.policy, points, violations, goodput)


def _duration(outcome: Outcome, keys: set[tuple[int, int]]) -> float:
    return float(sum(c["duration_s"] for c in outcome.cases if (c["seed"], c["block"]) in keys))
