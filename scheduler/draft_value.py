"""The worth of draft levels and beams so far, in batches of similar size and context (``priced``)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from adaserve.scheduler.averages import MovingAverage, blend
from adaserve.scheduler.interface import FloatArray

LARGE = 32
"""All batches of at least this size are treated as the same size."""

BEST_WORTH = 0.7
"""Worth of the best beam, to the power of its level, before anything was learned."""

SIDE_WORTH, SIDE_FALL = 0.1, 1.25
"""Worth of beam b >= 1 of any level: 0.1 / b^1.25. Along greedy texts of the embedded pair (1,584 trees of
depth 5 and width 12) beams 1, 2, 4 and 8 hold the target's token in 9, 4, 2 and 1% of the trees. Only at the
first level is it less often: fewer paths get further down, but the best beam is wrong more often there."""

PRIOR_WORTH = 4
"""Weight of a level's first guess, in requests that were drafted for once."""


@dataclass(slots=True)
class Regime:
    """What was learned from batches of similar size and context. What pays off with one request does not with
    thirty, and what pays off with a thousand cached tokens may not with thirty thousand."""

    surplus: FloatArray
    """[d_max, w_max]: what beam b of level l + 1 has been worth per row beyond the price of its verify token,
    where nothing was offered."""
    rate: MovingAverage = field(default_factory=lambda: MovingAverage(0.1))  # value per quiet second
    bought: MovingAverage = field(default_factory=lambda: MovingAverage(0.1, start=1.0))
    """Share of the candidates that paid off, in iterations that drafted some."""
    depth: int = 1  # of the last plan
    width: int = 1
    in_vain: int = 0  # probes in a row after which drafting still did not pay
    probed: int = -1  # number of the last one
    taught: FloatArray = field(init=False)  # requests that have taught each level's surplus, [d_max]
    missed: FloatArray = field(init=False)  # iterations since then that did not, [d_max]

    def __post_init__(self) -> None:
        self.taught, self.missed = np.zeros((2, len(self.surplus)))

    def learn(self, total: FloatArray, rows: FloatArray, n: int, rate: float, may_go_deeper: bool) -> None:
        """Moves the surplus of the levels that were drafted towards what this iteration's were worth.

        ``total`` [levels, beams]: that, of all n rows together. ``rows`` [levels]: rows for which there was
        no offer, or a part. ``rate``: weight of an iteration. ``may_go_deeper``: whether nothing is said of
        further levels; else they would have brought nothing.
        """
        levels, beams = total.shape
        self.taught[:levels] += rows
        # A level that is drafted after a while tells what all iterations since would have told.
        recent = (1.0 - (1.0 - rate) ** (1.0 + self.missed[:levels])) / n
        self.missed[:levels] = 0
        self.missed[levels:] += may_go_deeper
        weight = rows * np.maximum(recent, 1.0 / (PRIOR_WORTH + self.taught[:levels]))
        seen = self.surplus[:levels, :beams]
        seen[:] = blend(seen, total / np.maximum(rows, 1e-9)[:, None], weight[:, None])

    def extend(self, level_rate: float) -> None:
        """Estimates levels that were never drafted from those above, each ``level_rate`` times as much."""
        if known := int(self.taught.nonzero()[0].max(initial=-1)) + 1:
            further = np.arange(1, len(self.surplus) - known + 1)[:, None]
            self.surplus[known:] = self.surplus[known - 1] * level_rate**further


class Regimes:
    """One for each size of a batch, up to a factor of two, and stretch of its iterations by the contexts, up
    to a factor of two. ``levels``, ``beams``: of the largest draft."""

    def __init__(self, levels: int, beams: int) -> None:
        self._levels, self._beams = levels, beams
        self._known: dict[tuple[int, int], Regime] = {}

    def of(self, n: int, stretch: float) -> Regime:
        """Of batches of n requests whose contexts make a plain iteration ``stretch`` times as long."""
        key = min(n, LARGE).bit_length(), round(math.log2(stretch))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._like_nearest(*key)
        return known

    def _like_nearest(self, size: int, stretch: int) -> Regime:
        """Where learning begins: with what was learned for the nearest contexts of such batches."""
        others = [other for bits, other in self._known if bits == size]
        if others:
            near = self._known[size, min(others, key=lambda other: abs(other - stretch))]
            return Regime(near.surplus.copy(), bought=MovingAverage(0.1, start=near.bought.value))
        sides = SIDE_WORTH * np.arange(1.0, self._beams) ** -SIDE_FALL
        prior = np.tile(np.append(0.0, sides), (self._levels, 1))
        prior[:, 0] = BEST_WORTH ** np.arange(1, self._levels + 1)
        return Regime(prior)
