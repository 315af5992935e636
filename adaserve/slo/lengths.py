"""How long the answers of a class turned out, for requests whose own bound says little.

How much time a request has until its SLO is judged depends on where its answer ends. ``max_tokens`` is a
bound, and mostly a loose one. With 512 where answers have 100 tokens, a request that is late seems to have
all the time in the world to catch up.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from scipy.stats import CensoredData, ecdf

LATEST = 256
"""Answers of a class that count."""

LEAST = 8
"""With fewer answers that ended by themselves nothing is said."""

RENEWED_EVERY = 16
"""Answers, after the first ``LATEST`` of them."""

SURE = 0.75
"""Share of answers that go on for at least as long as ``left`` says."""

ROUNDING = 1e-9
"""Shares closer than this are the same."""

UNKNOWN = 1 << 20
"""Tokens still to come where nothing is known: more than any answer has."""


class OutputLengths:
    """What is still to come of an answer, by the latest ones of its class.

    An answer that ``max_tokens`` cut only says that it would have been longer, so this is a Kaplan-Meier
    estimate. Where every answer is cut nothing is known, and the bound itself counts.
    """

    def __init__(self) -> None:
        self._ended: dict[str, deque[tuple[int, bool]]] = {}
        self._left: dict[str, np.ndarray] = {}  # by class: int64, tokens still to come by tokens decoded
        self._since: dict[str, int] = {}  # answers since that was worked out

    def __bool__(self) -> bool:
        """Whether anything is known."""
        return bool(self._left)

    def add(self, slo_class: str, decoded: int, cut: bool) -> None:
        """An answer has ended. ``decoded``: its tokens after the first. ``cut``: by its own bound."""
        ended = self._ended.setdefault(slo_class, deque(maxlen=LATEST))
        ended.append((decoded, cut))
        since = self._since[slo_class] = self._since.get(slo_class, 0) + 1
        if len(ended) < LATEST or since >= RENEWED_EVERY:
            self._since[slo_class] = 0
            self._renew(slo_class, ended)

    def _renew(self, slo_class: str, ended: deque[tuple[int, bool]]) -> None:
        tokens, cut = np.array([t for t, _ in ended], np.int64), np.array([c for _, c in ended], np.bool_)
        self._left.pop(slo_class, None)
        if len(tokens) - np.count_nonzero(cut) < LEAST:
            return
        longer = ecdf(CensoredData(uncensored=tokens[~cut], right=tokens[cut])).sf
        decoded = np.arange(int(tokens.max()) + 1)
        share = longer.evaluate(decoded)
        # The first length at which no more than SURE of those that came so far are longer.
        at = np.searchsorted(-longer.probabilities, -SURE * share - ROUNDING)
        known = (at < len(longer.quantiles)) & (share > 0)
        ends = longer.quantiles[np.minimum(at, len(longer.quantiles) - 1)].astype(np.int64)
        self._left[slo_class] = np.where(known, ends - decoded, UNKNOWN)

    def left(self, slo_class: str, decoded: int) -> int:
        """Tokens that ``SURE`` of the answers that got as far as this one still brought; at least 1."""
        left = self._left.get(slo_class)
        return UNKNOWN if left is None or decoded >= len(left) else int(left[decoded])
