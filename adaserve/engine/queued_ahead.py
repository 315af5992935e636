"""What is queued behind a verification whose outcome the host does not know yet.

Otherwise the device would wait until the host knows the outcome and has planned. Usually the next iteration's
draft is queued. Requests may come and go meanwhile, so that iteration uses the part of the draft that is for
its own requests. If there is nothing to draft, the next verification is queued instead: after a verification
of only roots, each request has exactly one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adaserve.engine.device import Mark, Run
from adaserve.engine.iteration import QueuedDraft
from adaserve.engine.request_state import RequestState
from adaserve.engine.sources.source import ProposalAhead


@dataclass(frozen=True, slots=True)
class DraftAhead:
    """The next iteration's draft, queued behind the verification of the requests ``known``."""

    proposed: ProposalAhead
    known: Sequence[RequestState]
    behind: Mark  # the end of that iteration
    runs: list[list[Run]]  # the draft's forwards

    @property
    def queued_s(self) -> float:
        """From the end of that iteration to the draft's."""
        return self.behind.seconds_until(self.proposed.span[1])

    def take(self, states: Sequence[RequestState]) -> QueuedDraft | None:
        """The part for the iteration of ``states``; None if that part has fewer requests than have joined
        since, which would have to do without a draft."""
        rows, mine = self.proposed.among(states)
        known = set(map(id, self.known))
        joined = sum(id(state) not in known for state in states)
        if len(rows) < max(1, joined):
            return None
        n = len(states)
        plan, pending = self.proposed.for_rows(rows, mine, n), self.proposed.take(rows, mine, n)
        return QueuedDraft(plan, [pending], self.proposed.span, self.runs)
