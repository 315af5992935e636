"""What all cases of a sweep show: attainment and goodput with error bars, and which policy wins by how much.

All systems of a point served the same blocks of requests, and every figure is one of all its requests. They
are not independent: requests that queue behind each other meet or miss their SLOs together, and what disturbs
the host disturbs all of them. How far blocks differ says how many independent requests they are worth. Blocks
are few, and three of one system may agree by chance, so all systems of a point say that together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import numpy as np

from adaserve.bench.sweep.intervals import Interval, Spread, difference, median_interval, ratio, spread_of
from adaserve.bench.sweep.plan import Point, SweepError, SweepPlan
from adaserve.bench.sweep.store import Store
from adaserve.bench.sweep.systems import PLAIN, PUBLISHED, STOCK, default_policy, is_rival
from adaserve.scheduler.interface import FloatArray
from adaserve.slo.run_summary import RequestRecord, class_summaries, class_summary

OBJECTIVES = ("attained", "met_tpot", "met_ttft")
_OF_ITERATIONS = frozenset({"depth", "running"})
"""Counters of the servers that are means over iterations; the others are means over requests in them."""

Key = tuple[int, int]
"""A block: its seed, and its number."""
THIRD = 1 / 3
"""Systems are judged at the highest load at which the best rival still has this attainment."""


@dataclass(frozen=True)
class Block:
    """Sums over the requests of one block, or of several. A request attains when it meets both SLOs."""

    requests: float = 0.0
    attained: float = 0.0
    good_tokens: float = 0.0
    met_tpot: float = 0.0
    met_ttft: float = 0.0
    duration_s: float = 0.0

    @classmethod
    def of(cls, records: Sequence[RequestRecord], duration_s: float = 0.0) -> Block:
        return cls(
            len(records),
            sum(r.attained for r in records),
            sum(r.output_tokens for r in records if r.attained),
            sum(r.met_tpot for r in records),
            sum(r.met_ttft for r in records),
            duration_s,
        )

    @classmethod
    def total(cls, blocks: Iterable[Block]) -> Block:
        return cls(*map(sum, zip(*map(astuple, blocks), strict=True)))

    def share(self, objective: str = "attained") -> float:
        """Share of the requests that met both SLOs, or the one in ``objective``."""
        return float(getattr(self, objective)) / self.requests if self.requests else 0.0

    @property
    def goodput(self) -> float:
        """Tokens/s of requests that attained."""
        return self.good_tokens / self.duration_s if self.duration_s else 0.0


@dataclass(frozen=True)
class Outcome:
    """A policy at a point, over all seeds that ran."""

    point: Point
    policy: str
    cases: tuple[Mapping[str, Any], ...]  # lines of cases.jsonl
    blocks: Mapping[Key, Block]
    summary: Mapping[str, Any] = field(default_factory=dict)  # `class_summary` of the requests of all blocks
    by_class: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # and of those of each class
    alone: Mapping[str, Spread] = field(default_factory=dict)  # of its shares, by objective
    apart: Spread = field(default_factory=Spread)  # the same without what a block does to all systems

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted({seed for seed, _ in self.blocks}))

    def attainment(self, objective: str = "attained") -> Interval:
        """Share of requests that met both SLOs, or one: ``met_tpot``, ``met_ttft``."""
        whole = Block.total(self.blocks.values())
        return self.alone.get(objective, Spread()).share(getattr(whole, objective), whole.requests)

    def goodput(self) -> Interval:
        """Tokens/s of requests that attained. Answers are alike in length: it varies as attainment does."""
        return self.attainment().scaled(Block.total(self.blocks.values()).goodput)

    def class_attainment(self) -> dict[str, float]:
        """Share of each class's requests that met their SLO."""
        return {name: float(c["slo_attainment"]) for name, c in self.by_class.items()}

    def mean(self, name: str) -> float | None:
        """Mean over blocks of a number in the cases' lines; None if it is missing."""
        found = [v for c in self.cases if isinstance(v := c.get(name), int | float)]
        return float(np.mean(found)) if found else None

    def served(self, name: str) -> float | None:
        """A mean that servers counted, over all iterations of all blocks; None if none did."""
        found = [s for c in self.cases if (s := c.get("server")) and s.get(name) is not None]
        weights = [s["iterations"] * (1.0 if name in _OF_ITERATIONS else s["running"]) for s in found]
        return float(np.average([s[name] for s in found], weights=weights)) if found else None

    def seconds(self) -> dict[str, float]:
        """Seconds of the worker per part, all seeds together; empty without a server's report."""
        total: dict[str, float] = {}
        for case in self.cases:
            for name, value in ((case.get("server") or {}).get("seconds") or {}).items():
                total[name] = total.get(name, 0.0) + value
        return total

    def selection_share(self) -> float | None:
        """Selection's share of the worker's time in decode iterations; None without a server's report."""
        spent = self.seconds()
        busy = sum(v for k, v in spent.items() if k != "prefill")
        return spent.get("select", 0.0) / busy if busy else None


def together(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The systems of a point, which learn from each other how far blocks differ."""
    made = {name: _spreads([o.blocks for o in outcomes], name) for name in OBJECTIVES}
    alone = {name: spread for name, (spread, _) in made.items()}
    return [replace(o, alone=alone, apart=made["attained"][1]) for o in outcomes]


def _spreads(systems: Sequence[Mapping[Key, Block]], objective: str) -> tuple[Spread, Spread]:
    """How much a system's share varies over blocks; and how much of that is left without what a block does to
    all systems, as in a randomized complete block design (of what has been played, if it is not complete)."""
    played = [blocks for blocks in systems if len(blocks) > 1]
    if not played:
        return Spread(), Spread()
    keys = sorted({key for blocks in played for key in blocks})
    requests, met = (
        np.array([[getattr(blocks[k], name) if k in blocks else math.nan for k in keys] for blocks in played])
        for name in ("requests", objective)
    )  # [systems, blocks]
    whole = np.nansum(requests, axis=1, keepdims=True)
    share = np.nansum(met, axis=1, keepdims=True) / whole
    off = met - share * requests
    independent = share * (1 - share) * requests * (1 - requests / whole)  # the variance that it would have
    there = np.isfinite(off).sum(axis=0)
    rest = off - np.nansum(off, axis=0) / there
    freedom = int(there.sum()) - len(played) - len(keys) + 1
    return (
        spread_of(off, independent, len(keys) - 1),
        spread_of(rest, independent * (1 - 1 / there), freedom),
    )


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
        """Where the whole interval lies: above 0 is better, below 0 is below, anything else is unclear."""
        return "better" if self.points.low > 0 else "below" if self.points.high < 0 else "unclear"


class Results:
    """All finished blocks of a folder that the plan reports, by point and system."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.head = store.head()
        self.plan = SweepPlan.from_json(self.head["plan"])
        self.lines = store.finished()
        if not self.lines:
            raise SweepError(f"no block of {store.folder} is finished: there is nothing to show yet")
        groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for line in self.lines.values():
            if line["seed"] not in self.plan.seeds:
                continue  # lengths were chosen on it
            groups.setdefault((line["point"], line["policy"]), []).append(line)
        points: dict[Point, list[Outcome]] = {}
        for (name, policy), lines in groups.items():
            points.setdefault(Point.parse(name), []).append(self._outcome(Point.parse(name), policy, lines))
        self.outcomes = {(o.point, o.policy): o for here in points.values() for o in together(here)}

    def _outcome(self, point: Point, policy: str, lines: list[dict[str, Any]]) -> Outcome:
        records = [self.store.records(line["id"]) for line in lines]
        blocks = {
            (line["seed"], line["block"]): Block.of(of, line["duration_s"])
            for line, of in zip(lines, records, strict=True)
        }
        every = [r for of in records for r in of]
        duration_s = sum(line["duration_s"] for line in lines)
        of_all, by_class = class_summary(every, duration_s), class_summaries(every, duration_s)
        return Outcome(point, policy, tuple(lines), blocks, of_all, by_class)

    @property
    def default(self) -> str:
        """The policy that is judged: the server's default, or its substitute in this sweep."""
        measured = {p for _, p in self.outcomes}
        for name in (default_policy(), PUBLISHED[0]):
            if name in measured:
                return name
        return next((p for p in sorted(measured) if p not in (PLAIN, STOCK)), PLAIN)

    def on(self, axis: str) -> list[tuple[float, Point]]:
        """(x, point) of an axis, by x, where there are results; none of an axis that is not in the plan."""
        planned = self.plan.points(axis) if axis in self.plan.axes else []
        return sorted((pair for pair in planned if self.at(pair[1])), key=lambda pair: pair[0])

    def policies(self, axis: str) -> list[str]:
        """Policies of an axis that have a result somewhere on it, in the plan's order."""
        points = [p for _, p in self.on(axis)]
        return [n for n in self.plan.policies_of(axis) if any((p, n) in self.outcomes for p in points)]

    def get(self, point: Point, policy: str) -> Outcome | None:
        return self.outcomes.get((point, policy))

    def points(self) -> list[Point]:
        """Every point of the plan at which one of its systems has results, axis by axis."""
        planned = (p for axis in self.plan.axes for _, p in self.plan.points(axis))
        return [p for p in dict.fromkeys(planned) if self.at(p)]

    def at(self, point: Point) -> dict[str, Outcome]:
        """Systems of the plan at a point, in its order; not SGLang if it only plays beside `none`."""
        names = dict.fromkeys((*self.plan.policies, *self.plan.side_policies))
        return {n: o for n in names if (o := self.get(point, n)) is not None}

    def against_best(self, point: Point, policy: str) -> Comparison | None:
        """The policy against the best rival as it is."""
        here = self.at(point)
        rivals = [o for n, o in here.items() if is_rival(n, gated=False) and n != policy]
        return compare(here[policy], rivals) if policy in here else None

    def judged(self, gated: bool = False) -> Point | None:
        """The highest load at which the best rival still attains a third; None if no load is such."""
        best: dict[Point, float] = {}
        for _, point in self.on("load"):
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
        return float(np.median(ours)), float(np.median(theirs)), median_interval(ours / theirs)

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
    """On the blocks that both have; None if there are none."""
    keys = sorted(set(mine.blocks) & set(rival.blocks))
    if not keys:
        return None
    a, b = (Block.total(o.blocks[key] for key in keys) for o in (mine, rival))
    ours, theirs = mine.apart.share(a.attained, a.requests), rival.apart.share(b.attained, b.requests)
    met = np.array([[o.blocks[key].attained for key in keys] for o in (mine, rival)])
    every = np.array([[o.blocks[key].requests for key in keys] for o in (mine, rival)])
    more, less = (Interval(1 - s.value, 1 - s.high, 1 - s.low) for s in (theirs, ours))
    violations = Interval(math.inf if more.value else 1.0)
    if less.value:
        violations = ratio(more, less, _parts_off(*(every - met)))
    goodput = ratio(ours.scaled(a.goodput), theirs.scaled(b.goodput), _parts_off(*met))
    points = difference(ours, theirs)
    points = Interval(100 * points.value, 100 * points.low, 100 * points.high)
    return Comparison(mine.policy, rival.policy, points, violations, goodput)


def _parts_off(a: FloatArray, b: FloatArray) -> FloatArray:
    """``a``, ``b``: counts of two systems by block. How much larger a block's part of all of ``a`` is than of
    ``b``."""
    return a / max(1.0, a.sum()) - b / max(1.0, b.sum())
