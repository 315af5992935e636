"""Who proposes candidates: what an iteration asks of its sources, and what they are told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from adaserve.engine.device import Mark, Run
from adaserve.engine.state import DecodeRows
from adaserve.engine.trees.proposal import Proposal
from adaserve.engine.trees.verify import VerifyBatch
from adaserve.scheduler.interface import IterationPlan

KeepDrafting = Callable[[IterationPlan, int, np.ndarray], bool]
"""``Policy.keep_drafting``."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """A proposal that was queued."""

    read: Callable[[], Proposal]  # waits for the device if it must
    caught_up: Run | None = None
    """When the source took in tokens that it had missed; this does not count as the cost of drafting."""
    first_level: Mark | None = None
    """When the first of several levels was there; None where nobody was asked whether to go on."""


class TreeSource:
    """Proposes candidate trees, and keeps what it needs for that, such as a KV cache or texts. Each kind
    either offers or proposes, and listens to what concerns it. All else does nothing.

    What several sources propose is merged by path. The policy sees path probabilities and costs, never a
    source's kind.
    """

    def prefilled(self, batch: Any, drafts: bool) -> None:
        """The target has just prefilled SGLang's ``batch``, whole prompts or chunks, after what the radix
        cache had of them. ``drafts``: whether the policy will want drafts; if not, reading may wait."""

    def offer(self, rows: DecodeRows) -> Proposal | None:
        """Candidates within ``rows.running.max_depth`` that need no forward, before there is a plan; None
        when there are none. The policy plans the depth of the others on top."""
        return None

    def propose(self, plan: IterationPlan, rows: DecodeRows, keep: KeepDrafting | None) -> Drafting | None:
        """Queues candidates for a plan with a depth; None when there will be none.

        ``keep`` is asked between steps by sources that can stop early.
        """
        return None

    def advanced(self, rows: DecodeRows, verified: VerifyBatch, accepted: np.ndarray) -> None:
        """An iteration committed the accepted tokens (bool [T], roots included) of every row."""

    def finished(self, pool_row: int, unheard: bool) -> None:
        """A request ended; SGLang is about to give its slots to the radix cache or free them.

        ``unheard``: it was part of an iteration that ``advanced`` has not told of yet.
        """
