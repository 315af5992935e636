"""From a plan to a search, and from a search to a proposal: what all sources that draft have in common."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial

import numpy as np
from torch import Tensor

from adaserve.engine.device import Beams, Mark, Ready, Run, Search
from adaserve.engine.device_timing import HostMark
from adaserve.engine.request_state import DecodeRows
from adaserve.engine.sources.source import KeepDrafting, PendingProposal
from adaserve.engine.trees.batch import ContextGap
from adaserve.engine.trees.proposal import Proposal, Unread
from adaserve.engine.trees.shape import ANY_DEPTH, TreeShape, laid_out, tree_shape
from adaserve.scheduler.interface import MODEL, CandidateTrees, DraftPlan, IterationPlan
from adaserve.sharpening import DraftSharpening


def search_for(
    draft: DraftPlan, rows: DecodeRows, sharpening: DraftSharpening, most: int, deepest: int = ANY_DEPTH
) -> tuple[np.ndarray, Search] | None:
    """The rows that are drafted for, int64 [a], and a search over them, whose logits are read by
    ``sharpening``; None = nothing is to be drafted. ``most`` nodes and ``deepest`` levels: limits of the
    drafter."""
    may = rows.running.max_depth > 0
    active = (may if draft.rows is None else may & draft.rows).nonzero()[0]
    if (shape := _fitting_shape(draft, rows, active, most, deepest)) is None:
        return None
    scale, spread = _scale_and_spread(sharpening, rows.noisy, rows.running.temperature[active].tobytes())
    search = Search(
        shape=shape,
        base=rows.seq_lens[active],
        pool_rows=rows.pool_rows[active],
        scale=scale,
        spread=spread,
        keys=rows.keys[active],
        forbid=None if rows.grammars is None else rows.grammars.forbid(active),
    )
    return active, search


def _fitting_shape(
    draft: DraftPlan, rows: DecodeRows, active: np.ndarray, most: int, deepest: int
) -> TreeShape | None:
    """The planned shape within the limits, of which a fixed tree knows nothing."""
    depth = min(draft.depth, deepest, int(rows.running.max_depth[active].max(initial=0)))
    while depth:
        branching = None if draft.branching is None else draft.branching[:depth]
        shape = tree_shape(depth, draft.width, branching)
        if shape.nodes <= most:
            return shape
        depth -= 1
    return None


@lru_cache(maxsize=64)
def _scale_and_spread(sharpening: DraftSharpening, noisy: bool, temperatures: bytes) -> list[np.ndarray]:
    """float32 [a] each, not to be written: how the logits of requests of these temperatures are read."""
    read = sharpening.with_shared_noise if noisy else sharpening.without_shared_noise
    return [values.astype(np.float32) for values in read(np.frombuffer(temperatures))]


def context_gap(draft: DraftPlan, cached: np.ndarray, active: np.ndarray) -> ContextGap | None:
    """What is left out of the ``cached`` tokens [n] of the active rows; None = nothing."""
    if draft.window is None:
        return None
    length = (cached - draft.reads(cached))[active]
    return ContextGap(draft.sinks, length) if length.any() else None


def proposal(
    shape: TreeShape, active: np.ndarray, beams: Beams, n: int, kept_by: int | None = None
) -> Proposal:
    """The candidates of a search over the rows ``active`` of n. ``kept_by``: number of the draft model that
    has their KV; None = nobody."""
    nodes = shape.start[beams.steps]
    row_start, depth, column = laid_out(shape, beams.steps, n, active.tobytes())
    trees = CandidateTrees(
        row_start=row_start,
        token=beams.tokens[:, :nodes].ravel(),
        parent=beams.parents[:, :nodes].ravel(),
        depth=depth,
        logprob=beams.logprobs[:, :nodes].ravel(),
        source=np.full(len(depth), MODEL << kept_by) if kept_by else None,
    )
    return Proposal(trees, column, shape.width, {} if kept_by is None else {kept_by: column})


def once(ready: Ready) -> Ready:
    """Read once, and kept."""
    return replace(ready, read=cache(ready.read))


@dataclass(frozen=True, slots=True)
class QueuedSearch:
    """A search on its way, as candidates for requests of an iteration."""

    ready: Ready
    shape: TreeShape
    rows: np.ndarray  # int64 [b]: the requests, rising
    mine: np.ndarray  # int64 [b]: their rows in the search
    n: int  # requests of the iteration
    kept_by: int | None = None  # as in ``proposal``

    def pending(self, caught_up: Run | None = None, asking: Asking | None = None) -> PendingProposal:
        return PendingProposal(
            lambda: self._proposal(self.ready.read().of(self.mine)),
            caught_up,
            None if asking is None else asking.first_level,
            None if self.ready.found is None else partial(self._unread, self.ready.found),
        )

    def _proposal(self, beams: Beams) -> Proposal:
        return proposal(self.shape, self.rows, beams, self.n, self.kept_by)

    def _unread(self, found: Tensor) -> Unread:
        of = np.full(self.n, -1, np.int64)
        of[self.rows] = self.mine
        none = np.zeros((len(self.rows), self.shape.nodes), np.int64)
        blank = Beams(none, none - 1, none.astype(np.float64), len(self.shape.beams))
        return Unread(self._proposal(blank), found, of, self.shape.columns)


class Asking:
    """Asks the policy, which knows all n rows, about the newest level of the ``active`` ones.

    Only hosts ask (``Device.stops_early``). There a level is done when it is asked about."""

    def __init__(self, keep: KeepDrafting, plan: IterationPlan, active: np.ndarray, n: int) -> None:
        self._keep, self._plan, self._active, self._n = keep, plan, active, n
        self.first_level: Mark | None = None

    def __call__(self, step: int, frontier: np.ndarray) -> bool:
        if self.first_level is None:
            self.first_level = HostMark()
        every = np.full((self._n, frontier.shape[1]), -np.inf)
        every[self._active] = frontier
        return self._keep(self._plan, step, every)
