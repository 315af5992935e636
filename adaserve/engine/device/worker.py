"""The worker whose iteration stays on the device: the same policy, states and books as the CPU's.

Per decode iteration the host waits once, for the number of nodes that each request gets verified. Lengths
are known when an iteration starts: SGLang has waited for those of the iteration before. What that iteration
accepted arrived with them, and reaches policy, states and books before the next one is planned.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.utils import GenerationBatchResult

from adaserve.engine.device import sampling, verify
from adaserve.engine.device.agree import Agreement
from adaserve.engine.device.choose import Choice, choose, flat_trees
from adaserve.engine.device.clock import Mark, mark
from adaserve.engine.device.drafter import DeviceDraft, DeviceDrafter
from adaserve.engine.device.layout import starts, to_device
from adaserve.engine.device.rows import DeviceRows
from adaserve.engine.device.selection import Kept
from adaserve.engine.device.setup import device_models
from adaserve.engine.device.transfer import HostCopy
from adaserve.engine.roots import RootTokens
from adaserve.engine.state import RequestState, running_batch
from adaserve.engine.worker import AdaServeWorker, Publish
from adaserve.pair.acceptance import load_sharpening
from adaserve.scheduler.interface import CandidateTrees, IterationOutcome, IterationPlan, Policy, Selection
from adaserve.scheduler.policies.base import BasePolicy

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InFlight:
    """An iteration whose outcome is still on its way to the host."""

    plan: IterationPlan
    policy: Policy
    states: list[RequestState]
    seq_lens: np.ndarray  # int64 [n], before the iteration
    drafted: np.ndarray  # bool [n]: rows with a tree
    sizes: np.ndarray  # int64 [n]: candidates
    depth: np.ndarray  # int64 [k]: of each candidate
    choice: Choice | None  # None without a draft
    copy: HostCopy
    start_s: float
    marks: tuple[Mark, Mark, Mark, Mark]  # start, drafted, selected, committed
    runs: tuple[list[tuple[Mark, Mark]], list[tuple[Mark, Mark]]]  # forwards of draft and target

    @property
    def n(self) -> int:
        return len(self.states)


class DeviceWorker(AdaServeWorker):
    """For CUDA, and for tests on a CPU, where it runs the same code on SDPA and without graphs."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        self._in_flight: InFlight | None = None
        self._leaving: list[str] = []  # finished requests that an iteration in flight still knows

    def init_cuda_graphs(self) -> None:
        """Static buffers and graphs of both models; then the measurements, which run through them."""
        self._device_models = models = device_models(
            self.target_worker.model_runner, self._draft_worker.draft_runner, self.config
        )
        models.capture(self.config)
        self._agreement = Agreement(get_tp_group())
        super().init_cuda_graphs()
        if not self._agreement.alone:
            # When prefills run is decided by every rank for itself, so it must not depend on the clock.
            self.prefill.mode = "exclusive"
        sharpening = load_sharpening(models.draft_folder)
        self._device_drafter = DeviceDrafter(
            models.draft,
            sharpening.reading,
            self.config.max_candidates,
            models.row_tiers,
            models.most_tokens,
        )
        self._history = torch.zeros(
            self.req_to_token_pool.req_to_token.shape, dtype=torch.int32, device=models.device
        )
        models.draft.take_runs()  # the measurements'
        models.target.take_runs()
        logger.info("AdaServe: iterations on %s; %s", models.device, models.summary())

    def build_policy(self, name: str) -> Policy:
        """No policy is asked between draft steps here, so the planned depth must pay as it is."""
        policy = super().build_policy(name)
        if isinstance(policy, BasePolicy):
            policy.config = replace(policy.config, early_stop=False)
        return policy

    def report(self) -> dict[str, Any]:
        """Also what the graphs cost."""
        self._settle()
        return {**super().report(), "device": self._device_models.to_json()}

    # -- prefill ------------------------------------------------------------------------------

    def _prefill(self, batch: Any, on_publish: Publish | None) -> GenerationBatchResult:
        self._settle()
        return super()._prefill(batch, on_publish)

    def _start_requests(self, batch: Any, first_tokens: list[int]) -> None:
        super()._start_requests(batch, first_tokens)
        rows, lengths, tokens = _pool_rows(batch), batch.seq_lens_cpu.tolist(), []
        for req, row, length in zip(batch.reqs, rows, lengths, strict=True):
            tokens += [*req.origin_input_ids, *req.output_ids][:length]
            self._states[row].pending.clear()  # the tokens' history stands in its place
        at = np.arange(len(tokens)) - np.repeat(starts(np.array(lengths))[:-1], lengths)
        device = self._history.device
        index = (to_device(np.repeat(rows, lengths), device), to_device(at, device))
        self._history.index_put_(index, to_device(np.array(tokens, np.int32), device))

    # -- decode -------------------------------------------------------------------------------

    def _decode(self, batch: Any, on_publish: Publish | None) -> GenerationBatchResult:
        self._settle()
        models = self._device_models
        start_s, start = time.perf_counter(), mark(models.device)
        states = [self._states[row] for row in _pool_rows(batch)]
        rows = self._device_rows(batch, states)
        plan = self._agreement.plan(lambda: self.policy.plan(rows.running, start_s), rows.running)
        if self._recorder is not None:
            self._recorder.planned(plan)
        draft = self._device_drafter.draft(plan, rows) if plan.depth else None
        drafted = mark(models.device)
        choice = None
        if draft is not None:
            nodes = len(draft.active) * draft.shape.nodes
            grid = draft.grid(len(rows))
            choice = self._agreement.choice(
                lambda: choose(self.policy, plan, grid, nodes), lambda: Kept.nothing(grid)
            )
        selected = mark(models.device)
        counts = np.zeros(len(rows), np.int64) if choice is None else choice.counts
        v = verify.build(rows, draft, None if choice is None else choice.kept.keep, counts)
        logits, best = verify.forward(models.target, rows, v, models.token_tiers, models.most_rows)
        draws, adjusted = sampling.draw(batch, v, logits, best, states)
        acceptance = verify.accept(v, draws, self.stride)
        result = self._result(batch, rows, v, acceptance, draws, adjusted)
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        committed = mark(models.device)  # before the copy, whose arrival says that all marks were reached
        copy = _outcome_copy(v, acceptance, draft, choice, len(rows))
        sizes = np.zeros(len(rows), np.int64)
        if draft is not None:
            sizes[draft.active] = draft.shape.nodes
        self._in_flight = InFlight(
            plan, self.policy, states, rows.seq_lens, sizes > 0, sizes,
            np.zeros(0, np.int64) if draft is None else draft.shape.depth, choice, copy, start_s,
            (start, drafted, selected, committed), (models.draft.take_runs(), models.target.take_runs()),
        )  # fmt: skip
        if self._settles_at_once:
            self._settle()
        return result

    @property
    def _settles_at_once(self) -> bool:
        """Without overlap SGLang waits for every iteration, so nothing is gained by settling later."""
        from sglang.srt.runtime_context import get_schedule

        return bool(get_schedule().disable_overlap_schedule)

    def _device_rows(self, batch: Any, states: list[RequestState]) -> DeviceRows:
        lens = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
        seq_lens = lens.cpu().numpy().astype(np.int64)
        return DeviceRows(
            seq_lens=seq_lens,
            lens=batch.seq_lens.long(),
            roots=batch.spec_info.bonus_tokens.long(),
            pool_rows=batch.req_pool_indices.long(),
            req_to_token=self.req_to_token_pool.req_to_token,
            history=self._history,
            lag=seq_lens - np.array([s.draft_len for s in states]),
            running=running_batch(batch.reqs, states, seq_lens, self.config.max_depth),
            keys=np.array([s.key for s in states], np.uint64),
        )

    def _result(
        self,
        batch: Any,
        rows: DeviceRows,
        v: verify.DeviceVerify,
        acceptance: verify.DeviceAcceptance,
        draws: torch.Tensor,
        logits: torch.Tensor | None,
    ) -> GenerationBatchResult:
        """Keeps the accepted paths in caches and history, and says so to SGLang; all queued."""
        if v.deepest:
            target, source = verify.moves(rows, v, acceptance, v.deepest)
            for runner in (self.target_worker.model_runner, self._draft_worker.draft_runner):
                runner.token_to_kv_pool.move_kv_cache(target, source)
        verify.remember(rows, v, acceptance)
        output = LogitsProcessorOutput(next_token_logits=logits)
        if batch.return_logprob:
            index = verify.path_index(v, acceptance, self.stride)
            compute_spec_logprobs(batch, output, draws, accept_index=index)
        accept_lens = acceptance.count + 1
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=acceptance.emitted.flatten(),
            accept_lens=accept_lens.int(),
            new_seq_lens=batch.seq_lens + accept_lens,
            next_draft_input=RootTokens(acceptance.bonus),
            speculative_num_draft_tokens=self.stride,
            speculative_output_stride=self.stride,
            can_run_cuda_graph=self._device_models.captures,
        )

    # -- bookkeeping --------------------------------------------------------------------------

    def _settle(self) -> None:
        """Takes in the outcome of the last iteration, if that is still to be done."""
        flight, self._in_flight = self._in_flight, None
        if flight is None:
            return
        got = flight.copy.read()
        _advance(flight, got)
        start, drafted, selected, end = flight.marks
        seconds = start.seconds_until(end)
        end_s = flight.start_s + seconds
        trees = _trees(flight, got)
        outcome = IterationOutcome(
            plan=flight.plan,
            trees=trees,
            selection=_selection(flight, got, trees),
            accepted=got["accepted"][_there(flight)],
            new_tokens=got["count"] + 1,
            end_s=end_s,
            draft_s=start.seconds_until(drafted),
            select_s=drafted.seconds_until(selected),
            verify_s=selected.seconds_until(end),
            total_s=seconds,
            since_last_s=end_s - self._last_end_s if self._last_end_s else 0.0,
        )
        for model, runs in zip((self._draft, self._target), flight.runs, strict=True):
            model.busy_s += sum(first.seconds_until(last) for first, last in runs)
        current, self.policy = self.policy, flight.policy
        self._observe(outcome)
        self.policy = current
        leaving, self._leaving = self._leaving, []
        for rid in leaving:
            self._forget(rid)

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        if self._in_flight is None:
            self._forget(rid)
        else:  # it rides an iteration whose outcome would bring it back; waiting for that would cost time
            self._leaving.append(rid)


def _pool_rows(batch: Any) -> list[int]:
    """Every request's row of the request pool, from the host's own copy."""
    return [int(row) for row in batch.req_pool_indices_cpu]


def _outcome_copy(
    v: verify.DeviceVerify,
    acceptance: verify.DeviceAcceptance,
    draft: DeviceDraft | None,
    choice: Choice | None,
    n: int,
) -> HostCopy:
    """Queues what the host wants to know; grids are [n, k]."""
    k = 0 if draft is None else draft.shape.nodes
    device = acceptance.count.device
    accepted = torch.zeros(n * k, dtype=torch.bool, device=device)
    if len(v.node):
        accepted = accepted.index_copy(0, v.node, acceptance.accepted[v.place])
    fields = {"count": acceptance.count, "emitted": acceptance.emitted, "accepted": accepted.view(n, k)}
    if draft is not None and choice is not None:
        grid = draft.grid(n)
        token = torch.zeros(n, k, dtype=torch.int64, device=device)
        fields |= {
            "token": token.index_copy(0, to_device(draft.active, device), draft.tokens),
            "parent": grid.parent,
            "logprob": grid.logprob,
            "keep": choice.kept.keep,
            "slo_counts": choice.kept.slo_counts,
            "expected": choice.kept.expected,
        }
    return HostCopy(**fields)


def _there(flight: InFlight) -> np.ndarray:
    """bool [n, k]: places of the grid that hold a candidate."""
    return np.arange(len(flight.depth)) < flight.sizes[:, None]


def _trees(flight: InFlight, got: dict[str, np.ndarray]) -> CandidateTrees:
    if flight.choice is None:
        return CandidateTrees.empty(flight.n)
    depth = np.broadcast_to(flight.depth, (flight.n, len(flight.depth)))
    return flat_trees(flight.sizes, got["token"], got["parent"], depth, got["logprob"])


def _selection(flight: InFlight, got: dict[str, np.ndarray], trees: CandidateTrees) -> Selection:
    n = flight.n
    if flight.choice is None:
        zero = np.zeros(n, np.int64)
        return Selection(np.zeros(0, np.bool_), zero, zero, np.ones(n))
    if flight.choice.on_host is not None:
        return flight.choice.on_host
    counts, keep = flight.choice.counts, got["keep"][_there(flight)]
    if flight.choice.learns_in_select:
        own = flight.policy.select(flight.plan, trees)
        return replace(own, keep=keep, counts=counts, expected_tokens=got["expected"])
    return Selection(keep, counts, got["slo_counts"], got["expected"])


def _advance(flight: InFlight, got: dict[str, np.ndarray]) -> None:
    """Brings the requests' states up to date with the emitted tokens."""
    counts = got["count"].tolist()
    for r, state in enumerate(flight.states):
        new_tokens = got["emitted"][r, : counts[r] + 1].tolist()
        before = int(flight.seq_lens[r])
        if flight.drafted[r]:
            # The draft has all but perhaps the last accepted node; its first step feeds that one anyway.
            state.draft_len = before + len(new_tokens) - 1
        state.generated.extend(new_tokens)
        state.decoded += len(new_tokens)
