"""Decode iterations: plan, draft, select, verify, accept, commit, observe (docs/architecture.md)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult

from adaserve.engine import sampling
from adaserve.engine.decisions import Decisions
from adaserve.engine.device import Device, Mark, Run
from adaserve.engine.dry_run import dry_run
from adaserve.engine.grammar import Allowed, Grammars
from adaserve.engine.iteration import Iteration, Marks, QueuedDraft
from adaserve.engine.kv_compaction import KVCompactor
from adaserve.engine.learning.learner import Learner
from adaserve.engine.learning.tap import Tap
from adaserve.engine.logits import logprobs
from adaserve.engine.penalties import Penalties
from adaserve.engine.queued_ahead import DraftAhead
from adaserve.engine.request_state import BatchRequests, DecodeRows, RequestState
from adaserve.engine.requests import Requests, rows_of_pool
from adaserve.engine.roots import RootTokens
from adaserve.engine.sources.source import TreeSource
from adaserve.engine.time_breakdown import TimeBreakdown
from adaserve.engine.trees import verify
from adaserve.engine.trees.batch import TreeBatch, UnreadNodes
from adaserve.engine.trees.proposal import Proposal, Unread, merge
from adaserve.patches.scheduler import result_copies
from adaserve.patches.scheduler.grammar_time import end_slow
from adaserve.scheduler.interface import DraftPlan, IterationOutcome, IterationPlan, Selection
from adaserve.scheduler.selection import everything
from adaserve.slo.lengths import OutputLengths

Publish = Callable[[torch.Tensor], None]
"""SGLang's relay of new sequence lengths to its overlapped scheduler."""

NO_DRAFT = DraftPlan(0)


@dataclass(frozen=True, slots=True)
class Choice:
    """What an iteration verifies."""

    proposal: Proposal
    selection: Selection
    allowed: Allowed | None = None  # by grammars
    unread: Unread | None = None  # all candidates, which nobody has read: ``proposal`` is their outline


@dataclass(eq=False)
class DecodeLoop:
    """Runs one decode iteration of all running requests after the other, and does what follows from each.

    Under the overlap schedule SGLang calls the next iteration before this one's outcome has been read. Then
    it is read when the next one needs it, and observed while that one drafts.
    """

    device: Device
    sources: Sequence[TreeSource]
    compactor: KVCompactor
    requests: Requests
    decisions: Decisions
    tap: Tap
    learner: Learner | None
    lengths: OutputLengths
    observed: Callable[[IterationOutcome], None]
    """Called with every outcome, after the policy has observed it."""
    deepest: int  # levels that a request's KV window has room for
    overlaps: bool
    times: TimeBreakdown = field(default_factory=TimeBreakdown)

    def __post_init__(self) -> None:
        self.stride = self.deepest + 1
        self._penalties = Penalties()
        self._arriving: Iteration | None = None  # whose tokens requests and sources don't know yet
        self._unobserved: Iteration | None = None  # whose outcome the policy doesn't know yet
        self._last: Iteration | None = None  # what the next one's dry run goes through
        self._ahead: DraftAhead | None = None  # of the next iteration
        self._leaving: list[str] = []  # finished requests that an unobserved iteration still knows
        self._beside: TreeBatch | None = None  # prompts that the next verification has in its forward
        self._take_runs()  # the measurements'

    def read_beside(self, prompts: TreeBatch) -> None:
        """The next iteration's verification has these in its forward. SGLang calls for them next."""
        self._beside = prompts

    def decode(
        self, batch: Any, on_publish: Publish | None, grammar_barrier: Callable[[], None] | None = None
    ) -> GenerationBatchResult:
        """One iteration (docs/architecture.md). All device work is only queued; the host reads only what it
        has waited for.

        ``batch``: SGLang's ``ScheduleBatch`` of n running requests. ``on_publish`` is told their new lengths,
        int64 [n], as soon as these are queued. ``grammar_barrier`` returns when SGLang has advanced grammars
        by what the last iteration accepted.
        """
        beside, self._beside = self._beside, None
        pool_rows = rows_of_pool(batch)
        states = self.requests.at(pool_rows.tolist())
        settings, asked = sampling.Settings.of(batch.reqs), BatchRequests.of(batch.reqs, states)
        self._take_runs()  # what drafts have read in prefills is no part of this iteration
        behind, drawn = self._hear(batch, asked, settings, grammar_barrier, beside)
        if self.learner is not None:
            self.learner.look(states, time.perf_counter())
        policy, ahead = self.decisions.policy, self._take_ahead(states)
        start_s, start = time.perf_counter(), self.device.mark()
        rows = self._rows(batch, pool_rows, asked, beside)
        offers = self._offers(rows)
        underway = NO_DRAFT if drawn is not None else None if ahead is None else ahead.plan
        plan = self._plan(rows, offers, settings, underway, start_s)
        draft = self._draft(plan, rows, start) if ahead is None else ahead
        choice = self._choose(plan, rows, draft, offers)
        verified = verify.build(rows, choice.proposal, choice.selection)
        recorded = self.tap.rows(rows)
        tensors, draws, logits = self._verify(
            batch, rows, settings, verified, choice, drawn, recorded, beside
        )
        acceptance = self.device.accept(tensors, draws, len(rows), verified.deepest, self.stride)
        tapped = {}
        if logits is not None and len(recorded):
            tapped = self.tap.verified(self.device, rows, recorded, verified, tensors, acceptance, logits)
        result = self._result(batch, verified, acceptance, tensors, draws, logits)
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        runs = self._take_runs()
        verifying = runs[0][0][0]  # where the target's forward begins; a mark of its own would cost time
        marks = Marks(draft.span[1] if ahead is None else start, verifying, self.device.mark())
        result_copies.allow_behind(result, marks.accepted)
        copy = self.device.get(
            count=acceptance.count, emitted=acceptance.emitted, accepted=acceptance.accepted, **tapped
        )
        self.compactor.compact(verified, tensors, acceptance)  # which the host does not have to wait for
        self._observe()  # unless that was done while drafts were awaited
        if drawn is not None:
            self.settle()
            verified.tokens[:] = rows.root_tokens
        runs = [before + now for before, now in zip(draft.runs, runs, strict=True)]
        self._arriving = self._unobserved = self._last = Iteration(
            rows=rows, policy=policy, plan=plan, draft=draft, offers=offers, proposal=choice.proposal,
            selection=choice.selection, verified=verified, start_s=start_s, behind=behind, marks=marks,
            runs=runs, copy=copy, recorded=recorded, unread=choice.unread is not None,
        )  # fmt: skip
        if self.overlaps:
            self._draft_ahead(self._arriving, tensors, acceptance)
        else:
            self.settle()
        return result

    def _rows(
        self, batch: Any, pool_rows: np.ndarray, asked: BatchRequests, beside: TreeBatch | None
    ) -> DecodeRows:
        states, info = asked.states, batch.sampling_info
        generated = np.array([len(s.generated) for s in states], np.int64)
        cached = asked.prompt_tokens + generated - 1  # all but the last one
        running = asked.running(generated, cached, self.deepest, self.lengths)
        if beside is not None:
            running = replace(running, prefill_tokens=len(beside))
        grammars = Grammars.of(batch.reqs, info) if asked.with_grammar else None
        return DecodeRows(states, cached, pool_rows, running, info.sampling_seed is None, grammars)

    def _offers(self, rows: DecodeRows) -> list[Proposal]:
        """The candidates that sources propose without a forward."""
        if not self.decisions.speculates:
            return []
        return [offer for source in self.sources if (offer := source.offer(rows)) is not None]

    def _plan(
        self,
        rows: DecodeRows,
        offers: Sequence[Proposal],
        settings: sampling.Settings,
        underway: DraftPlan | None,
        now_s: float,
    ) -> IterationPlan:
        """The policy's plan. It knows what there is already: offered candidates, and a draft underway."""
        running = replace(
            rows.running,
            offered=merge(offers, len(rows)).trees if offers else None,
            underway=underway,
            may_go_unread=self._may_go_unread(rows, offers, settings),
        )
        return self.decisions.plan(running, now_s)

    def _may_go_unread(
        self, rows: DecodeRows, offers: Sequence[Proposal], settings: sampling.Settings
    ) -> bool:
        """Whether the device knows enough to verify what it drafts: no other candidates join the draft, no
        prompts join the verification, and no draw depends on the text."""
        joined = offers or rows.grammars is not None or len(self.device.drafters) > 1
        joined = joined or rows.running.prefill_tokens > 0
        return not (joined or settings.penalized.any()) and self.device.target.follows

    def _draft(self, plan: IterationPlan, rows: DecodeRows, start: Mark) -> QueuedDraft:
        """What the sources have queued for a plan. ``start``: of the iteration."""
        pending = []
        if plan.draft.depth:
            keep = self.decisions.policy.keep_drafting if self.device.stops_early else None
            proposed = [source.propose(plan, rows, keep) for source in self.sources]
            pending = [proposal for proposal in proposed if proposal is not None]
        return QueuedDraft(plan.draft, pending, (start, self.device.mark()), self._take_runs())

    def _choose(
        self,
        plan: IterationPlan,
        rows: DecodeRows,
        draft: QueuedDraft,
        offers: Sequence[Proposal],
    ) -> Choice:
        """Chooses what is verified. Waits for the draft, unless all of its nodes are verified, or none can
        be."""
        pending = draft.pending
        if plan.takes_all and len(pending) == 1 and pending[0].unread is not None:
            unread = pending[0].unread()
            return Choice(unread.outline, everything(unread.outline.trees, plan.cap), unread=unread)
        self._observe()  # the last iteration, if that is known, while the device drafts
        awaited = pending if plan.cap is None or plan.cap.any() else []
        if awaited:
            dry_run(self.device, self.decisions.policy, plan, self._last)
        proposal, allowed = merge([*(d.read() for d in awaited), *offers], len(rows)), None
        if rows.grammars is not None:
            trees, allowed = rows.grammars.constrain(proposal.trees)
            end_slow(rows.grammars.reqs, self.decisions.rank_sync.decide)
            proposal = replace(proposal, trees=trees)
        return Choice(proposal, self.decisions.select(plan, proposal.trees), allowed)

    def _draft_ahead(
        self, iteration: Iteration, tensors: verify.Tensors, acceptance: verify.Acceptance
    ) -> None:
        """Queues the next draft behind the verification, so that the device does not wait until the host
        knows the outcome and has planned."""
        rows = iteration.rows
        if rows.grammars is not None or not self.decisions.speculates:
            return
        for source in self.sources:
            ahead = source.propose_ahead(iteration.plan, rows, iteration.verified, tensors, acceptance)
            if ahead is not None:
                self._ahead = DraftAhead(ahead, rows.states, iteration.marks.accepted, self._take_runs())

    def _take_ahead(self, states: Sequence[RequestState]) -> QueuedDraft | None:
        ahead, self._ahead = self._ahead, None
        return ahead.take(states) if ahead is not None and self.decisions.speculates else None

    def _hear(
        self,
        batch: Any,
        asked: BatchRequests,
        settings: sampling.Settings,
        grammar_barrier: Callable[[], None] | None,
        beside: TreeBatch | None,
    ) -> tuple[Mark | None, torch.Tensor | None]:
        """Reads what the last iteration accepted, if that comes late (overlap). If this iteration is queued
        before that is known, the last one's tokens are only counted.

        Returns the end of the last iteration, if anything is queued behind it; and in the latter case its
        tokens on the device, int64 [n]."""
        behind, drawn = None if self._ahead is None else self._ahead.behind, None
        last = self._arriving
        if last is not None and beside is None and self._goes_ahead(last, batch, asked, settings):
            for state in last.rows.states:
                state.expect()
            behind, drawn = last.marks.accepted, batch.spec_info.bonus_tokens
        else:
            self._advance()
        if grammar_barrier is not None:
            grammar_barrier()  # the same for matchers, which SGLang advances
        return behind, drawn

    def _goes_ahead(
        self, last: Iteration, batch: Any, asked: BatchRequests, settings: sampling.Settings
    ) -> bool:
        """Whether an iteration is queued before the host knows the outcome of the last one. Both verify only
        roots, so each request gets one token. Which token that is matters only for the forward, which reads
        it on the device."""
        if last.verified.deepest or last.unread:
            return False
        if last.policy is not self.decisions.policy or last.plan.then is None or last.plan.then.depth:
            return False
        if asked.with_grammar or settings.penalized.any() or batch.sampling_info.has_custom_logit_processor:
            return False
        offers = self.decisions.speculates and any(source.reads_text for source in self.sources)
        return self.device.target.follows and not offers

    def _verify(
        self,
        batch: Any,
        rows: DecodeRows,
        settings: sampling.Settings,
        verified: verify.VerifyBatch,
        choice: Choice,
        drawn: torch.Tensor | None,
        recorded: np.ndarray,
        beside: TreeBatch | None,
    ) -> tuple[verify.Tensors, torch.Tensor, torch.Tensor | None]:
        """The verified tokens on the device, the target's draws int64 [T], and logits if they were
        computed."""
        target, info = self.device.target, batch.sampling_info
        allowed, unread = choice.allowed, choice.unread
        if unread is not None:
            more = {"of": unread.of, "columns": unread.columns}
            tensors = self.device.put({**verified.arrays(), **more})
            states = target.run(replace(verified.batch, unread=UnreadNodes(unread.found, tensors)))
        else:
            known = verified.batch if drawn is None else replace(verified.batch, drawn=drawn)
            # First: the device waits for it, and not for what follows.
            states = target.run(known) if beside is None else target.run_beside(known, beside)
            tensors = self.device.put(verified.arrays())
        if drawn is not None:
            tensors["tree"][0].copy_(drawn)
        wanted = batch.return_logprob or bool(len(recorded))
        if allowed is None and not wanted and sampling.is_plain_greedy(info, settings):
            return tensors, target.argmax(states), None
        step = sampling.Step(
            self.device, batch.reqs, rows.states, settings, info, verified, tensors, self._penalties, allowed,
            wanted,
        )  # fmt: skip
        logits = target.logits(states)
        sampling.adjust_logits(logits, step)
        return tensors, sampling.draw(logits, step), logits

    def _result(
        self,
        batch: Any,
        verified: verify.VerifyBatch,
        acceptance: verify.Acceptance,
        tensors: verify.Tensors,
        draws: torch.Tensor,
        logits: torch.Tensor | None,
    ) -> GenerationBatchResult:
        output = LogitsProcessorOutput(next_token_logits=logits)
        if batch.return_logprob:
            index = verify.path_index(tensors, acceptance, self.stride)
            logprobs.tell(batch, output, draws, index)
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=acceptance.emitted.flatten(),
            accept_lens=acceptance.length,
            cap_lens=torch.from_numpy(verified.batch.q_lens),  # what was verified, roots included
            new_seq_lens=batch.seq_lens + acceptance.length,
            next_draft_input=RootTokens(acceptance.bonus),
            speculative_num_draft_tokens=self.stride,
            speculative_output_stride=self.stride,
            can_run_cuda_graph=self.device.target.was_graph,
        )

    def free_s(self) -> float:
        """When the device finished everything that the last iteration queued. Only valid once it has
        finished."""
        return self.times.last_end_s + (0 if self._ahead is None else self._ahead.queued_s)

    # -- what follows -------------------------------------------------------------------------

    def settle(self) -> None:
        """Reads and observes the outcome of the last iteration, if that is still to be done."""
        self._advance()
        self._observe()

    def _advance(self) -> None:
        """Brings requests and sources up to date with what the last iteration accepted."""
        iteration, self._arriving = self._arriving, None
        if iteration is None:
            return
        if iteration.unread:
            iteration = self._unobserved = self._last = self._read(iteration)
        if len(iteration.recorded):
            self.tap.heard(iteration.rows, iteration.recorded, iteration.copy.read())
        for state, tokens in zip(iteration.rows.states, iteration.emitted(), strict=True):
            state.advance(tokens)
        accepted = iteration.accepted()
        for source in self.sources:
            source.advanced(iteration.rows, iteration.verified, accepted)

    def _read(self, iteration: Iteration) -> Iteration:
        """The iteration with its candidates. The policy is asked for a selection as if it were needed."""
        proposal = iteration.draft.pending[0].read()
        selection = self.decisions.take_all(iteration.policy, iteration.plan, proposal.trees)
        verified = verify.build(iteration.rows, proposal, selection)
        return replace(iteration, proposal=proposal, selection=selection, verified=verified, unread=False)

    def _observe(self) -> None:
        """Tells the policy and all other observers what the last iteration did."""
        if self._unobserved is None or self._unobserved is self._arriving:
            return
        iteration, self._unobserved = self._unobserved, None
        outcome = iteration.outcome(self.times.last_end_s, self.times.has_prefilled)
        self.times.decoded(outcome, iteration.runs)
        self.decisions.observe(iteration.policy, outcome)
        self.observed(outcome)
        leaving, self._leaving = self._leaving, []
        for rid in leaving:
            self.forget(rid)

    def _take_runs(self) -> list[list[Run]]:
        """Forwards since the last call, of the target and of each model that drafts for it."""
        return [model.take_runs() for model in (self.device.target, *self.device.drafters)]

    def finished(self, rid: str, holds_row: bool = True) -> None:
        """A request has ended. Called before SGLang gives its slots to the radix cache. If it has lost its
        row of the request pool (not ``holds_row``), its slots belong to others by now."""
        row = self.requests.end(rid)
        if row is not None and holds_row:
            unheard = self._arriving is not None and bool((self._arriving.rows.pool_rows == row).any())
            for source in self.sources:
                source.finished(row, unheard)
        if self._unobserved is None:
            self.forget(rid)
        else:  # it is in an unobserved iteration, whose outcome would bring it back; waiting would cost time
            self._leaving.append(rid)

    def forget(self, rid: str) -> None:
        """Drops what is known about a request that will not decode again, or not in the same state."""
        self.decisions.forget(rid)
        self.tap.finished(rid)
