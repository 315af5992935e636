"""What a sweep measures: points on axes, policies and seeds, in the order in which they run."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from adaserve.bench.sweep.kinds import KINDS
from adaserve.bench.sweep.systems import AS_IT_IS, GATED, PLAIN, STOCK, family, with_length
from adaserve.errors import UserError
from adaserve.slo.classes import PAPER_MIX

AXES = ("load", "peaks", "share", "scale", "kinds", "traces")
SIDE_POLICIES = ("chain", "adaptive-verify", "urgency", "turbospec", "adaserve", "priced", STOCK)
QUICK_POLICIES = ("turbospec", "priced")
TUNING_SEED = 1_000_003
"""Lengths are chosen on it; nothing else is measured on it."""
PAPER_SHARE, PAPER_SCALE = PAPER_MIX["coding"], 1.2
"""Share of coding requests, and their SLO over the baseline latency."""
PROMPT_SCALE = 0.11
"""Prompts over those of the paper. There a prompt token costs a 160th of a decode iteration (a 70B model on
four A100s: 0.19 of 30 ms), on two CPU cores an 18th (0.8 of 14.4 ms). Shortened by that ratio, a prompt stops
the decoding requests for as many iterations as in the paper.
"""
_MOST = {"loads": 20, "at": 20, "shares": 1, "scales": 100, "prompt_scale": 10, "output_scale": 10}
"""The largest values of a plan's fields; all are above 0."""
MAX_TOKENS = 512
"""What requests state as ``max_tokens``: a loose bound, as clients give it. Answers end by themselves."""


class SweepError(UserError, ValueError):
    """A sweep cannot run as requested; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Point:
    """One setting of the traffic."""

    load: float  # offered requests/s over what plain decoding can serve here at most
    urgent: float | None = None  # share of urgent requests; None = as the workload has it
    scale: float | None = None  # SLO of the urgent class over the baseline latency; None = as configured
    peaks: bool = False  # classes peak in turn
    kind: str | None = None  # one of KINDS, or the name of a trace

    @property
    def id(self) -> str:
        parts = [f"load{_shown(self.load)}"]
        if self.urgent is not None:
            parts.append(f"urgent{_shown(self.urgent)}")
        if self.scale is not None:
            parts.append(f"scale{_shown(self.scale)}")
        kind = "" if self.kind is None else f"={self.kind}"
        return "-".join(parts + ["peaks"] * self.peaks) + kind

    @classmethod
    def parse(cls, text: str) -> Point:
        """The inverse of ``id``."""
        numbers, _, kind = text.partition("=")
        values: dict[str, Any] = {"peaks": False, "kind": kind or None}
        for part in numbers.split("-"):
            name = part.rstrip("0123456789.")
            values[name] = True if name == "peaks" else float(part[len(name) :])
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Case:
    """One block: a point, a system, a seed, and which part of the seed's requests."""

    point: Point
    policy: str  # name of a system; a family stands for its best length
    seed: int
    block: int = 0

    @property
    def id(self) -> str:
        return f"{self.point.id}.{self.policy}.s{self.seed}.b{self.block}"

    @property
    def names(self) -> dict[str, Any]:
        """What its line of ``cases.jsonl`` begins with."""
        ids = {"id": self.id, "point": self.point.id}
        return ids | {"policy": self.policy, "seed": self.seed, "block": self.block}


@dataclass(frozen=True)
class SweepPlan:
    """Everything that decides what is measured; written to ``sweep.json`` and compared on resuming."""

    axes: tuple[str, ...] = ("load",)  # an hour on two cores is enough for this one
    policies: tuple[str, ...] = AS_IT_IS + GATED  # systems on the load axis
    side_policies: tuple[str, ...] = SIDE_POLICIES  # on the others
    loads: tuple[float, ...] = (0.3, 0.6, 1.0)
    at: float = 0.6  # load of the other axes
    shares: tuple[float, ...] = (0.3, 0.6, 0.9)
    scales: tuple[float, ...] = (1.6, 1.4, 1.2, 1.0, 0.8, 0.6)
    kinds: tuple[str, ...] = tuple(KINDS)
    traces: tuple[str, ...] = ()  # files
    lengths: tuple[int, ...] = (2, 4)  # that families choose from
    seeds: tuple[int, ...] = (0, 1, 2)
    blocks: int = 1  # per point and seed; three times as many for peaks
    seconds: float = 20.0  # of arrivals per block
    check_plain: bool = True  # compare `none` with SGLang without speculation
    trace: str | None = None
    slo_config: str | None = None
    prompt_scale: float = PROMPT_SCALE
    output_scale: float = 0.5
    temperature: float = 0.8  # of every class; 0 is greedy
    max_tokens: int = MAX_TOKENS  # as requests state it; 0: exactly where their answers end

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            given = getattr(self, name)
            for value in given if isinstance(given, tuple) else (given,):
                if not 0 < value <= most:
                    raise SweepError(f"--{name.replace('_', '-')} must lie in (0, {most}], not {value:g}")
        self._check_axes()
        if TUNING_SEED in self.seeds:
            raise SweepError(f"seed {TUNING_SEED} is the one that lengths are chosen on: take another one")
        for name in ("axes", "policies"):
            if not getattr(self, name):
                raise SweepError(f"--{name} is empty: give at least one value")
        for name in ("seconds", "blocks"):
            if getattr(self, name) < 1:
                raise SweepError(f"--{name} must be at least 1")

    def _check_axes(self) -> None:
        if unknown := sorted(set(self.axes) - set(AXES)):
            raise SweepError(f"unknown axis {unknown[0]!r}: known are {', '.join(AXES)}")
        if unknown := sorted(set(self.kinds) - set(KINDS)):
            raise SweepError(f"unknown kind of traffic {unknown[0]!r}: known are {', '.join(KINDS)}")
        names = [*KINDS, *map(trace_name, self.traces)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise SweepError(f"two kinds of traffic are called {twice[0]!r}: rename the trace's file")
        for axis in self.axes:
            if not self.points(axis):
                raise SweepError(f"the axis {axis} has no point: give --{axis}")

    @property
    def stated_max_tokens(self) -> int | None:
        """``max_tokens`` of all requests; None if each has its own, exact one."""
        return self.max_tokens or None

    @property
    def own_scale(self) -> float | None:
        """The multiple of the baseline that the urgent class has anyway; None if a file decides it."""
        return PAPER_SCALE if self.slo_config is None else None

    @property
    def own_share(self) -> float | None:
        """The share of urgent requests that the workload has anyway; None if a file decides it."""
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
            case "kinds":
                return [(self.at, replace(base, kind=kind)) for kind in self.kinds]
            case _:  # traces
                return [(self.at, replace(base, kind=trace_name(path))) for path in self.traces]

    def policies_of(self, axis: str) -> tuple[str, ...]:
        return self.policies if axis == "load" else self.side_policies

    def cases(self) -> list[Case]:
        """Every block once. Seeds outermost, then the axes as given, the highest load first: whatever ends a
        sweep early, what is there is whole. All systems play a block, in random order, before the next."""
        found: dict[Case, None] = {}
        for seed in self.seeds:
            for axis in self.axes:
                for _, point in sorted(self.points(axis), key=lambda p: -p[1].load):
                    for block in range(self.blocks_of(point)):
                        names = list(self.policies_of(axis))
                        if (seed, block) == (self.seeds[0], 0) and point in self.check_points:
                            names = list(dict.fromkeys((*names, STOCK)))
                        random.Random(f"{seed} {block} {point.id}").shuffle(names)
                        found.update(dict.fromkeys(Case(point, name, seed, block) for name in names))
        return list(found)

    def tuning_cases(self) -> list[Case]:
        """Every length of every system that has one to choose, at each load at which it plays."""
        played = {(c.point.load, c.policy): None for c in self.cases() if family(c.policy)}
        found = []
        for load in sorted({load for load, _ in played}, reverse=True):
            names = [name for at, name in played if at == load]
            here = [with_length(name, k) for name in names for k in self.lengths]
            random.Random(f"lengths {load}").shuffle(here)
            found += [Case(Point(load), name, TUNING_SEED) for name in here]
        return found

    def blocks_in_order(self) -> list[Case]:
        """What is measured: first what lengths are chosen by, then what is reported."""
        return [*self.tuning_cases(), *self.cases()]

    @property
    def check_points(self) -> list[Point]:
        """Where `none` is compared with SGLang without speculation, which plays a block beside it: at both
        ends of the load axis. Empty if they are not compared."""
        if not self.check_plain or "load" not in self.axes or PLAIN not in self.policies:
            return []
        return [Point(load) for load in sorted({min(self.loads), max(self.loads)})]

    def blocks_of(self, point: Point) -> int:
        """Blocks per seed; if three classes peak in turn, each has its own."""
        return 3 * self.blocks if point.peaks else self.blocks

    def trace_of(self, point: Point) -> str | None:
        """The file that the point's requests come from; None without one."""
        if point.kind is None or point.kind in KINDS:
            return self.trace
        return next(path for path in self.traces if trace_name(path) == point.kind)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SweepPlan:
        known = {f.name for f in fields(cls)}
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        values.setdefault("max_tokens", 0)  # the only way before there was a choice
        return cls(**{k: v for k, v in values.items() if k in known})


def trace_name(path: str) -> str:
    """The file's name without its endings, as it stands in a point's name."""
    name = Path(path)
    while name.suffix[1:].isalpha():
        name = name.with_suffix("")
    return name.name


def _shown(value: float) -> str:
    """Two digits, or as many as it takes."""
    short = f"{value:.2f}"
    return short if float(short) == value else np.format_float_positional(value)


def _unless(value: float, own: float | None) -> float | None:
    return None if own is not None and abs(value - own) < 1e-9 else value
