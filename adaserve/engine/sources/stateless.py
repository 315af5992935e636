"""Searches that keep no state between iterations: by the target itself, or by Medusa heads."""

from __future__ import annotations

import numpy as np

from adaserve.engine.device import Drafter
from adaserve.engine.request_state import DecodeRows
from adaserve.engine.sources.search import (
    Asking,
    QueuedSearch,
    context_gap,
    drafted_rows,
    fitting_shape,
    once,
    search_for,
)
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
        active = drafted_rows(plan.draft, rows)
        shape = fitting_shape(plan.draft, rows, active, self._max_nodes, self._most_steps)
        if shape is None:
            return None
        first = TreeBatch.roots(
            rows.root_tokens[active],
            rows.pool_rows[active],
            rows.seq_lens[active],
            shape.width,
            context_gap(plan.draft, rows.seq_lens, active),
        )
        search = search_for(self._sharpening, rows, active, shape)
        asking = None if keep is None else Asking(keep, plan, active, len(rows))
        ready = once(self._drafter.search(first, search, asking))
        queued = QueuedSearch(ready, shape, active, np.arange(len(active)), len(rows))
        return queued.pending(asking=asking)
