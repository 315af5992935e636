"""Beam search on a head that reads the target's hidden states (EAGLE-3, section 3), or on an MTP layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from adaserve.engine.requests import rows_of_pool
from adaserve.engine.sources.beam import BeamSource
from adaserve.engine.trees.batch import ContextGap
from adaserve.scheduler.interface import DraftPlan


class HeadSource(BeamSource):
    """``BeamSource`` of a head, which drafts from its own guesses of what the target's hidden states will be.

    What it has computed from such guesses does not last: once tokens are accepted, the target's own states of
    them are there, and the head's next search begins by reading those tokens again.
    """

    keeps_candidates = False

    def _read(self, batch: Any, texts: Sequence[Sequence[int]]) -> None:
        starts = list(batch.prefix_lens)
        new = [list(text[start:]) for text, start in zip(texts, starts, strict=True)]
        self.cache.feed(rows_of_pool(batch).tolist(), starts, new)

    def _context_gap(self, draft: DraftPlan, cached: np.ndarray, active: np.ndarray) -> ContextGap | None:
        """The first tokens are not sinks for a head, which has never read the very first. So it reads as many
        recent ones more."""
        gap = super()._context_gap(draft, cached, active)
        return gap and replace(gap, start=0)
