"""Online calibration of draft probabilities: what a claimed q has been worth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from adaserve.scheduler.interface import BoolArray, CandidateTrees, FloatArray, IntArray
from adaserve.scheduler.selection import row_of

N_BINS = 20  # equal bins of the claimed q: finding a bin is one multiplication
MIDDLE = (np.arange(N_BINS) + 0.5) / N_BINS
CEILING = 0.985  # no token is certain; also keeps f strictly falling along a path


def parents_flat(trees: CandidateTrees) -> IntArray:
    """Flat index of every node's parent, -1 for children of a root; [m]."""
    start = np.repeat(trees.row_start[:-1], np.diff(trees.row_start))
    return np.where(trees.parent >= 0, trees.parent + start, -1)


def bin_of(q: FloatArray) -> IntArray:
    """Bin of each claimed probability."""
    bins: IntArray = np.minimum((q * N_BINS).astype(np.int64), N_BINS - 1)
    return bins


def step_probability(trees: CandidateTrees, parent: IntArray) -> FloatArray:
    """q(v | path of its parent): the one-step draft probability of every node, [m]."""
    above = np.append(trees.logprob, 0.0)[parent]
    if trees.n_nodes and np.isfinite(above.min()):  # NaN and -inf end up here too: min spreads them
        q: FloatArray = np.exp(trees.logprob - above)
        if q.max() <= 1.0:
            return q
    with np.errstate(invalid="ignore"):
        q = np.exp(np.minimum(trees.logprob - above, 0.0))
    return np.nan_to_num(q, nan=0.0)


def path_product(p: FloatArray, parent: IntArray, deepest: int) -> FloatArray:
    """Product of ``p`` [m] from the root's child to every node, by pointer doubling: log2(depth) rounds."""
    f, up = np.append(p, 1.0), np.append(parent, len(p))
    up[up < 0] = len(p)
    for _ in range(max(0, deepest - 1).bit_length()):
        f = f * f[up]
        up = up[up]
    return f[:-1]


class Calibrator:
    """``p = min(.985, q * k_bin * k_req)`` and ``f(v)`` = product of p along the path.

    ``k_bin = (accepted + prior) / (claimed + prior)`` per class and bin of q, decayed; only tested
    nodes count. ``k_req`` is the same per request, with a stronger prior.
    """

    BIN_PRIOR = 4.0
    REQUEST_PRIOR = 12.0
    HALF_LIFE_TESTS = 4000.0

    def __init__(self) -> None:
        self._class_id: dict[str, int] = {}
        self._accepted = np.zeros((0, N_BINS))
        self._claimed = np.zeros((0, N_BINS))
        self._tests = np.zeros((0, N_BINS))
        self._requests: dict[str, list[float]] = {}
        self._last: tuple[CandidateTrees, IntArray, FloatArray] | None = None

    def _steps(self, trees: CandidateTrees) -> tuple[IntArray, FloatArray]:
        """Parents and one-step probabilities; selection and observation ask for the same trees."""
        if self._last is None or self._last[0] is not trees:
            parent = parents_flat(trees)
            self._last = (trees, parent, step_probability(trees, parent))
        return self._last[1], self._last[2]

    def _ids(self, classes: Sequence[str]) -> IntArray:
        known = self._class_id
        for name in set(classes) - known.keys():
            known[name] = len(known)
            pad = np.zeros((1, N_BINS))
            self._accepted = np.vstack([self._accepted, pad])
            self._claimed = np.vstack([self._claimed, pad])
            self._tests = np.vstack([self._tests, pad])
        return np.fromiter((known[c] for c in classes), np.int64, len(classes))

    def factors(self) -> FloatArray:
        """k_bin of every class and bin, [classes, N_BINS]."""
        prior = self.BIN_PRIOR * MIDDLE
        factors: FloatArray = (self._accepted + prior) / (self._claimed + prior)
        return factors

    def request_factors(self, rids: Sequence[str]) -> FloatArray:
        """k_req per row, [n]."""
        prior = self.REQUEST_PRIOR
        pairs = [self._requests.get(rid, (0.0, 0.0)) for rid in rids]
        return np.array([(a + prior) / (e + prior) for a, e in pairs])

    def step_values(
        self, q: FloatArray, row: IntArray, rids: Sequence[str], classes: Sequence[str]
    ) -> FloatArray:
        """Calibrated one-step probabilities of nodes with claimed ``q`` in ``row``; same shape as q."""
        ids = self._ids(classes)
        factor = self.factors()[ids] * self.request_factors(rids)[:, None]  # [n, N_BINS]
        p: FloatArray = np.minimum(CEILING, q * factor.ravel()[row * N_BINS + bin_of(q)])
        return p

    def path_values(self, trees: CandidateTrees, rids: Sequence[str], classes: Sequence[str]) -> FloatArray:
        """Calibrated f(v) of every node, [m]."""
        if trees.n_nodes == 0:
            return np.zeros(0)
        parent, q = self._steps(trees)
        p = self.step_values(q, row_of(trees), rids, classes)
        return path_product(p, parent, int(trees.depth.max()))

    def observe(
        self,
        trees: CandidateTrees,
        tested: BoolArray,
        accepted: BoolArray,
        rids: Sequence[str],
        classes: Sequence[str],
    ) -> None:
        """Adds the tested nodes of one iteration."""
        at = np.flatnonzero(tested)
        if not at.size:
            return
        q = self._steps(trees)[1][at]
        row, hit = row_of(trees)[at], accepted[at].astype(np.float64)
        cell = self._ids(classes)[row] * N_BINS + bin_of(q)
        # Judge the request after its class: otherwise both would correct the same error twice.
        believed = np.minimum(CEILING, q * self.factors().ravel()[cell])
        self._add(cell, q, hit)
        n = len(rids)
        got, due = np.bincount(row, hit, n), np.bincount(row, believed, n)
        for rid, a, e in zip(rids, got.tolist(), due.tolist(), strict=True):
            if e > 0:
                mine = self._requests.setdefault(rid, [0.0, 0.0])
                mine[0], mine[1] = 0.98 * mine[0] + a, 0.98 * mine[1] + e

    def _add(self, cell: IntArray, q: FloatArray, hit: FloatArray) -> None:
        size, shape = self._accepted.size, self._accepted.shape
        decay = 0.5 ** (len(q) / self.HALF_LIFE_TESTS)
        self._accepted = decay * self._accepted + np.bincount(cell, hit, size).reshape(shape)
        self._claimed = decay * self._claimed + np.bincount(cell, q, size).reshape(shape)
        self._tests = decay * self._tests + np.bincount(cell, minlength=size).reshape(shape)

    def reliability(self) -> dict[str, list[tuple[float, float, float]]]:
        """Reliability curve per class: (mean claimed q, observed acceptance, tests) of non-empty bins."""
        curves: dict[str, list[tuple[float, float, float]]] = {}
        for name, i in self._class_id.items():
            tests = self._tests[i]
            curves[name] = [
                (
                    float(self._claimed[i, b] / tests[b]),
                    float(self._accepted[i, b] / tests[b]),
                    float(tests[b]),
                )
                for b in range(N_BINS)
                if tests[b] > 0
            ]
        return curves

    def forget(self, rid: str) -> None:
        """Drops a finished request."""
        self._requests.pop(rid, None)
