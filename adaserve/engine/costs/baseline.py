"""The baseline, that is the time per token of the idle server. SLOs that are multiples of it follow it."""

from __future__ import annotations

import logging
from typing import Any

from adaserve.scheduler.costs.learned import LearnedCosts
from adaserve.slo.ledger import SLOLedger

logger = logging.getLogger(__name__)

MOVED = 0.05
"""The baseline follows when it has moved by more than this."""

ALONE = 24
"""Iterations of a lone request, one after the other, after which the baseline may rise."""


class Baseline:
    """The ledger's baseline follows what is learned about a lone request, unless a user has fixed it."""

    def __init__(self, costs: LearnedCosts, ledger: SLOLedger, fixed: bool) -> None:
        self._costs, self._ledger, self._fixed = costs, ledger, fixed
        self._started_ms = ledger.baseline_s * 1e3
        self._alone = 0

    def observed(self, requests: int) -> None:
        """``requests`` ran in an iteration."""
        self._alone = self._alone + 1 if requests == 1 else 0

    def fix(self, baseline_s: float) -> None:
        """It is this one from now on, whatever is learned."""
        self._fixed, self._ledger.baseline_s = True, baseline_s

    def follow(self, is_quiet: bool) -> None:
        """Under load, or on a busy host (not ``is_quiet``), it may fall, since a forward never takes less
        than it has to. But it does not rise: many requests are slow because they are many, and that must not
        loosen SLOs."""
        old_s, new_s = self._ledger.baseline_s, self._costs.baseline_s()
        if self._fixed or (new_s > old_s and (not is_quiet or self._alone < ALONE)):
            return
        if abs(new_s / old_s - 1) > MOVED:
            self._ledger.baseline_s = new_s
            logger.info(
                "AdaServe: baseline %.1f ms per token instead of %.1f, learned from what was served; "
                "SLOs that are multiples of it follow",
                new_s * 1e3,
                old_s * 1e3,
            )

    def notes(self) -> list[str]:
        """A sentence for people who look at the server, if it has moved."""
        now_ms = self._ledger.baseline_s * 1e3
        if self._fixed or abs(now_ms / self._started_ms - 1) <= MOVED:
            return []
        return [
            f"the baseline is {now_ms:.1f} ms per token, learned from what was served; "
            f"it was {self._started_ms:.1f} ms at the start"
        ]

    def report(self) -> dict[str, Any]:
        """For ``/server_info``; JSON values."""
        return {"baseline_start_ms": self._started_ms, "baseline_fixed": self._fixed}
