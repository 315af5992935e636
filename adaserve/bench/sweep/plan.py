"""What a sweep measures: points on axes, policies and seeds, in the order in which they run."""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from adaserve.config import AdaServeConfig
from adaserve.scheduler.policies import chain_length, is_slo_aware

AXES = ("load", "scale", "share", "peaks")
PLAIN = "none"
STOCK = "sglang"
"""Name under which SGLang without speculation appears beside the policies."""
ALL_POLICIES = (
    PLAIN, "chain-2", "chain-4", "chain-6", "fixed-tree", "equal-greedy", "global-greedy", "turbospec",
    "adaserve-v1", "adaserve", "priced",
)  # fmt: skip
SIDE_POLICIES = (PLAIN, "chain-4", "turbospec", "adaserve", "priced")
QUICK_POLICIES = (PLAIN, "chain-4", "adaserve", "priced")
PAPER_SHARE, PAPER_SCALE = 0.6, 1.2
"""Share of coding requests, and their SLO over the baseline latency."""
PROMPT_SCALE = 0.11
"""Prompts over those of the paper. There a prompt token costs a 160th of a decode iteration (a 70B model on
four A100s: 0.19 of 30 ms), on two CPU cores an 18th (0.8 of 14.4 ms). Shortened by that ratio, a prompt stops
the decoding requests for as many iterations as in the paper.
"""


class SweepError(ValueError):
    """A sweep cannot run as requested; the message says what to change."""


def default_policy() -> str:
    """The policy that ``adaserve serve`` uses unless told otherwise."""
    return AdaServeConfig().policy


def slo_aware(policy: str) -> bool:
    return is_slo_aware(policy) or policy == default_policy()


def is_baseline(policy: str) -> bool:
    """Whether it is a policy of this engine that ignores SLOs (a bound of the simulator is not)."""
    known = policy in ALL_POLICIES or chain_length(policy) is not None
    return known and not slo_aware(policy)


@dataclass(frozen=True, slots=True)
class Point:
    """One setting of the traffic."""

    load: float  # offered requests/s over what plain decoding can serve here at most
    urgent: float | None = None  # share of urgent requests; None = as the workload has it
    scale: float | None = None  # SLO of the urgent class over the baseline latency; None = as configured
    peaks: bool = False  # classes peak in turn

    @property
    def id(self) -> str:
        parts = [f"load{self.load:.2f}"]
        if self.urgent is not None:
            parts.append(f"urgent{self.urgent:.2f}")
        if self.scale is not None:
            parts.append(f"scale{self.scale:.2f}")
        return "-".join(parts + ["peaks"] * self.peaks)

    @classmethod
    def parse(cls, text: str) -> Point:
        """The inverse of ``id``."""
        values: dict[str, Any] = {"peaks": False}
        for part in text.split("-"):
            name = part.rstrip("0123456789.")
            values[name] = True if name == "peaks" else float(part[len(name) :])
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Case:
    """One run: a point, a policy, a seed."""

    point: Point
    policy: str
    seed: int

    @property
    def id(self) -> str:
        return f"{self.point.id}.{self.policy}.s{self.seed}"


@dataclass(frozen=True)
class SweepPlan:
    """Everything that decides what is measured; written to ``sweep.json`` and compared on resuming."""

    axes: tuple[str, ...] = AXES
    policies: tuple[str, ...] = ALL_POLICIES  # on the load axis
    side_policies: tuple[str, ...] = SIDE_POLICIES  # on the others
    loads: tuple[float, ...] = (0.3, 0.45, 0.6, 0.75)
    at: float = 0.6  # load of the other axes
    shares: tuple[float, ...] = (0.3, 0.6, 0.9)
    scales: tuple[float, ...] = (1.6, 1.4, 1.2, 1.0, 0.8, 0.6)
    seeds: tuple[int, ...] = (0,)
    seconds: float = 30.0  # of arrivals per case; twice that for peaks
    check_plain: bool = True  # compare `none` with SGLang without speculation
    trace: str | None = None
    slo_config: str | None = None
    prompt_scale: float = PROMPT_SCALE
    output_scale: float = 0.5
    temperature: float = 0.8  # of every class; 0 is greedy

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.axes) - set(AXES)):
            raise SweepError(f"unknown axis {unknown[0]!r}: known are {', '.join(AXES)}")
        for name, low, high in (("loads", 0, 20), ("shares", 0, 1), ("scales", 0, 100)):
            for value in getattr(self, name):
                if not low < value <= high:
                    raise SweepError(f"{name}: every value must lie in ({low}, {high}], not {value:g}")
        for name in ("axes", "policies", "seeds", "loads"):
            if not getattr(self, name):
                raise SweepError(f"--{name} is empty: give at least one value")
        for name, most in (("at", 20), ("prompt_scale", 10), ("output_scale", 10)):
            if not 0 < getattr(self, name) <= most:
                raise SweepError(f"--{name.replace('_', '-')} must lie in (0, {most}]")
        if not 1 <= self.seconds < math.inf:
            raise SweepError("--seconds must be at least 1")

    @property
    def own_scale(self) -> float | None:
        """The multiple of the baseline that the urgent class has anyway; None where a file decides it."""
        return PAPER_SCALE if self.slo_config is None else None

    @property
    def own_share(self) -> float | None:
        """The share of urgent requests that the workload has anyway; None where a file decides it."""
        return PAPER_SHARE if self.trace is None and self.slo_config is None else None

    def points(self, axis: str) -> list[tuple[float, Point]]:
        """(x, point) of an axis. A value that the traffic has anyway gives the point of the load axis."""
        base = Point(self.at)
        match axis:
            case "load":
                return [(load, Point(load)) for load in self.loads]
            case "share":
                return [
                    (share, replace(base, urgent=_unless(share, self.own_share))) for share in self.shares
                ]
            case "scale":
                return [(scale, replace(base, scale=_unless(scale, self.own_scale))) for scale in self.scales]
            case "peaks":
                return [(self.at, replace(base, peaks=True))]
        raise SweepError(f"unknown axis {axis!r}")

    def policies_of(self, axis: str) -> tuple[str, ...]:
        return self.policies if axis == "load" else self.side_policies

    def cases(self) -> list[Case]:
        """Every case once. Seeds outermost, then the axes as given, the highest load first: whatever
        ends a sweep early, what is there is whole. Policies of a point in random order."""
        found: dict[Case, None] = {}
        for seed in self.seeds:
            for axis in self.axes:
                for _, point in sorted(self.points(axis), key=lambda p: -p[1].load):
                    names = list(self.policies_of(axis))
                    random.Random(f"{seed} {point.id}").shuffle(names)
                    found.update(dict.fromkeys(Case(point, name, seed) for name in names))
        return list(found)

    def check_cases(self) -> list[Case]:
        """Cases of SGLang without speculation: the lowest and the highest load, first seed."""
        if not self.check_plain or "load" not in self.axes or PLAIN not in self.policies:
            return []
        return [
            Case(Point(load), STOCK, self.seeds[0]) for load in sorted({min(self.loads), max(self.loads)})
        ]

    def seconds_of(self, point: Point) -> float:
        """Seconds during which requests arrive."""
        return 2 * self.seconds if point.peaks else self.seconds

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SweepPlan:
        known = {f.name for f in fields(cls)}
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return cls(**{k: v for k, v in values.items() if k in known})


def _unless(value: float, own: float | None) -> float | None:
    return None if own is not None and abs(value - own) < 1e-9 else value
