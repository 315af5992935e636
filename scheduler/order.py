"""Running requests kept ordered by need, updated incrementally.

A(r) changes with time, but the deadline of the next token, ``start + SLO (o + 1)``, changes only when
the request produces tokens, and A(r) > 1 exactly when that deadline lies before ``now + t_spec``. So
a list sorted by deadline never goes stale, and one bisection finds all requests behind schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter

import numpy as np
from sortedcontainers import SortedKeyList

from adaserve.scheduler.interface import FloatArray, RunningBatch

Entry = tuple[float, str]
REBUILD_SHARE = 0.2
"""Above this share of moved requests one sort of an almost sorted list beats single moves (measured)."""


class NeedOrder:
    """Request ids by deadline of their next token, the neediest first."""

    def __init__(self) -> None:
        self._list: SortedKeyList = SortedKeyList(key=itemgetter(0))
        self._deadline: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._deadline)

    def __iter__(self) -> Iterator[str]:
        """Neediest first."""
        return (rid for _, rid in self._list)

    def refresh(self, rids: Sequence[str], deadline_s: FloatArray, keep: Sequence[str] | None = None) -> None:
        """Sets deadlines [n] of ``rids``; with ``keep``, forgets every request not in it."""
        if keep is not None and len(self._deadline) > 0:
            for rid in self._deadline.keys() - set(keep):
                self.discard(rid)
        known = self._deadline
        moved = [(d, r) for d, r in zip(deadline_s.tolist(), rids, strict=True) if known.get(r) != d]
        if len(moved) > REBUILD_SHARE * len(rids):
            known.update((r, d) for d, r in moved)
            self._list = SortedKeyList(((d, r) for r, d in known.items()), key=itemgetter(0))
            return
        for d, rid in moved:
            self.discard(rid)
            known[rid] = d
            self._list.add((d, rid))

    def discard(self, rid: str) -> None:
        """Forgets a request; unknown ids are ignored."""
        if (old := self._deadline.pop(rid, None)) is not None:
            self._list.remove((old, rid))

    def behind(self, until_s: float) -> list[str]:
        """Ids whose next token is due before ``until_s``, the most urgent first: A(r) > 1 for
        ``until_s = now + t_spec``."""
        return [rid for _, rid in self._list.irange_key(None, until_s, inclusive=(True, False))]


def token_deadline(running: RunningBatch) -> FloatArray:
    """``start + SLO (o + 1)``: when each row's next token is due, [n] seconds; inf without SLO."""
    out: FloatArray = running.decode_start_s + running.tpot_slo_s * (running.decoded_tokens + 1)
    return np.where(np.isfinite(running.tpot_slo_s), out, np.inf)
