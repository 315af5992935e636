"""What clients counted, in a form that can be sent between processes and added up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

KEPT = 20
"""Violations of one invariant that are kept with their details; all are counted."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken invariant."""

    invariant: str
    text: str
    at_s: float  # seconds since the epoch


@dataclass
class Tally:
    """Counts of some clients over some time."""

    requests: Counter[str] = field(default_factory=Counter)  # HTTP requests that came to an end, by kind
    statuses: Counter[int] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    streams: int = 0
    compared: int = 0  # answers that were compared with a reference
    # By SLO class: sequences that were answered to the end, and those that may have been or not.
    served: Counter[str] = field(default_factory=Counter)
    served_tokens: Counter[str] = field(default_factory=Counter)
    maybe: Counter[str] = field(default_factory=Counter)
    maybe_tokens: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    violations: list[Violation] = field(default_factory=list)
    violated: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        for name in (
            "requests", "statuses", "ends", "served", "served_tokens", "maybe", "maybe_tokens", "violated",
        ):  # fmt: skip
            getattr(self, name).update(getattr(other, name))
        self.streams += other.streams
        self.compared += other.compared
        self.slowest_s = max(self.slowest_s, other.slowest_s)
        for violation in other.violations:
            self._keep(violation)

    def violate(self, invariant: str, text: str, at_s: float) -> None:
        self.violated[invariant] += 1
        self._keep(Violation(invariant, text, at_s))

    def _keep(self, violation: Violation) -> None:
        if sum(v.invariant == violation.invariant for v in self.violations) < KEPT:
            self.violations.append(violation)

    @property
    def total(self) -> int:
        return self.requests.total()
