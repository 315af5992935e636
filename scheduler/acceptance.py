"""Acceptance, observed online: which nodes were tested at all, and decayed rates from them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from adaserve.scheduler.interface import BoolArray, FloatArray, IntArray, IterationOutcome
from adaserve.scheduler.selection import parent_kept


def nodes_tested(outcome: IterationOutcome) -> BoolArray:
    """Kept nodes whose parent was accepted, [m].

    Censoring: a node below a rejected one was never tried. Counting it as rejected is the bias of
    accepted / proposed (trap f of the TurboSpec digest).
    """
    if outcome.tested is not None:
        return outcome.tested
    return outcome.selection.keep & parent_kept(outcome.trees, outcome.accepted)


def level_tests(outcome: IterationOutcome, tested: BoolArray) -> tuple[IntArray, IntArray]:
    """Per row: levels tried and levels passed, [n] each; ``tested`` [m] from ``nodes_tested``.

    A level is tried when its parent was accepted and at least one child was kept; it passes when one
    of the children is accepted. The ratio is the acceptance probability of the TurboSpec formula.
    """
    start, depth = outcome.trees.row_start[:-1], outcome.trees.depth
    filled = np.diff(outcome.trees.row_start) > 0
    # One path is accepted. The level after its end was tried iff a node there was tested.
    passed = np.where(filled, np.maximum.reduceat(np.append(depth * outcome.accepted, 0), start), 0)
    deepest = np.where(filled, np.maximum.reduceat(np.append(depth * tested, 0), start), 0)
    return np.maximum(deepest, passed), passed


class AcceptanceRates:
    """Level acceptance per request, per class and global, each shrunk towards the next wider one."""

    REQUEST_PRIOR = 6.0  # levels' worth of trust in the class rate
    CLASS_PRIOR = 12.0
    DECAY = 0.98  # per observed iteration, class and global

    def __init__(self, start: float = 0.7) -> None:
        self._global = np.array([4.0 * start, 4.0])
        self._classes: dict[str, FloatArray] = {}
        self._requests: dict[str, list[float]] = {}

    def observe(self, rids: Iterable[str], classes: Iterable[str], tried: IntArray, passed: IntArray) -> None:
        """Adds one iteration; rows that tried nothing teach nothing."""
        if not tried.any():
            return
        self._global = self.DECAY * self._global + (float(passed.sum()), float(tried.sum()))
        seen: dict[str, list[float]] = {}
        for rid, slo_class, t, p in zip(rids, classes, tried.tolist(), passed.tolist(), strict=True):
            if t == 0:
                continue
            mine = self._requests.setdefault(rid, [0.0, 0.0])
            mine[0], mine[1] = 0.96 * mine[0] + p, 0.96 * mine[1] + t
            total = seen.setdefault(slo_class, [0.0, 0.0])
            total[0] += p
            total[1] += t
        for slo_class, total in seen.items():
            old = self._classes.get(slo_class, np.zeros(2))
            self._classes[slo_class] = self.DECAY * old + total

    @property
    def overall(self) -> float:
        """Global level acceptance."""
        return float(self._global[0] / self._global[1])

    def of_class(self, slo_class: str) -> float:
        """Class rate, shrunk towards the global one."""
        passed, tried = self._classes.get(slo_class, (0.0, 0.0))
        return float((passed + self.CLASS_PRIOR * self.overall) / (tried + self.CLASS_PRIOR))

    def of_rows(self, rids: Iterable[str], classes: Iterable[str]) -> FloatArray:
        """Rates per row, [n], within [0.01, 0.99]."""
        memo: dict[str, float] = {}
        out = []
        for rid, slo_class in zip(rids, classes, strict=True):
            if slo_class not in memo:
                memo[slo_class] = self.of_class(slo_class)
            passed, tried = self._requests.get(rid, (0.0, 0.0))
            out.append((passed + self.REQUEST_PRIOR * memo[slo_class]) / (tried + self.REQUEST_PRIOR))
        return np.clip(np.asarray(out, np.float64), 0.01, 0.99)

    def forget(self, rid: str) -> None:
        """Drops a finished request."""
        self._requests.pop(rid, None)
