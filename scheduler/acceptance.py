"""Acceptance, observed online: which nodes were tested at all, decayed rates, and what a rate promises."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from adaserve.scheduler.interface import (
    DRAFTED,
    BoolArray,
    CandidateTrees,
    FloatArray,
    IntArray,
    IterationOutcome,
)
from adaserve.scheduler.keyed_arrays import Table
from adaserve.scheduler.selection import and_root


@dataclass(frozen=True, slots=True)
class Tested:
    """The nodes of one iteration that were tested: kept, and their parent accepted.

    Censoring: a node below a rejected one was never tried. Counting it as rejected is the bias of
    accepted / proposed.
    """

    node: IntArray  # [t] flat index, rising
    row: IntArray  # [t]
    accepted: BoolArray  # [t]
    tried: IntArray  # [n] levels tried: their parent was accepted and at least one child was kept
    passed: IntArray  # [n] levels where a child was accepted; passed / tried is TurboSpec's acceptance


@dataclass(frozen=True, slots=True)
class Verified:
    """Candidate trees and what their verification said."""

    trees: CandidateTrees
    keep: BoolArray  # [m]
    accepted: BoolArray  # [m]

    @staticmethod
    def of(outcomes: Sequence[IterationOutcome]) -> Verified:
        """Several iterations of one batch, stacked, because learning from a few nodes at a time is too
        slow."""
        if len(outcomes) == 1:
            only = outcomes[0]
            return Verified(only.trees, only.selection.keep, only.accepted)
        join = np.concatenate
        return Verified(
            _joined([o.trees for o in outcomes]),
            join([o.selection.keep for o in outcomes]),
            join([o.accepted for o in outcomes]),
        )


def _joined(trees: Sequence[CandidateTrees]) -> CandidateTrees:
    """Trees of as many rows each, without their tokens."""
    join = np.concatenate
    starts = join([t.row_start for t in trees]).reshape(len(trees), -1)
    ends = starts[:, -1].cumsum()
    starts[1:] += ends[:-1, None]
    parent = join([t.parent for t in trees])
    return CandidateTrees(
        row_start=np.append(starts[:, :-1], ends[-1]),
        token=np.zeros_like(parent),
        parent=parent,
        depth=join([t.depth for t in trees]),
        logprob=join([t.logprob for t in trees]),
        source=None if all(t.source is None for t in trees) else join([t.sources for t in trees]),
    )


def find_tested(outcome: IterationOutcome) -> Tested:
    """What an iteration tested."""
    return find_tested_in(Verified.of([outcome]))


def find_tested_in(seen: Verified) -> Tested:
    """What was tested."""
    trees, rows = seen.trees, seen.trees.row
    node = np.flatnonzero(seen.keep & and_root(seen.accepted, True).take(trees.above))
    row = rows[node]
    accepted, depth = seen.accepted.take(node), trees.depth.take(node)
    tried, passed = np.zeros((2, trees.n_rows), np.int64)
    # A row's nodes are ordered by depth, and the last assignment stays: the deepest one.
    tried[row] = depth
    passed[row[accepted]] = depth[accepted]
    return Tested(node, row, accepted, tried, passed)


def drafted_of(tests: Tested, seen: Verified) -> Tested:
    """The tested nodes of ``seen`` that draft steps made: offers say nothing about a draft."""
    if seen.trees.source is None:
        return tests
    mine, n = seen.trees.source[tests.node] & DRAFTED > 0, seen.trees.n_rows
    node, row, accepted = tests.node[mine], tests.row[mine], tests.accepted[mine]
    depth = seen.trees.depth[node]
    begins = np.append(True, (row[1:] != row[:-1]) | (depth[1:] != depth[:-1]))[: len(node)]  # a level
    tried, passed = (np.bincount(row[of], minlength=n) for of in (begins, accepted))
    return Tested(node, row, accepted, tried, passed)


class AcceptanceRate:
    """How often the tokens of a level are accepted if their parents were, over all requests; recent ones
    count more."""

    DECAY = 0.98  # per ``observe``

    def __init__(self) -> None:
        self._passed, self._tried = 4.0 * 0.7, 4.0

    def observe(self, tried: IntArray, passed: IntArray) -> None:
        """Adds the levels of one iteration or of several, [n] or more."""
        if levels := int(np.add.reduce(tried)):
            self._passed = self.DECAY * self._passed + int(np.add.reduce(passed))
            self._tried = self.DECAY * self._tried + levels

    @property
    def value(self) -> float:
        return self._passed / self._tried


class AcceptanceRates:
    """Level acceptance per request, per class and global, each shrunk towards the next wider one."""

    CLASS_PRIOR, CLASS_DECAY = 12.0, 0.98
    REQUEST_PRIOR, REQUEST_DECAY = 24.0, 0.96
    """Trust in the wider rate, in levels: ways to draft differ little, and a request's own rate is
    noisy. Decays are per observed iteration."""

    def __init__(self) -> None:
        self._all = AcceptanceRate()
        self._classes, self._requests = Table(2), Table(2)  # passed, tried

    def observe(self, rids: Iterable[str], classes: Iterable[str], tried: IntArray, passed: IntArray) -> None:
        """Adds one iteration; rows without tested nodes are skipped."""
        trying = np.count_nonzero(tried)
        if not trying:
            return
        self._all.observe(tried, passed)
        rows, number = self._requests.rows(rids), self._classes.rows(classes)
        if trying < len(tried):
            some = np.flatnonzero(tried)
            rows, number, tried, passed = rows[some], number[some], tried[some], passed[some]
        mine = self._requests.values[rows]
        mine *= self.REQUEST_DECAY
        mine[:, 0] += passed
        mine[:, 1] += tried
        self._requests.values[rows] = mine
        sums = self._classes.values
        seen = np.bincount(number, tried, len(sums))
        sums[seen > 0] *= self.CLASS_DECAY
        sums[:, 0] += np.bincount(number, passed, len(sums))
        sums[:, 1] += seen

    def of_rows(self, rids: Iterable[str], classes: Iterable[str]) -> FloatArray:
        """Rates per row, [n], within [0.01, 0.99]."""
        group, mine = self._classes.of(classes), self._requests.of(rids)
        rate = (group[:, 0] + self.CLASS_PRIOR * self._all.value) / (group[:, 1] + self.CLASS_PRIOR)
        out = mine[:, 0] + self.REQUEST_PRIOR * rate
        out /= mine[:, 1] + self.REQUEST_PRIOR
        return np.minimum(np.maximum(out, 0.01), 0.99)

    def forget(self, rid: str) -> None:
        """Drops a finished request."""
        self._requests.forget(rid)


def expected_accept_length(acc: float | FloatArray, k: int | IntArray) -> FloatArray:
    """Tokens of a chain of k, bonus included, whose proposals are accepted with probability ``acc`` each if
    those before them were: (1 - acc^(k+1)) / (1 - acc); k + 1 if acc = 1."""
    a, steps = np.asarray(acc, np.float64), np.asarray(k, np.float64)
    safe = np.where(a < 1, 1 - a, 1.0)
    return np.where(a < 1, (1 - a ** (steps + 1)) / safe, steps + 1)
