"""The server's part of learned costs: whether the host is busy, and what is kept for the next start."""

from __future__ import annotations

import logging
from typing import Any

from adaserve.engine.costs.baseline import Baseline
from adaserve.engine.costs.cost_cache import BUSY_SHARE, save_learned
from adaserve.engine.costs.other_processes import OtherProcesses
from adaserve.scheduler.costs.learned import LearnedCosts
from adaserve.scheduler.costs.learned_table import PATIENCE_S

logger = logging.getLogger(__name__)

BUSY, CALM = 1.5, 1.2
"""The host counts as busy above the first slowdown, until ``CALM_LOOKS`` looks in a row find less than the
second: now and then a busy host looks quiet for a moment, as where all sizes that come are new."""

CALM_LOOKS = 5

LOOK_EVERY_S, SAVE_EVERY_S = 2.0, 30.0

SHARED_LOOKS = round(PATIENCE_S / LOOK_EVERY_S)
"""After this many looks in a row that found other processes at work, the host is taken to be like that."""

KNOWN_S = 10.0
"""A server that has served nothing for longer does not know whether the host is busy."""

FIRST_LOOK = 64
"""Iterations before learned costs are trusted."""


class CostMonitor:
    """Watches what ``costs`` learn: says when the host is busy, lets the baseline follow, saves the table."""

    def __init__(self, costs: LearnedCosts, baseline: Baseline, meta: dict[str, str], *, saves: bool) -> None:
        """``meta``: what the costs are valid for. ``saves``: this rank keeps them for the next start."""
        self._costs, self._baseline, self._meta, self._saves = costs, baseline, meta, saves
        self._iterations = 0
        self._looked_s = self._saved_s = 0.0
        self._others, self._others_share = OtherProcesses(), 0.0
        self._busy, self._calm_looks, self._shared_looks = False, 0, 0

    def observed(self, now_s: float, requests: int) -> None:
        """Call after every iteration that the policy has observed; ``requests`` ran in it."""
        self._iterations += 1
        self._baseline.observed(requests)
        if now_s < self._looked_s + LOOK_EVERY_S:
            return
        self._looked_s = now_s
        self._look_at_host()
        if self._iterations < FIRST_LOOK:
            return
        self._baseline.follow(self._quiet)
        if self._saves and now_s > self._saved_s + SAVE_EVERY_S and self._quiet:
            self._saved_s = now_s
            self._save()

    def _save(self) -> None:
        if (learned := self._costs.learned()) is None:
            return
        try:
            save_learned(self._meta, learned)
        except OSError as error:
            self._saves = False
            logger.warning("AdaServe: learned costs can't be kept for the next start: %s", error)

    @property
    def _quiet(self) -> bool:
        """Whether the learned cost is that of the quiet host, as far as can be told: sizes that are first
        seen beside other processes do not look slow."""
        return not self._busy and not 0 < self._shared_looks <= SHARED_LOOKS

    def _look_at_host(self) -> None:
        self._others_share = self._others.share()
        is_shared = self._others_share > BUSY_SHARE and self._meta["device"] == "cpu"  # a GPU times itself
        self._shared_looks = self._shared_looks + 1 if is_shared else 0
        slowdown = self._costs.slowdown
        self._calm_looks = self._calm_looks + 1 if slowdown < CALM else 0
        if not self._busy and slowdown > BUSY:
            self._busy = True
            logger.warning("AdaServe: %s", self._busy_note())
        elif self._busy and self._calm_looks >= CALM_LOOKS:
            self._busy = False
            logger.info("AdaServe: the host is quiet again")

    def _busy_note(self) -> str:
        return (
            f"the host is busy: forwards take {self._costs.slowdown:.1f} times as long as they do when it is "
            f"quiet (other processes use {self._others_share:.0%} of its processors)"
        )

    def notes(self, now_s: float) -> list[str]:
        """Sentences about the present state for people who look at the server."""
        is_slow = self._busy and not self._calm_looks and now_s < self._looked_s + KNOWN_S
        return [*([self._busy_note()] if is_slow else []), *self._baseline.notes()]

    def report(self, now_s: float) -> dict[str, Any]:
        """For ``/server_info`` and the live page; JSON values. All but the notes is as of the last look."""
        return {
            "busy": self._busy,
            "slowdown": self._costs.slowdown,
            "others_share": self._others_share,
            **self._baseline.report(),
            "notes": self.notes(now_s),
        }
