"""Searches that keep no state between iterations: by the target itself, or by Medusa heads."""

from __future__ import annotations

import numpy as np

from adaserve.engine.device import Drafter
from adaserve.engine.request_state import DecodeRows
from adaserve.engine.sources.search import Asking, QueuedSearch, context_gap, once, search_for
from adaserve.engine.sources.source import KeepDrafting, PendingProposal, TreeSource
from adaserve.engine.trees.batch import TreeBatch
from adaserve.scheduler.interface import IterationPlan
from adaserve.sharpening import DraftSharpening


class StatelessSource(TreeSource):
    """A drafter that finds all it needs in what the target has written, so there is nothing to be told.
    Searches begin with the roots. ``max_nodes``: KV slots that a window has for candidates; ``most_steps``:
    levels that the drafter can make."""

    def __init__(
        self, drafter: Drafter, sharpening: DraftSharpening, max_nodes: int, most_steps: int
    ) -> None:
        self._drafter, self._sharpening = drafter, sharpening
        self._max_nodes, self._most_steps = max_nodes, most_steps

    def propose(
        self, plan: IterationPlan, rows: DecodeRows, keep: KeepDrafting | None
    ) -> PendingProposal | None:
        """As deep as ``plan.draft``; None when no row may have a tree, or none is to be drafted for."""
        found = search_for(plan.draft, rows, self._sharpening, self._max_nodes, self._most_steps)
        if found is None:
            return None
        active, search = found
        gap, width = context_gap(plan.draft, rows.seq_lens, active), search.shape.width
        first = TreeBatch.roots(rows.root_tokens[active], search.pool_rows, search.base, width, gap)
        asking = None if keep is None else Asking(keep, plan, active, len(rows))
        ready = once(self._drafter.search(first, search, asking))
        queued = QueuedSearch(ready, search.shape, active, np.arange(len(active)), len(rows))
        return queued.pending(asking=asking)
