"""Online calibration of draft probabilities: how often tokens with a claimed probability q were really
accepted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from adaserve.scheduler.compiled import FLOAT_TABLE, FLOATS, INTS, compiled
from adaserve.scheduler.interface import DRAFTED, BoolArray, CandidateTrees, FloatArray, IntArray
from adaserve.scheduler.keyed_arrays import NameIds, Table
from adaserve.scheduler.selection import and_root

N_BINS = 20  # equal bins of the claimed q: finding a bin is one multiplication
MIDDLE = (np.arange(N_BINS) + 0.5) / N_BINS
GROUPS = 5
"""Bins are kept apart for candidates that were drafted, that were offered, that were both, that the second
draft model made, and that two draft models agree on."""
_GROUP = np.array([1, 0, 3, 4, 1, 2, 2, 2])
"""Group by the bits of the draft models, plus 4 if it was offered."""
_PLACES = N_BINS + 1  # of a group: q = 1 falls past the last bin
_WITH_ONE = np.minimum(np.arange(_PLACES), N_BINS - 1) + N_BINS * np.arange(GROUPS)[:, None]
CEILING = 0.985  # no token is certain; also keeps f strictly falling along a path


def bin_of(q: FloatArray) -> IntArray:
    """Bin of each claimed probability."""
    bins: IntArray = np.minimum((q * N_BINS).astype(np.int64), N_BINS - 1)
    return bins


def group_of(trees: CandidateTrees) -> IntArray | None:
    """Group of every node, [m]; None = all were drafted."""
    if trees.source is None:
        return None
    groups: IntArray = _GROUP[(trees.source & DRAFTED) + 4 * (trees.source > DRAFTED)]
    return groups


def claimed_probability(trees: CandidateTrees) -> FloatArray:
    """q(v | path of its parent): the draft's own one-step probability of every node, [m]; 0 for NaN."""
    with np.errstate(invalid="ignore"):  # two impossible nodes, one below the other
        step = trees.logprob - and_root(trees.logprob, 0.0).take(trees.above)
    q: FloatArray = np.fmax(np.exp(np.minimum(step, 0.0)), 0.0)
    return q


@compiled(FLOATS, INTS)
def path_product(p: FloatArray, above: IntArray) -> FloatArray:
    """Product of ``p`` [m] from the root's child to every node; ``above``: ``CandidateTrees.above``."""
    m = len(p)
    f = p.copy()
    for i in range(m):
        if above[i] < m:
            f[i] *= f[above[i]]
    return f


@compiled(INTS, INTS, FLOATS, INTS, FLOAT_TABLE)
def _path_values(
    row_start: IntArray, parent: IntArray, logprob: FloatArray, group: IntArray, factors: FloatArray
) -> FloatArray:
    """``group``: of every node, or nothing where all are of the first one."""
    f = np.empty(len(logprob))
    for r in range(len(row_start) - 1):
        for i in range(row_start[r], row_start[r + 1]):
            step, path = logprob[i], 1.0
            if parent[i] >= 0:
                step, path = step - logprob[row_start[r] + parent[i]], f[row_start[r] + parent[i]]
            q = 0.0 if np.isnan(step) else np.exp(min(step, 0.0))  # not a number: both are impossible
            place = int(q * N_BINS) + (group[i] * _PLACES if len(group) else 0)
            f[i] = min(factors[r, place] * q, CEILING) * path
    return f


class Calibrator:
    """``p = min(.985, q * k_bin * k_req)`` and ``f(v)`` = product of p along the path.

    ``k_bin = (accepted + prior) / (claimed + prior)`` per class, group and bin of q, decayed; only tested
    nodes count. ``k_req`` is the same per request, with a stronger prior.
    """

    BIN_PRIOR = 4.0
    REQUEST_PRIOR = 12.0
    REQUEST_DECAY = 0.98
    HALF_LIFE_TESTS = 4000.0

    def __init__(self) -> None:
        self._numbers = NameIds()
        self._sums: FloatArray = np.zeros((3, 0, GROUPS * N_BINS))  # accepted, claimed, tests
        self._factors: FloatArray = np.zeros((0, GROUPS * _PLACES))
        self._requests = Table(2)  # accepted, expected
        self._batch: tuple[Sequence[str], FloatArray] | None = None  # rids and their factors
        self._passed = 0  # iterations without candidates since the last tests

    def _ids(self, classes: Sequence[str]) -> IntArray:
        numbers = self._numbers.of(classes)
        missing = len(self._numbers) - self._sums.shape[1]
        if missing:
            self._sums = np.concatenate([self._sums, np.zeros((3, missing, GROUPS * N_BINS))], axis=1)
            self._refresh()
        return numbers

    def _refresh(self) -> None:
        prior = self.BIN_PRIOR * np.tile(MIDDLE, GROUPS)
        self._batch = None
        factors = self._sums[0] + prior
        factors /= self._sums[1] + prior
        self._factors = factors.take(_WITH_ONE.ravel(), axis=1)

    def factors(self) -> FloatArray:
        """k_bin of every class and bin of drafted candidates, [classes, N_BINS]."""
        return self._factors[:, :N_BINS]

    def request_factors(self, rids: Sequence[str]) -> FloatArray:
        """k_req per row, [n]."""
        sums = self._requests.of(rids)
        sums += self.REQUEST_PRIOR
        factors: FloatArray = sums[:, 0] / sums[:, 1]
        return factors

    def batch_factors(self, rids: Sequence[str], classes: Sequence[str]) -> FloatArray:
        """k_bin x k_req, [n, GROUPS * (N_BINS + 1)]; kept until something was learned or another batch."""
        if self._batch is None or self._batch[0] != rids:
            ids = self._ids(classes)
            factor = self._factors.take(ids, axis=0)
            factor *= self.request_factors(rids)[:, None]
            self._batch = rids, factor
        return self._batch[1]

    def path_values(self, trees: CandidateTrees, rids: Sequence[str], classes: Sequence[str]) -> FloatArray:
        """Calibrated f(v) of every node, [m]."""
        factors, group = self.batch_factors(rids, classes), group_of(trees)
        group = np.zeros(0, np.int64) if group is None else group
        f: FloatArray = _path_values(trees.row_start, trees.parent, trees.logprob, group, factors)
        return f

    def observe(
        self,
        q: FloatArray,
        row: IntArray,
        accepted: BoolArray,
        rids: Sequence[str],
        classes: Sequence[str],
        group: IntArray | None = None,
    ) -> None:
        """Adds tested nodes: what the draft claimed, the row of ``rids`` they belong to, how it went, and
        their groups if not all were drafted; [t]."""
        if not q.size:
            return
        bins = bin_of(q)
        number, groups = self._ids(classes).take(row), 0 if group is None else group
        # Correct by class first, then by request: otherwise both would correct the same error.
        believed = q * self._factors[number, bins + groups * _PLACES]
        np.minimum(believed, CEILING, out=believed)
        self._add(number, groups * N_BINS + bins, q, accepted)
        n = len(rids)
        due = np.bincount(row, believed, n)
        sums = self._requests.of(rids)
        # Without tests they forget as well: what is priced so low that nothing of it is tested would stay so.
        sums *= self.REQUEST_DECAY ** (1 + self._passed)
        self._passed = 0
        sums[:, 0] += np.bincount(row, accepted, n)
        sums[:, 1] += due
        self._requests.values[self._requests.rows(rids)] = sums

    def pass_over(self) -> None:
        """An iteration without candidates. Requests forget meanwhile; otherwise only rare trials could
        correct them."""
        self._passed += 1

    def _add(self, number: IntArray, cell: IntArray, q: FloatArray, hit: BoolArray) -> None:
        """Each class forgets by its own tests: otherwise a rare class would forget everything beside a busy
        one."""
        tests = np.bincount(number, minlength=self._sums.shape[1])
        self._sums *= 0.5 ** (tests[:, None] / self.HALF_LIFE_TESTS)
        flat, cell = self._sums.reshape(3, -1), cell + number * (GROUPS * N_BINS)
        size = flat.shape[1]
        flat[0] += np.bincount(cell, hit, size)
        flat[1] += np.bincount(cell, q, size)
        flat[2] += np.bincount(cell, minlength=size)
        self._refresh()

    def reliability(self) -> dict[str, FloatArray]:
        """Reliability curve per class, of drafted candidates, [bins, 3]: mean claimed q, observed acceptance,
        tests; bins that are not empty. Classes of which no candidate was tested have none."""
        curves: dict[str, FloatArray] = {}
        for name, i in self._numbers.of_name.items():
            sums = self._sums[:, i, :N_BINS]
            accepted, claimed, tests = sums[:, sums[2] > 0]
            if tests.size:
                curves[name] = np.stack([claimed / tests, accepted / tests, tests], axis=1)
        return curves

    def forget(self, rid: str) -> None:
        """Drops a finished request."""
        self._requests.forget(rid)
        self._batch = None
