"""How long the rest of a sweep will take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Eta:
    """Expects every case to take as long as its arrivals, and what cases so far took on top on average."""

    arrivals_s: float
    overhead_s: float = 12.0  # a first guess
    seen: int = 0

    @property
    def case_s(self) -> float:
        """What a case is expected to take."""
        return self.arrivals_s + self.overhead_s

    def learn(self, took_s: float) -> None:
        """Takes in how long a case has taken."""
        self.seen += 1
        self.overhead_s += (max(0.0, took_s - self.arrivals_s) - self.overhead_s) / self.seen
