"""How long the answers of a class usually are, for requests whose own bound says little.

How much time a request has until its SLO is judged depends on where its answer ends. ``max_tokens`` is a
bound, and mostly a loose one. If it is 512 and answers have 100 tokens, a request that is late seems to have
all the time in the world to catch up.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

import numpy as np

LATEST = 64
"""Answers of a class that count. More of them would take longer to see that traffic has changed."""

LEAST = 8
"""With fewer answers that ended by themselves nothing is said."""

RENEWED_EVERY = 4
"""Answers, after the first ``LATEST`` of them."""

SURE = 0.75
"""Share of answers that go on for at least as long as ``left`` says."""

ROUNDING = 1e-9
"""Shares closer than this are the same."""

UNKNOWN = 1 << 20
"""Tokens still to come if nothing is known: more than any answer has."""


class OutputLengths:
    """How many tokens an answer still has to come, by the latest answers of its class.

    An answer that ``max_tokens`` cut only says that it would have been longer, so this is a Kaplan-Meier
    estimate. If every answer is cut nothing is known, and the bound itself counts.
    """

    def __init__(self) -> None:
        self._ended: dict[str, deque[tuple[int, bool]]] = {}
        self._ends: dict[str, tuple[list[int], list[int]]] = {}  # by class, as `_usual_ends` gives them
        self._since: dict[str, int] = {}  # answers since that was worked out

    def __bool__(self) -> bool:
        """Whether anything is known."""
        return bool(self._ends)

    def add(self, slo_class: str, decoded: int, cut: bool) -> None:
        """An answer has ended. ``decoded``: its tokens after the first. ``cut``: by its own bound."""
        ended = self._ended.setdefault(slo_class, deque(maxlen=LATEST))
        ended.append((decoded, cut))
        since = self._since[slo_class] = self._since.get(slo_class, 0) + 1
        if len(ended) < LATEST or since >= RENEWED_EVERY:
            self._since[slo_class] = 0
            self._renew(slo_class, ended)

    def _renew(self, slo_class: str, ended: deque[tuple[int, bool]]) -> None:
        tokens, cut = np.array(ended, np.int64).T
        self._ends.pop(slo_class, None)
        if len(tokens) - np.count_nonzero(cut) >= LEAST:
            self._ends[slo_class] = _usual_ends(tokens, cut)

    def left(self, slo_class: str, decoded: int) -> int:
        """Tokens that the share ``SURE`` of the answers that got as far as this one still had to come; at
        least 1."""
        if slo_class not in self._ends:
            return UNKNOWN
        lengths, ends = self._ends[slo_class]
        end = ends[bisect_right(lengths, decoded)]
        return UNKNOWN if end == UNKNOWN else end - decoded


def _usual_ends(tokens: np.ndarray, cut: np.ndarray) -> tuple[list[int], list[int]]:
    """The k lengths that answers had, ascending, and k + 1 ends: where to expect the end of an answer that is
    shorter than the first length, then of one that has reached the first, the second and so on."""
    lengths, at = np.unique(tokens, return_inverse=True)
    as_long = np.bincount(at)[::-1].cumsum()[::-1]
    ended = np.bincount(at, weights=1 - cut)
    longer = np.cumprod(1.0 - ended / as_long)  # importing scipy's `ecdf` would take 0.3 s
    share = np.append(1.0, longer)
    # The first length at which no more than SURE of those that came so far are longer.
    end = np.searchsorted(-longer, -SURE * share - ROUNDING)
    ends = np.where(share > 0, np.append(lengths, UNKNOWN)[end], UNKNOWN)
    return lengths.tolist(), ends.tolist()
