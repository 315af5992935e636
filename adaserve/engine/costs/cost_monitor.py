"""The server's part of learned costs: what depends on them, and how they are kept for the next start."""

from __future__ import annotations

import logging
from typing import Any

from adaserve.engine.costs.cost_cache import BUSY_SHARE, save_learned
from adaserve.engine.costs.other_processes import OtherProcesses
from adaserve.scheduler.costs.learned import LearnedCosts
from adaserve.scheduler.costs.learned_table import PATIENCE_S
from adaserve.slo.ledger import SLOLedger

logger = logging.getLogger(__name__)

BASELINE_CONTEXT = 256
"""Cached tokens of the lone request whose plain decoding defines the baseline latency."""

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

MOVED = 0.05
"""The baseline follows when it has moved by more than this."""

ALONE = 24
"""Iterations of a lone request, one after the other, after which the baseline may rise."""


class CostMonitor:
    """Watches what ``costs`` learn: moves the baseline, says when the host is busy, saves the table."""

    def __init__(
        self, costs: LearnedCosts, ledger: SLOLedger, meta: dict[str, str], *, saves: bool, follow: bool
    ) -> None:
        """``meta``: what the costs are valid for. ``saves``: this rank keeps them for the next start.
        ``follow``: the ledger's baseline does, unless a user has fixed it."""
        self._costs, self._ledger, self._meta = costs, ledger, meta
        self._saves, self._follow = saves, follow
        self._started_ms = ledger.baseline_s * 1e3
        self._iterations = self._alone = 0
        self._looked_s = self._saved_s = 0.0
        self._others, self._others_share = OtherProcesses(), 0.0
        self._busy, self._calm_looks, self._shared_looks = False, 0, 0

    def observed(self, now_s: float, requests: int) -> None:
        """Call after every iteration that the policy has observed; ``requests`` ran in it."""
        self._iterations += 1
        self._alone = self._alone + 1 if requests == 1 else 0
        if now_s < self._looked_s + LOOK_EVERY_S:
            return
        self._looked_s = now_s
        self._look_at_host()
        if self._iterations < FIRST_LOOK:
            return
        if self._follow:
            self._set_baseline()
        if self._saves and now_s > self._saved_s + SAVE_EVERY_S and self._quiet:
            self._saved_s = now_s
            self._save()

    def fix_baseline(self, baseline_s: float) -> None:
        """The ledger's baseline is this one from now on, whatever is learned."""
        self._follow, self._ledger.baseline_s = False, baseline_s

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
        notes = [self._busy_note()] if is_slow else []
        now_ms = self._ledger.baseline_s * 1e3
        if self._follow and abs(now_ms / self._started_ms - 1) > MOVED:
            notes.append(
                f"the baseline is {now_ms:.1f} ms per token, learned from what was served; "
                f"it was {self._started_ms:.1f} ms at the start"
            )
        return notes

    def _set_baseline(self) -> None:
        """Under load, or on a busy host, it may fall, since a forward never takes less than it has to. But it
        does not rise: many requests are slow because they are many, and that must not loosen SLOs."""
        old_s, new_s = self._ledger.baseline_s, self._costs.baseline_s(BASELINE_CONTEXT)
        if new_s > old_s and (not self._quiet or self._alone < ALONE):
            return
        if abs(new_s / old_s - 1) > MOVED:
            self._ledger.baseline_s = new_s
            logger.info(
                "AdaServe: baseline %.1f ms per token instead of %.1f, learned from what was served; "
                "SLOs that are multiples of it follow",
                new_s * 1e3,
                old_s * 1e3,
            )

    def report(self, now_s: float) -> dict[str, Any]:
        """For ``/server_info`` and the live page; JSON values. All but the notes is as of the last look."""
        return {
            "busy": self._busy,
            "slowdown": self._costs.slowdown,
            "others_share": self._others_share,
            "baseline_start_ms": self._started_ms,
            "baseline_fixed": not self._follow,
            "notes": self.notes(now_s),
        }
