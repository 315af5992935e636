"""Online calibration of draft probabilities: what a claimed q has been worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from adaserve.scheduler.arrays import all_true, largest, row_size, smallest
from adaserve.scheduler.interface import BoolArray, CandidateTrees, FloatArray, IntArray
from adaserve.scheduler.selection import row_of
from adaserve.scheduler.tables import ClassNumbers, RequestTable

N_BINS = 20  # equal bins of the claimed q: finding a bin is one multiplication
MIDDLE = (np.arange(N_BINS) + 0.5) / N_BINS
_WITH_ONE = np.append(np.arange(N_BINS), N_BINS - 1)  # q = 1 falls behind the last bin
CEILING = 0.985  # no token is certain; also keeps f strictly falling along a path


def parents_flat(trees: CandidateTrees, per_row: int) -> IntArray:
    """Flat index of every node's parent; the number of nodes for children of a root. [m]"""
    start = trees.row_start
    if per_row:
        parent = (trees.parent.reshape(-1, per_row) + start[:-1, None]).reshape(-1)
    else:
        parent = trees.parent + np.repeat(start[:-1], start[1:] - start[:-1])
    parent[trees.parent < 0] = trees.n_nodes
    return parent


def bin_of(q: FloatArray) -> IntArray:
    """Bin of each claimed probability."""
    bins: IntArray = np.minimum((q * N_BINS).astype(np.int64), N_BINS - 1)
    return bins


def step_probability(trees: CandidateTrees, parent: IntArray) -> FloatArray:
    """q(v | path of its parent): the one-step draft probability of every node, [m]; 0 for NaN."""
    logprob = trees.logprob
    above = _and(logprob, 0.0).take(parent)
    if trees.n_nodes and math.isfinite(smallest(logprob)):
        np.subtract(logprob, above, out=above)
        q: FloatArray = np.exp(above, out=above)
        if largest(q) <= 1.0:
            return q
    with np.errstate(invalid="ignore"):
        q = np.exp(np.minimum(logprob - _and(logprob, 0.0).take(parent), 0.0))
    return np.nan_to_num(q, nan=0.0)


def _and(x: FloatArray, last: float) -> FloatArray:
    """``x`` with one entry more: what children of a root find at their parent's index."""
    out = np.empty(len(x) + 1)
    out[:-1] = x
    out[-1] = last
    return out


def path_product(p: FloatArray, parent: IntArray, deepest: int) -> FloatArray:
    """Product of ``p`` [m] from the root's child to every node, by pointer doubling: log2(depth) rounds."""
    m = len(p)
    f, up = p, parent
    for left in range(max(0, deepest - 1).bit_length() - 1, -1, -1):
        f = f * _and(f, 1.0).take(up)
        if left:
            further = np.empty(m + 1, np.int64)
            further[:-1] = up
            further[-1] = m
            up = further.take(up)
    return f


@dataclass(frozen=True, slots=True)
class TreeSteps:
    """What selection and observation both need of candidate trees, worked out once."""

    trees: CandidateTrees
    parent: IntArray  # [m], see parents_flat
    q: FloatArray  # [m]: one-step draft probability
    per_row: int  # nodes of every row; 0 when they differ


def tree_steps(trees: CandidateTrees) -> TreeSteps:
    """Parents and one-step probabilities."""
    per_row = row_size(trees)
    parent = parents_flat(trees, per_row)
    return TreeSteps(trees, parent, step_probability(trees, parent), per_row)


class Calibrator:
    """``p = min(.985, q * k_bin * k_req)`` and ``f(v)`` = product of p along the path.

    ``k_bin = (accepted + prior) / (claimed + prior)`` per class and bin of q, decayed; only tested
    nodes count. ``k_req`` is the same per request, with a stronger prior.
    """

    BIN_PRIOR = 4.0
    REQUEST_PRIOR = 12.0
    REQUEST_DECAY = 0.98
    HALF_LIFE_TESTS = 4000.0

    def __init__(self) -> None:
        self._numbers = ClassNumbers()
        self._sums: FloatArray = np.zeros((3, 0, N_BINS))  # accepted, claimed, tests; per class and bin
        self._factors: FloatArray = np.zeros((0, N_BINS + 1))
        self._requests = RequestTable(2)  # accepted, expected
        self._last: list[TreeSteps] = []
        self._batch: tuple[Sequence[str], Sequence[str], FloatArray] | None = None
        self._plain: tuple[FloatArray, list[list[float]]] = (np.zeros(0), [])  # the same as lists

    def steps(self, trees: CandidateTrees) -> TreeSteps:
        """``tree_steps``; selection and observation ask for the same trees, under overlap one plan apart."""
        for known in self._last:
            if known.trees is trees:
                return known
        new = tree_steps(trees)
        self._last = [new, *self._last[:1]]
        return new

    def _ids(self, classes: Sequence[str]) -> IntArray:
        numbers = self._numbers.of(classes)
        missing = len(self._numbers) - self._sums.shape[1]
        if missing:
            self._sums = np.concatenate([self._sums, np.zeros((3, missing, N_BINS))], axis=1)
            self._refresh()
        return numbers

    def _refresh(self) -> None:
        prior = self.BIN_PRIOR * MIDDLE
        self._batch = None
        factors = self._sums[0] + prior
        factors /= self._sums[1] + prior
        self._factors = factors.take(_WITH_ONE, axis=1)

    def factors(self) -> FloatArray:
        """k_bin of every class and bin, [classes, N_BINS]."""
        return self._factors[:, :-1]

    def request_factors(self, rids: Sequence[str]) -> FloatArray:
        """k_req per row, [n]."""
        sums = self._requests.of(rids)
        sums += self.REQUEST_PRIOR
        factors: FloatArray = sums[:, 0] / sums[:, 1]
        return factors

    def batch_factors(self, rids: Sequence[str], classes: Sequence[str]) -> FloatArray:
        """k_bin x k_req, [n, N_BINS + 1]; kept until something was learned or the batch changes."""
        if self._batch is None or self._batch[0] != rids or self._batch[1] != classes:
            ids = self._ids(classes)
            factor = self._factors.take(ids, axis=0)
            factor *= self.request_factors(rids)[:, None]
            self._batch = (rids, classes, factor)
        return self._batch[2]

    def path_values(self, trees: CandidateTrees, rids: Sequence[str], classes: Sequence[str]) -> FloatArray:
        """Calibrated f(v) of every node, [m]."""
        if trees.n_nodes == 0:
            return np.zeros(0)
        steps = self.steps(trees)
        cell = (steps.q * N_BINS).astype(np.int64)
        if steps.per_row:
            grid = cell.reshape(-1, steps.per_row)
            grid += _row_offsets(trees.n_rows)
        else:
            cell += row_of(trees) * (N_BINS + 1)
        p = self.batch_factors(rids, classes).take(cell)
        p *= steps.q
        np.minimum(p, CEILING, out=p)
        return path_product(p, steps.parent, int(largest(trees.depth)))

    def few_path_values(
        self, trees: CandidateTrees, rids: Sequence[str], classes: Sequence[str]
    ) -> list[float]:
        """``path_values`` in plain numbers: faster below about 80 nodes, where array calls cost the most."""
        factors = self.batch_factors(rids, classes)
        if self._plain[0] is not factors:
            self._plain = (factors, factors.tolist())
        logprob, parents = trees.logprob.tolist(), trees.parent.tolist()
        starts = trees.row_start.tolist()
        values: list[float] = []
        for row, start in enumerate(starts[:-1]):
            factor = self._plain[1][row]
            for node in range(start, starts[row + 1]):
                step, f, parent = logprob[node], 1.0, parents[node]
                if parent >= 0:
                    step, f = step - logprob[start + parent], values[start + parent]
                q = math.exp(step) if step < 0.0 else 0.0 if math.isnan(step) else 1.0
                p = q * factor[int(q * N_BINS)]
                values.append(f * (p if p < CEILING else CEILING))
        return values

    def claimed(self, trees: CandidateTrees, node: IntArray) -> FloatArray:
        """One-step draft probability of some nodes, same shape as ``node``."""
        return self.steps(trees).q.take(node)

    def observe(
        self, q: FloatArray, row: IntArray, accepted: BoolArray, rids: Sequence[str], classes: Sequence[str]
    ) -> None:
        """Adds tested nodes: what the draft claimed, the row of ``rids`` they belong to, how it went; [t]."""
        if not q.size:
            return
        bins = (q * N_BINS).astype(np.int64)
        number = self._ids(classes).take(row)
        # Judge the request after its class: otherwise both would correct the same error twice.
        believed = q * self._factors[number, bins]
        np.minimum(believed, CEILING, out=believed)
        self._add(number * N_BINS + np.minimum(bins, N_BINS - 1), q, accepted)
        n = len(rids)
        due = np.bincount(row, believed, n)
        sums = self._requests.of(rids)
        rows, seen = self._requests.rows(rids), due > 0
        sums *= self.REQUEST_DECAY
        sums[:, 0] += np.bincount(row, accepted, n)
        sums[:, 1] += due
        if all_true(seen):
            self._requests.values[rows] = sums
        else:
            self._requests.values[rows[seen]] = sums[seen]

    def _add(self, cell: IntArray, q: FloatArray, hit: BoolArray) -> None:
        flat = self._sums.reshape(3, -1)
        flat *= 0.5 ** (len(q) / self.HALF_LIFE_TESTS)
        size = flat.shape[1]
        flat[0] += np.bincount(cell, hit, size)
        flat[1] += np.bincount(cell, q, size)
        flat[2] += np.bincount(cell, minlength=size)
        self._refresh()

    def reliability(self) -> dict[str, list[tuple[float, float, float]]]:
        """Reliability curve per class: (mean claimed q, observed acceptance, tests) of non-empty bins."""
        curves: dict[str, list[tuple[float, float, float]]] = {}
        accepted, claimed, tests = self._sums
        for name, i in self._numbers.number.items():
            if i < tests.shape[0]:
                curves[name] = [
                    (
                        float(claimed[i, b] / tests[i, b]),
                        float(accepted[i, b] / tests[i, b]),
                        float(tests[i, b]),
                    )
                    for b in range(N_BINS)
                    if tests[i, b] > 0
                ]
        return curves

    def forget(self, rid: str) -> None:
        """Drops a finished request."""
        self._requests.forget(rid)
        self._batch = None


@lru_cache(maxsize=256)
def _row_offsets(n: int) -> IntArray:
    return (np.arange(n) * (N_BINS + 1))[:, None]
