"""How often what a source proposes is right: learned while serving, by cell.

The server knows every token that a request really emitted, so each proposed token whose parents were right
was tested, verified or not.
"""

from __future__ import annotations

from collections.abc import Iterable

LEAST = 0.03
"""Path probability below which a candidate is not worth proposing."""

WEIGHT, MOST = 4, 400
"""Tests that a start counts for, and tests that are remembered: older ones fade."""


class Rates:
    """Acceptance given that the parent was accepted, by cell. ``start``: what is thought of each at first."""

    def __init__(self, start: Iterable[float]) -> None:
        self.rate = list(start)
        self.tests = [WEIGHT] * len(self.rate)

    def learn(self, cell: int, hit: bool) -> None:
        """One test."""
        self.tests[cell] = tests = min(self.tests[cell] + 1, MOST)
        self.rate[cell] += (hit - self.rate[cell]) / tests
