"""One decode iteration, from plan to outcome: the values that its steps pass on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adaserve.engine.device import HostCopy, Mark, Run
from adaserve.engine.request_state import DecodeRows
from adaserve.engine.sources.forced import FORCED
from adaserve.engine.sources.source import PendingProposal
from adaserve.engine.sources.suffix import SUFFIX
from adaserve.engine.trees.proposal import Proposal
from adaserve.engine.trees.verify import VerifyBatch
from adaserve.scheduler.interface import (
    MODEL,
    SECOND_MODEL,
    DraftPlan,
    IterationOutcome,
    IterationPlan,
    Policy,
    Selection,
)
from adaserve.slo.events import IterationSample


@dataclass(frozen=True, slots=True)
class QueuedDraft:
    """The draft of an iteration, on its way: made for its plan, or queued ahead of it."""

    plan: DraftPlan
    pending: Sequence[PendingProposal]  # of the sources that draft
    span: Run  # from its start to its end in the device's queue
    runs: list[list[Run]]  # its forwards, of the target and of each draft model

    @property
    def caught_up(self) -> list[Run]:
        """When sources took in what they had missed, inside of ``span``."""
        return [proposal.caught_up for proposal in self.pending if proposal.caught_up is not None]

    @property
    def first_level(self) -> Mark | None:
        """When the first of several levels was there, if a single source was asked."""
        return self.pending[0].first_level if len(self.pending) == 1 else None


@dataclass(frozen=True, slots=True)
class Marks:
    """Where an iteration's steps behind its draft begin and end in the device's queue."""

    resumed: Mark  # the draft's end, unless it was queued ahead: prompts may have been read meanwhile
    verifying: Mark  # the target's forward begins
    accepted: Mark


@dataclass(frozen=True, slots=True)
class Iteration:
    """What was planned, proposed, selected and verified for n requests; the outcome may still be on its
    way."""

    rows: DecodeRows
    policy: Policy  # that planned it
    plan: IterationPlan
    draft: QueuedDraft  # that the proposal was read from, and what was merged with it
    offers: Sequence[Proposal]
    proposal: Proposal
    selection: Selection
    verified: VerifyBatch
    start_s: float  # by the host's clock
    behind: Mark | None
    """The end of the last iteration, if a draft was queued behind it. This iteration is timed from there,
    because the host does not know when the device reached its start."""
    marks: Marks
    runs: Sequence[Sequence[Run]]  # its forwards of the target, and of each draft model
    copy: HostCopy  # count int64 [n], emitted int64 [n, stride], accepted bool [T], and ``Tap.verified``'s
    recorded: np.ndarray  # int64 [k]: rows that the draft learns from
    unread: bool = False
    """Whether the candidates were verified before they were read. Then ``proposal`` is an outline, and
    ``selection`` and ``verified`` follow from it."""

    def emitted(self) -> list[list[int]]:
        """Accepted tokens and the bonus of each row."""
        got = self.copy.read()
        rows, counts = got["emitted"].tolist(), got["count"].tolist()
        return [row[: count + 1] for row, count in zip(rows, counts, strict=True)]

    def accepted(self) -> np.ndarray:
        """bool [T]: verified tokens on the accepted paths, roots included."""
        return self.copy.read()["accepted"]

    def outcome(self, last_end_s: float, prefilled: bool) -> IterationOutcome:
        """What the policy learns; ``last_end_s`` is 0 before the first iteration. ``prefilled``: whether
        there was a prefill since then."""
        marks, trees, verified = self.marks, self.proposal.trees, self.verified
        start, drafted = self.draft.span
        catch_up_s = sum(begin.seconds_until(end) for begin, end in self.draft.caught_up)
        drafted_s = start.seconds_until(drafted)
        since, since_s = (start, self.start_s) if self.behind is None else (self.behind, last_end_s)
        end_s = since_s + since.seconds_until(marks.accepted)
        first = self.draft.first_level
        accepted = np.zeros(trees.n_nodes, np.bool_)
        accepted[verified.node] = self.accepted()[~verified.is_root]
        return IterationOutcome(
            plan=self.plan,
            trees=trees,
            selection=self.selection,
            accepted=accepted,
            new_tokens=self.copy.read()["count"] + 1,
            end_s=end_s,
            draft_s=drafted_s - catch_up_s,
            select_s=marks.resumed.seconds_until(marks.verifying),
            verify_s=marks.verifying.seconds_until(marks.accepted),
            total_s=drafted_s + marks.resumed.seconds_until(marks.accepted),
            since_last_s=end_s - last_end_s if last_end_s else 0.0,
            prefilled=prefilled or self.plan.running.prefill_tokens > 0,
            prefill_tokens=self.plan.running.prefill_tokens,
            first_level_s=None if first is None else start.seconds_until(first) - catch_up_s,
        )


SOURCES = {"model": MODEL, "second_model": SECOND_MODEL, "forced": FORCED, "suffix": SUFFIX}
"""Bits of ``CandidateTrees.source`` by the names that the metrics use."""


def counts_by_source(outcome: IterationOutcome) -> dict[str, np.ndarray]:
    """Tokens of each row that each source proposed, and how many of these were verified and accepted; int64
    [n, 3]. A token that two sources proposed counts for both."""
    trees, n = outcome.trees, outcome.trees.n_rows
    if not trees.n_nodes:
        return {}
    if trees.source is None:
        proposed = np.diff(trees.row_start)
        return {"model": np.stack([proposed, outcome.selection.counts, outcome.new_tokens - 1], axis=1)}
    row = trees.row
    stages = np.stack([np.ones(trees.n_nodes, np.int64), outcome.selection.keep, outcome.accepted], axis=1)
    counts = {}
    for name, bit in SOURCES.items():
        mine = np.flatnonzero(trees.source & bit)
        if len(mine):
            counts[name] = np.zeros((n, 3), np.int64)
            np.add.at(counts[name], row[mine], stages[mine])
    return counts


def rows_by_window(outcome: IterationOutcome) -> dict[str, int]:
    """How many requests were drafted for, by the number of recent tokens that were read; "all" = the whole
    context."""
    draft, context = outcome.plan.draft, outcome.plan.running.context_tokens
    if not outcome.trees.draft_steps:
        return {}
    window = np.zeros(len(context), np.int64)
    if draft.window is not None:
        window = np.where(draft.reads(context) < context, draft.window, 0)
    used, counts = np.unique(window if draft.rows is None else window[draft.rows], return_counts=True)
    return {str(w) if w else "all": c for w, c in zip(used.tolist(), counts.tolist(), strict=True)}


def sample_of(outcome: IterationOutcome, sources: dict[str, np.ndarray]) -> IterationSample:
    """What the statistics record of an iteration."""
    plan, selection = outcome.plan, outcome.selection
    return IterationSample(
        running=len(plan.running),
        depth=plan.draft.depth,
        width=plan.draft.width if plan.draft.depth else 0,
        budget=plan.budget,
        verify_tokens=selection.verify_tokens,
        drafted_tokens=outcome.trees.n_nodes,
        new_tokens=int(outcome.new_tokens.sum()),
        expected_tokens=float(selection.expected_tokens.sum()),
        draft_s=outcome.draft_s,
        select_s=outcome.select_s,
        verify_s=outcome.verify_s,
        total_s=outcome.total_s,
        sources={name: counts.sum(axis=0).tolist() for name, counts in sources.items()},
        windows=rows_by_window(outcome),
    )
