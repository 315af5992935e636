"""How likely a token that followed an earlier match is the next one: learned while serving.

Rates are kept apart by what they depend on: the length of the match, the depth after it, whether it is the
longest match, whose text it is in, and how the request draws.

A sampled request draws by noise that is known beforehand (adaserve/noise.py). A token of probability p whose
noise stands at quantile u wins with probability u^((1 - p) / p) when nothing is known of the others' noise.
This is where learning starts; since p differs from token to token, each quarter of u has a rate of its own.
"""

from __future__ import annotations

from adaserve.engine.sources.rates import Rates
from adaserve.engine.sources.text_index import ORDERS

GREEDY, UNKNOWN_NOISE, FIRST_QUARTER = 0, 1, 2
KINDS = 6
"""How a request draws: greedy, by noise that is not known, or by noise whose quantile is in one of four
quarters."""

START = (0.4, 0.6, 0.75, 0.85)
"""Rate of the longest match, by its length class, before anything is known."""

OTHER = 0.35
"""What is left of the rate for a match that is not the longest."""

DEEPER = 0.5
"""Share of the first token's misses that later ones start with: a match that went on is longer by then."""

_DEPTHS = (0, 0, 1, 2, 2, 3, 3, 3, 3, 4)  # class of a depth; deeper ones are in the last
_DEPTH_CLASSES = 5
PER_KIND = len(ORDERS) * 2 * 2 * _DEPTH_CLASSES


class MatchRates(Rates):
    """Rates of tokens after a match."""

    def __init__(self) -> None:
        every: list[float] = []
        for kind in range(KINDS):
            for start in START:
                for of_longest in (OTHER, 1.0):
                    first, deeper = start * of_longest, 1.0 - (1.0 - start) * DEEPER
                    rates = [_start(p, kind) for p in (first, *[deeper] * (_DEPTH_CLASSES - 1))]
                    every += rates * 2  # in the own text and in another
        super().__init__(every)

    @staticmethod
    def cells(order: int, longest: bool, own: bool, depth: int) -> list[int]:
        """Cells of the nodes 1 to ``depth`` below the root, after a match of class ``order``, of a request
        of kind ``GREEDY``; those of the other kinds are multiples of ``PER_KIND`` further on."""
        first = ((order * 2 + longest) * 2 + own) * _DEPTH_CLASSES
        return [first + _DEPTHS[min(d, len(_DEPTHS) - 1)] for d in range(1, depth + 1)]


def _start(p: float, kind: int) -> float:
    if kind < FIRST_QUARTER:
        return p
    middle = (kind - FIRST_QUARTER + 0.5) / (KINDS - FIRST_QUARTER)
    return float(middle ** ((1 - p) / p))
