"""What forwards that read prompts take, learned from those that were served."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from adaserve.scheduler.costs.kv_read import FadingFit
from adaserve.scheduler.costs.latency import ForwardCost
from adaserve.scheduler.interface import FloatArray, IntArray

MIN_TOKEN_S = 1e-9
"""Seconds of a token, at least."""


class LearnedPrefills:
    """Time of a forward that reads prompts, starting from a guess: fixed + tokens x per_token. It is a least
    squares fit by relative errors, in which a time that was far too long hardly counts.

    It is a line and not a table of sizes, because the fixed part matters: it says whether prompts should
    share a forward. Nobody prefills a single token, and for sizes that it has not seen a table has only the
    guess.
    """

    KEPT = 0.995  # of the weight of older forwards, per forward: all of an overload are of one size
    PRIOR = 0.02  # of the weight of a forward, for the guess
    FAR = 1024.0  # tokens: the guess is what it says for one token and for so many
    FIXED_BESIDE = 0.1  # of a forward of one token: the fixed part of what prompts add, as a guess

    def __init__(self, one_s: float, far_s: float) -> None:
        """First guesses: seconds of a forward of one token, and of ``FAR``."""
        rows = self.PRIOR * np.array([[1 / one_s, 1 / one_s], [1 / far_s, self.FAR / far_s]])
        self._fit = FadingFit(rows, np.full(2, self.PRIOR), self.KEPT)
        self._work_out()

    @classmethod
    def beside(cls, one_s: float, far_s: float) -> LearnedPrefills:
        """Of what prompts add to a verification, by the same guesses: those with little of their fixed part.
        A guess of none would be so small that no forward could correct it, since relative errors count."""
        token_s, fixed_s = each_token_s(one_s, far_s), cls.FIXED_BESIDE * one_s
        return cls(fixed_s + token_s, fixed_s + token_s * cls.FAR)

    def observe(self, tokens: int, seconds: float) -> None:
        """A forward that was served; nonsense (not finite, not positive) is ignored."""
        if tokens > 0 and np.isfinite(seconds) and seconds > 0:
            unit = max(seconds, self.seconds(tokens))
            self._fit.add((1 / unit, tokens / unit), seconds / unit)
            self._work_out()

    def seconds(self, tokens: int) -> float:
        """Of a forward; 0 if there is nothing to read."""
        return self.cost.fixed_s + tokens * self.cost.per_token_s if tokens else 0.0

    def _work_out(self) -> None:
        fixed_s, token_s = self._fit.solve()
        self.cost = ForwardCost(fixed_s=fixed_s, per_token_s=token_s)

    def chunks(self, most: int, slowdown: float = 1.0) -> tuple[IntArray, FloatArray]:
        """Sizes [k] up to ``most`` tokens, and their seconds [k], both rising."""
        sizes = _sizes(most)
        return sizes, self.cost.alone(sizes.astype(np.float64)) * slowdown


def each_token_s(one_s: float, far_s: float) -> float:
    """Seconds that each token adds to a forward, by those of forwards of one token and of ``FAR``."""
    return max((far_s - one_s) / (LearnedPrefills.FAR - 1.0), MIN_TOKEN_S)


@lru_cache(maxsize=8)  # asked for before every iteration while prompts wait
def _sizes(most: int) -> IntArray:
    """Some hundred from 1 to ``most``, rising; not to be written."""
    sizes = np.unique(np.linspace(1, most, 128).astype(np.int64))
    sizes.flags.writeable = False
    return sizes
