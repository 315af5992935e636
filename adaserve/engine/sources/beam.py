"""Beam search of candidate trees on a draft model (AdaServe, section 4.3, Algorithm 2 line 8).

Each node keeps its own KV slot in its request's window; a node sees the committed prefix, the root
and its ancestors. Re-parented beams therefore never move KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from adaserve.engine.device import Awaited, Device, ModelForward, Ready, Run
from adaserve.engine.request_state import DecodeRows
from adaserve.engine.requests import rows_of_pool, tokens_of
from adaserve.engine.sources.draft_cache import DraftCache
from adaserve.engine.sources.draft_model import DraftModel
from adaserve.engine.sources.search import Asking, QueuedSearch, context_gap, once, search_for
from adaserve.engine.sources.source import KeepDrafting, PendingProposal, ProposalAhead, TreeSource
from adaserve.engine.trees.batch import ContextGap, TreeBatch
from adaserve.engine.trees.verify import Acceptance, Tensors, VerifyBatch
from adaserve.scheduler.interface import DraftPlan, IterationPlan
from adaserve.sharpening import DraftSharpening

MAX_PENDING = 8
"""Tokens that the first step takes in besides the root: the draft has not seen accepted tokens of other
sources, nor the last one of its own. At most ``MIN_WINDOW``, so that no gap reaches into them."""


@dataclass(frozen=True, slots=True)
class _Searched:
    """The search whose outcome is not known yet."""

    pool_rows: frozenset[int]
    ready: Ready


class BeamSource(TreeSource):
    """Searches with a draft model, number ``number`` of the device's. ``max_nodes``: KV slots that a
    window has for its candidates. ``sharpening`` may be replaced between iterations, with the weights."""

    keeps_candidates = True
    """Whether the KV of candidates that are accepted is as good as if it had read them afterwards."""

    def __init__(
        self,
        device: Device,
        cache: DraftCache,
        sharpening: DraftSharpening,
        max_nodes: int,
        model: DraftModel | None = None,
        number: int = 0,
    ) -> None:
        self.cache, self.sharpening = cache, sharpening
        self._forward: ModelForward = device.drafts[number]
        self._device, self._max_nodes, self._model, self._number = device, max_nodes, model, number
        self._kept_by = number if self.keeps_candidates else None
        self._searched: _Searched | None = None

    # -- what it reads ------------------------------------------------------------------------

    def prefilled(self, batch: Any, drafts: bool) -> None:
        """Reads the same tokens, after filling holes in their prefix, or leaves them for later."""
        pool_rows = rows_of_pool(batch).tolist()
        texts = [
            tokens_of(r, [*r.origin_input_ids, *r.output_ids][: prefix + new])
            for r, prefix, new in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
        ]
        if drafts:
            self.cache.fill_holes(pool_rows, batch.prefix_lens, texts)
            self._read(batch, texts)
        slots = batch.out_cache_loc.split(list(batch.extend_lens))
        for row, text, new in zip(pool_rows, texts, slots, strict=True):
            self.cache.started(row, text, new, read=drafts)

    def _read(self, batch: Any, texts: Sequence[Sequence[int]]) -> None:
        """What the target has just read, after a prefix that the draft has."""
        assert self._model is not None
        self._model.extend(batch)

    def advanced(self, rows: DecodeRows, verified: VerifyBatch, accepted: np.ndarray) -> None:
        """The draft has the KV of the root and of every node it expanded: all but the last level."""
        searched, self._searched = self._searched, None
        expanded = 0 if searched is None else searched.ready.read().steps - 1
        path = accepted.nonzero()[0]
        depth, tokens = verified.depth[path].tolist(), verified.tokens[path].tolist()
        by_it = verified.made_by.get(self._number)
        made = [False] * len(path) if by_it is None else by_it[path].tolist()
        starts, pool_rows = [i for i, d in enumerate(depth) if not d], rows.pool_rows.tolist()
        for row, start, end in zip(pool_rows, starts, [*starts[1:], len(path)], strict=True):
            known = 0
            if searched is not None and row in searched.pool_rows:
                known, most = 1, min(end - start, 1 + expanded)  # the root, then what it made and expanded
                while known < most and made[start + known]:
                    known += 1
            self.cache.advanced(row, tokens[start:end], known)
        self.cache.find_holes(pool_rows)

    def finished(self, pool_row: int, unheard: bool) -> None:
        self.cache.finished(pool_row, unheard)

    # -- what it proposes ---------------------------------------------------------------------

    def propose(
        self, plan: IterationPlan, rows: DecodeRows, keep: KeepDrafting | None
    ) -> PendingProposal | None:
        """As deep as ``plan.draft``; None when no row may have a tree, or none is to be drafted for."""
        if (found := search_for(plan.draft, rows, self.sharpening, self._max_nodes)) is None:
            return None
        active, search = found
        pool_rows, shape = search.pool_rows.tolist(), search.shape
        self.cache.find_holes(pool_rows)
        caught_up = self._catch_up(pool_rows)
        gap = self._context_gap(plan.draft, rows.seq_lens, active)
        first = self.cache.first_batch(
            search.pool_rows, search.base, rows.root_tokens[active], shape.width, gap
        )
        asking = None if keep is None else Asking(keep, plan, active, len(rows))
        ready = once(self._forward.search(first, search, asking))
        self.cache.drafted(pool_rows)
        self._searched = _Searched(frozenset(pool_rows), ready)
        queued = QueuedSearch(ready, shape, active, np.arange(len(active)), len(rows), self._kept_by)
        return queued.pending(caught_up, asking)

    def propose_ahead(
        self,
        plan: IterationPlan,
        rows: DecodeRows,
        verified: VerifyBatch,
        tensors: Tensors,
        acceptance: Acceptance,
    ) -> ProposalAhead | None:
        """Where the draft has made every node that is verified, all that it may not have read by then is the
        last token before the root. It reads that one in any case."""
        then, cached = plan.then, rows.seq_lens
        if then is None or not then.depth or not self._forward.follows or len(self._device.drafts) > 1:
            return None
        made = verified.made_by.get(self._number)
        if len(verified.node) > (0 if made is None else np.count_nonzero(made)):
            return None
        if self.cache.may_have_holes(rows.pool_rows.tolist()):  # drafted for or not
            return None  # ``advanced`` will look for them, which must not wait for a draft as well
        # At least one token comes, so that one less is left; and at most so many.
        deepest = np.minimum(rows.running.max_depth, rows.running.remaining_tokens - 2)
        most = 1 + verified.deepest
        rows = replace(rows, seq_lens=cached + most, running=replace(rows.running, max_depth=deepest))
        if (found := search_for(then, rows, self.sharpening, self._max_nodes)) is None:
            return None
        active, search = found
        pool_rows, shape = search.pool_rows, search.shape
        if not self.cache.has_all(pool_rows.tolist()):
            return None
        tokens, root = tensors["tree"][0], tensors["root"]
        awaited = Awaited(most, acceptance.length, acceptance.emitted, tokens, root, active)
        search = replace(search, awaited=awaited)
        two = np.full(len(active), 2)
        gap = self._context_gap(then, cached, active)
        first = TreeBatch.causal(np.zeros(2 * len(active), np.int64), pool_rows, search.base - 1, two, gap)
        start = self._device.mark()
        ready = once(self._forward.search(first, search, None))
        span = start, self._device.mark()

        def take(at: np.ndarray, mine: np.ndarray, n: int) -> PendingProposal:
            taken = pool_rows[mine].tolist()
            self.cache.drafted(taken)
            self._searched = _Searched(frozenset(taken), ready)
            return QueuedSearch(ready, shape, at, mine, n, self._kept_by).pending()

        depth = len(shape.beams)
        branching = then.branching and then.branching[:depth]
        window = None if then.window is None else then.window[active]
        draft = DraftPlan(depth, then.width, branching, None, window, then.sinks)
        return ProposalAhead([rows.states[row] for row in active.tolist()], draft, take, span)

    def _context_gap(self, draft: DraftPlan, cached: np.ndarray, active: np.ndarray) -> ContextGap | None:
        """Of the contexts of the active rows, ``cached`` being the tokens [n] of all."""
        return context_gap(draft, cached, active)

    def _catch_up(self, pool_rows: Sequence[int]) -> Run | None:
        """Separate from the first step, so that the policy does not count it as the cost of drafting."""
        room = self._forward.first_tokens
        most = MAX_PENDING if room is None else room - 1
        if not (late := self.cache.late(pool_rows, most)):
            return None
        start = self._device.mark()
        self.cache.catch_up(late)
        return start, self._device.mark()
