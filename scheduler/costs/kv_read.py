"""The cost of attention to cached tokens on this host, learned from served forwards.

T = b + c1 sum L + c2 sum q L, what the forward takes without cached tokens subtracted. Errors count relative
to the forward's time: one that took far too long hardly counts, and short contexts say little of long ones.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import nnls

from adaserve.scheduler.costs.latency import KVReadCost
from adaserve.scheduler.costs.learned_table import LEARN_EVERY
from adaserve.scheduler.interface import Context, FloatArray

AS_LONG = 1e5
"""Cached tokens that roughly take as long as one token's forward, for guesses that say nothing."""

NOISE, EXCESS = 0.1, 0.05
"""Standard deviations of a forward's relative error, and of how far usual times lie above the quiet one."""


class FadingFit:
    """Least squares with coefficients >= 0, in which old rows count less and less."""

    def __init__(self, prior: FloatArray, values: FloatArray, kept: float) -> None:
        """``prior`` [m, k] rows and their ``values`` [m] never fade; ``kept``: weight that a row keeps when
        another one comes."""
        self._prior = prior.T @ prior, prior.T @ values
        self._square, self._right = (np.zeros_like(a) for a in self._prior)
        self._kept = kept
        self._new: list[tuple[float, ...]] = []  # (value, *row)

    def __len__(self) -> int:
        """Rows that the solution does not know yet."""
        return len(self._new)

    def add(self, row: tuple[float, ...], value: float) -> None:
        """``row`` @ coefficients should be ``value``."""
        self._new.append((value, *row))

    def solve(self) -> list[float]:
        """The coefficients, [k]."""
        if self._new:
            values, rows = np.split(np.array(self._new), [1], axis=1)
            kept = self._kept ** len(rows)
            self._square = kept * self._square + rows.T @ rows
            self._right = kept * self._right + rows.T @ values[:, 0]
            self._new.clear()
        lower = np.linalg.cholesky(self._prior[0] + self._square)
        solution, _ = nnls(lower.T, np.linalg.solve(lower, self._prior[1] + self._right), maxiter=200)
        coefficients: list[float] = solution.tolist()
        return coefficients


def scales(guess: KVReadCost, one_s: float) -> tuple[float, float]:
    """How far each coefficient may be from ``guess``, if a forward of one token takes ``one_s``."""
    least = one_s / AS_LONG
    return max(guess.per_context_s, least), max(guess.per_pair_s, least)


class LearnedKVRead:
    """c1 and c2 of one kind of forward, beginning with a guess."""

    KEPT = 0.995

    def __init__(self, guess: KVReadCost, one_s: float) -> None:
        """``one_s``: seconds of a forward of one token."""
        self.cost = guess
        self._scales = scales(guess, one_s)
        prior = np.diag([NOISE / EXCESS, NOISE, NOISE])
        values = NOISE * np.array([0.0, *(c / s for c, s in zip(guess, self._scales, strict=True))])
        self._fit = FadingFit(prior, values, self.KEPT)

    def observe(self, tokens: float, context: Context, seconds: float, alone_s: float) -> None:
        """A forward took ``seconds``, and would take ``alone_s`` with nothing in the KV cache."""
        unit = max(seconds, alone_s + self.cost.seconds(tokens, context))
        read = context.tokens * self._scales[0], tokens * context.each * self._scales[1]
        self._fit.add((1.0, read[0] / unit, read[1] / unit), (seconds - alone_s) / unit)
        if len(self._fit) >= LEARN_EVERY:
            _, *found = self._fit.solve()
            self.cost = KVReadCost(*(c * s for c, s in zip(found, self._scales, strict=True)))
