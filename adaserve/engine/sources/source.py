"""The interface of sources: what an iteration asks them, and what it tells them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from adaserve.engine.device import Mark, Run
from adaserve.engine.request_state import DecodeRows, RequestState
from adaserve.engine.trees.proposal import Proposal, Unread
from adaserve.engine.trees.verify import Acceptance, Tensors, VerifyBatch
from adaserve.scheduler.interface import DraftPlan, IterationPlan

KeepDrafting = Callable[[IterationPlan, int, np.ndarray], bool]
"""``Policy.keep_drafting``."""


@dataclass(frozen=True, slots=True)
class PendingProposal:
    """A proposal that was queued."""

    read: Callable[[], Proposal]  # waits for the device if it must
    caught_up: Run | None = None
    """When the source took in tokens that it had missed; this does not count as the cost of drafting."""
    first_level: Mark | None = None
    """When the first of several levels was there; None where nobody was asked whether to go on."""
    unread: Callable[[], Unread] | None = None
    """The same as the device has it, before it is read; None where the host has it at once."""


@dataclass(frozen=True, slots=True)
class ProposalAhead:
    """A proposal for the next iteration that was queued behind a verification, before it was known what that
    accepts and which requests go on."""

    states: Sequence[RequestState]  # of the requests that it is for
    draft: DraftPlan  # for these
    take: Callable[[np.ndarray, np.ndarray, int], PendingProposal]
    """(rows int64 [b], rising; which of the above they are, int64 [b]; n) -> what it has for these of n
    requests. To be called once the source has been told what was accepted."""
    span: Run  # from its start to its end in the device's queue

    def among(self, states: Sequence[RequestState]) -> tuple[np.ndarray, np.ndarray]:
        """Rows of ``states`` that it is for, and which of its requests they are, int64 [b] each."""
        place = {id(state): i for i, state in enumerate(self.states)}
        found = [(row, place[id(s)]) for row, s in enumerate(states) if id(s) in place]
        rows, mine = np.array(found, np.int64).reshape(-1, 2).T
        return rows, mine

    def for_rows(self, rows: np.ndarray, mine: np.ndarray, n: int) -> DraftPlan:
        """Its draft as one for n requests, of which it has those."""
        has = np.zeros(n, np.bool_)
        has[rows] = True
        window = None
        if self.draft.window is not None:
            window = np.zeros(n, np.int64)
            window[rows] = self.draft.window[mine]
        return replace(self.draft, rows=None if has.all() else has, window=window)


class TreeSource:
    """Proposes candidate trees, and keeps what it needs for that, such as a KV cache or texts. Each kind
    either offers or proposes, and listens to what concerns it. All else does nothing.

    What several sources propose is merged by path. The policy sees path probabilities and costs, never a
    source's kind.
    """

    reads_text = False
    """Whether it offers by what was generated, grammars aside."""

    def prefilled(self, batch: Any, drafts: bool) -> None:
        """The target has just prefilled SGLang's ``batch``, whole prompts or chunks, after what the radix
        cache had of them. ``drafts``: whether the policy will want drafts; if not, reading may wait."""

    def offer(self, rows: DecodeRows) -> Proposal | None:
        """Candidates within ``rows.running.max_depth`` that need no forward, before there is a plan; None
        when there are none. The policy plans the depth of the others on top."""
        return None

    def propose(
        self, plan: IterationPlan, rows: DecodeRows, keep: KeepDrafting | None
    ) -> PendingProposal | None:
        """Queues candidates for a plan with a depth; None when there will be none.

        ``keep`` is asked between steps by sources that can stop early.
        """
        return None

    def propose_ahead(
        self,
        plan: IterationPlan,
        rows: DecodeRows,
        verified: VerifyBatch,
        tensors: Tensors,
        acceptance: Acceptance,
    ) -> ProposalAhead | None:
        """Queues candidates for the next iteration, as ``plan.then`` says, behind this one's verification.
        ``tensors``, ``acceptance``: ``verified`` on the device, and what will have been accepted of it. None
        where they have to wait for that, or are not wanted."""
        return None

    def advanced(self, rows: DecodeRows, verified: VerifyBatch, accepted: np.ndarray) -> None:
        """An iteration committed the accepted tokens (bool [T], roots included) of every row."""

    def finished(self, pool_row: int, unheard: bool) -> None:
        """A request ended; SGLang is about to give its slots to the radix cache or free them.

        ``unheard``: it was part of an iteration that ``advanced`` has not told of yet.
        """
