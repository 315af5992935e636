"""The speculative worker: plan, draft, select, verify, accept, commit, observe (docs/architecture.md)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import get_observability, get_parallel, get_schedule
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from adaserve.config import AdaServeConfig, ConfigError, slo_classes
from adaserve.engine import logprobs, measure, sampling
from adaserve.engine.agree import Agreement
from adaserve.engine.forecast import Forecaster
from adaserve.engine.grammar import Allowed, Grammars
from adaserve.engine.host_costs import BASELINE_CONTEXT, HostCosts
from adaserve.engine.iteration import Iteration, Marks, counts_by_source, sample_of
from adaserve.engine.learner import Learner
from adaserve.engine.parts import Device, Drafter, Run
from adaserve.engine.penalties import Penalties, restore_penalties
from adaserve.engine.policies import ServedPolicies
from adaserve.engine.prefill import PrefillPacer
from adaserve.engine.requests import Requests
from adaserve.engine.roots import RootTokens
from adaserve.engine.shedding import Shedder
from adaserve.engine.sources.beam import BeamSource
from adaserve.engine.sources.choice import sources_of
from adaserve.engine.sources.draft_model import DraftModels
from adaserve.engine.sources.source import Drafting
from adaserve.engine.state import DecodeRows, running_batch
from adaserve.engine.times import Times
from adaserve.engine.trees import verify
from adaserve.engine.trees.proposal import Proposal, merge
from adaserve.host import on_device
from adaserve.identity import ensure_registered
from adaserve.patches.kv_sizing import draft_paths
from adaserve.scheduler.costs import LearnedCosts
from adaserve.scheduler.interface import IterationPlan, Policy
from adaserve.scheduler.replay import Recorder
from adaserve.slo.ledger import SLOLedger
from adaserve.slo.prometheus import ServerMetrics
from adaserve.slo.request_log import RequestLog
from adaserve.slo.stats import SLOStats

logger = logging.getLogger(__name__)

Publish = Callable[[torch.Tensor], None]
"""SGLang's relay of new sequence lengths to its overlapped scheduler."""


class AdaServeWorker(BaseSpecWorker):
    """Serves each request at its TPOT SLO. Constructed by SGLang's scheduler, one per rank.

    Under the overlap schedule SGLang calls the next iteration before this one's outcome has been read: then
    it is read where the next one needs it, and observed while that one drafts.
    """

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        super().__init__()
        ensure_registered()
        self.config = AdaServeConfig.load()
        self._target_worker = target_worker
        paths = draft_paths(self.config)
        self._draft_worker = (
            DraftModels(paths, server_args, gpu_id, nccl_port, target_worker) if paths else None
        )
        self._target_path = server_args.model_path
        seed = (server_args.random_seed, get_parallel().dp_rank or 0)
        self._init_state(Requests(seed), overlaps=not get_schedule().disable_overlap_schedule)

    def _init_state(self, requests: Requests, overlaps: bool) -> None:
        self.requests, self.stride = requests, self.config.deepest + 1
        self._overlaps = overlaps
        self.times = Times()
        self._penalties = Penalties()
        self._arriving: Iteration | None = None  # whose tokens requests and sources don't know yet
        self._unobserved: Iteration | None = None  # whose outcome the policy doesn't know yet
        self.learner: Learner | None = None
        self._leaving: list[str] = []  # finished requests that an unobserved iteration still knows

    def init_cuda_graphs(self) -> None:
        """Last step of SGLang's start: pools and backends are there, so the host can be measured."""
        super().init_cuda_graphs()
        target = self.target_worker.model_runner
        drafts = [] if self._draft_worker is None else self._draft_worker.draft_runners
        self._kv_pools = tuple(runner.token_to_kv_pool for runner in (target, *drafts))
        self._agreement = Agreement(get_tp_group())
        self.device = open_device(target, drafts, self.config)
        models = () if self._draft_worker is None else self._draft_worker.models
        pools, table = self._kv_pools[1:], self.req_to_token_pool.req_to_token
        self._sources = tuple(
            sources_of(self.config, self.device, models, pools, table, self.target_worker.tokenizer)
        )
        self._measure(target)
        # Ranks and data-parallel replicas have one file, and one of them may write to it.
        records = self.config.record if self._agreement.decides and not get_parallel().dp_rank else None
        self._recorder = Recorder(Path(records)) if records else None
        windows = self.config.has_self or (bool(models) and all(m.kind == "model" for m in models))
        self._policies = ServedPolicies(self.config, self.costs, self.device, windows)
        self.set_policy(self.config.policy)
        self._init_ledger()
        self.prefill = PrefillPacer(
            self.config,
            self.costs,
            self.ledger,
            self.requests.states,
            alone=self._agreement.alone,
            tenant_share=slo_classes().limits.tenant_share,
        )
        self.forecaster = Forecaster(self.prefill, self.ledger, slo_classes())
        self.shedder = Shedder(self.config.shed, self.forecaster, self.ledger, slo_classes())
        self.learner = self._make_learner()

    def _make_learner(self) -> Learner | None:
        """Started last, so that the trainer does not disturb the measurements."""
        if not self.config.learn or self._draft_worker is None:
            return None
        draft = self._draft_worker.models[0]
        if on_device(draft.runner.device) or not self._agreement.alone:
            raise ConfigError("drafts learn on a single CPU rank so far: leave out --learn")
        source = self._sources[0]
        assert isinstance(source, BeamSource)
        states = target = None
        if draft.kind != "model":
            assert self.device.target_states is not None
            table = self.req_to_token_pool.req_to_token
            states, target = partial(self.device.target_states.of_request, table), self._target_path
        stats = self.ledger.stats
        return Learner(self.config, draft.runner.model, source, draft.path, stats, states, target)

    def _measure(self, target: Any) -> None:
        """What forwards cost here: from an earlier run, a profile, or a short measurement."""
        room = measure.Room(
            self.device,
            self.req_to_token_pool.req_to_token,
            target.token_to_kv_pool.size,
            most_rows=int(target.max_running_requests),
            context_len=target.model_config.context_len,
        )
        drafting = (self.device.target,) if self.config.has_self else self._drafters
        run = partial(measure.measure, room, drafting)
        names = ("itself",) if self.config.has_self else draft_paths(self.config)
        if self.config.medusa is not None:
            names = (self.config.medusa,)
        meta = measure.fingerprint(self._target_path, names, self.config)
        self._profile = measure.save_full_profile(meta, run, saves=self._agreement.decides)
        self.latency = measure.start_model(self.config, meta, lambda: run(measure.QUICK))
        self.costs = LearnedCosts(self.latency)
        self._meta = meta
        self._take_runs()  # the measurements'

    @property
    def _drafters(self) -> Sequence[Drafter]:
        medusa = self.device.medusa
        return self.device.drafts if medusa is None else (*self.device.drafts, medusa)

    @property
    def policy_names(self) -> tuple[str, ...]:
        """What ``set_policy`` accepts."""
        return self._policies.names

    def set_policy(self, name: str) -> None:
        """Takes effect at the next iteration. A policy that is chosen again still knows what it learned.

        ``NAME@WINDOW`` is that policy with a draft window: auto, 0 (everything) or a number of tokens."""
        self.policy: Policy = self._policies.get(name)

    @property
    def _drafts(self) -> bool:
        """Whether the policy wants candidates at all."""
        return self.policy.name != "none"

    def _init_ledger(self) -> None:
        baseline_ms = self.config.baseline_ms
        measured_s = self.costs.baseline_s(BASELINE_CONTEXT)
        baseline_s = measured_s if baseline_ms is None else baseline_ms / 1e3
        # Tensor-parallel ranks see the same requests, and Prometheus adds up what processes count.
        speaks = self._agreement.decides
        metrics = ServerMetrics() if speaks and get_observability().enable_metrics else None
        path = self.config.record_requests if speaks else None
        log = None if path is None else RequestLog(Path(path))
        self.ledger = SLOLedger(baseline_s, SLOStats(slo_classes(), metrics), log)
        saves, follow = self._agreement.decides, baseline_ms is None
        self.host_costs = HostCosts(self.costs, self.ledger, self._meta, saves=saves, follow=follow)
        logger.info(
            "AdaServe: policy %s, baseline %.1f ms per token, budget %s tokens",
            self.policy.name,
            baseline_s * 1e3,
            self._policies.budget_tokens,
        )

    def report(self) -> dict[str, Any]:
        """State for ``/server_info`` and the live page; JSON values.

        ``latency`` is where learning started, ``latency_learned`` what is known by now of the quiet host.
        """
        self._settle()
        learned = self.costs.learned()
        return {
            "policy": self.policy.name,
            "profile": None if self._profile is None else str(self._profile),
            "baseline_ms": self.ledger.baseline_s * 1e3,
            "latency": self.latency.to_json(),
            "latency_learned": None if learned is None else learned.to_json(),
            "times": self.times.report(),
            "stats": self.ledger.stats.state(),
            "device": self.device.report(),
            "host": self.host_costs.report(),
        }

    # -- prefill ------------------------------------------------------------------------------

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Publish | None = None,
        pp_proxy_tensors: Any = None,
        grammar_barrier: Callable[[], None] | None = None,
    ) -> GenerationBatchResult:
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return self._prefill(batch, on_publish)
        return self._decode(batch, on_publish, grammar_barrier)

    def _prefill(self, batch: Any, on_publish: Publish | None) -> GenerationBatchResult:
        self._settle()
        start_s = time.perf_counter()
        restore_penalties(batch.sampling_info, batch.reqs)
        result = self.target_worker.forward_batch_generation(batch)
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(batch.seq_lens)
        for source in self._sources:
            source.prefilled(batch, self._drafts)
        result.next_draft_input = RootTokens(result.next_token_ids.long())
        self._start_requests(batch, result.next_token_ids.tolist())
        end_s = time.perf_counter()
        self.times.prefilled(end_s - start_s)
        self.ledger.prefilled(batch.reqs, end_s - start_s)
        self.prefill.observe_prefill(int(batch.extend_num_tokens), end_s - start_s)
        return result

    def _start_requests(self, batch: Any, first_tokens: list[int]) -> None:
        now_s = time.perf_counter()
        for req, row, token in zip(batch.reqs, _pool_rows(batch).tolist(), first_tokens, strict=True):
            state, lost = self.requests.start(req, row, token, self.ledger.slo(req), now_s)
            if lost is not None:
                self._forget(lost)
            if self.learner is not None:
                self.learner.tap.started(req, state)

    def number_requests(self, number: int) -> None:
        """The next request to be prefilled has this number, and the noise of the one that had it before.

        SGLang draws first tokens from torch's generator, so that one begins anew as well."""
        torch.manual_seed(self.requests.number(number) >> 1)

    # -- decode -------------------------------------------------------------------------------

    def _decode(
        self, batch: Any, on_publish: Publish | None, grammar_barrier: Callable[[], None] | None = None
    ) -> GenerationBatchResult:
        """One iteration (docs/architecture.md). Everything is queued; what is read has been waited for."""
        self._advance()  # what the last iteration accepted, if that comes late (overlap)
        if grammar_barrier is not None:
            grammar_barrier()  # the same for matchers, which SGLang advances
        if self.learner is not None:
            self.learner.look(self.requests.unfinished, time.perf_counter())
        start_s, start = time.perf_counter(), self.device.mark()
        rows, offers = self._offered(self._rows(batch))
        plan = self._agreement.plan(lambda: self.policy.plan(rows.running, start_s), rows.running)
        drafts = self._draft(plan, rows)
        drafted = self.device.mark()
        self._observe()  # the last iteration, while the device drafts
        proposal, allowed = merge([*(d.read() for d in drafts), *offers], len(rows)), None
        if rows.grammars is not None:
            proposal, allowed = rows.grammars.constrain(proposal)
        selection = self._agreement.selection(lambda: self.policy.select(plan, proposal.trees))
        selected = self.device.mark()
        verified = verify.build(rows, proposal, selection)
        tensors, draws, logits = self._verify(batch, rows, verified, allowed)
        acceptance = self.device.accept(tensors, draws, len(rows), verified.deepest, self.stride)
        if self.learner is not None and logits is not None:
            self.learner.tap.verified(rows, verified, acceptance, logits)
        result = self._result(batch, acceptance, tensors, draws, logits)
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        self._compact(verified, tensors, acceptance)
        caught_up = tuple(d.caught_up for d in drafts if d.caught_up is not None)
        first_level = drafts[0].first_level if len(drafts) == 1 else None
        marks = Marks(start, drafted, selected, self.device.mark(), caught_up, first_level)
        outcome = self.device.get(
            count=acceptance.count, emitted=acceptance.emitted, accepted=acceptance.accepted
        )
        self._arriving = self._unobserved = Iteration(
            rows, self.policy, plan, proposal, selection, verified, start_s, marks, self._take_runs(), outcome
        )
        if not self._overlaps:
            self._settle()
        return result

    def _rows(self, batch: Any) -> DecodeRows:
        pool_rows = _pool_rows(batch)
        states = self.requests.at(pool_rows.tolist())
        lens = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
        seq_lens = lens.cpu().numpy().astype(np.int64, copy=False)
        running = running_batch(batch.reqs, states, seq_lens, self.config.deepest)
        seeded = batch.sampling_info.sampling_seed is not None
        grammars = Grammars.of(batch.reqs, batch.sampling_info)
        return DecodeRows(states, seq_lens, pool_rows, running, noisy=not seeded, grammars=grammars)

    def _offered(self, rows: DecodeRows) -> tuple[DecodeRows, list[Proposal]]:
        """What sources propose without a forward, which the policy is told before it plans."""
        if not self._drafts:
            return rows, []
        offers = [offer for source in self._sources if (offer := source.offer(rows)) is not None]
        if not offers:
            return rows, []
        trees = merge(offers, len(rows)).trees
        return replace(rows, running=replace(rows.running, offered=trees)), offers

    def _draft(self, plan: IterationPlan, rows: DecodeRows) -> list[Drafting]:
        """What the sources have queued."""
        if self._recorder is not None:
            self._recorder.planned(plan)
        if not plan.depth:
            return []
        keep = self.policy.keep_drafting if self.device.stops_early else None
        proposed = [source.propose(plan, rows, keep) for source in self._sources]
        return [drafting for drafting in proposed if drafting is not None]

    def _verify(
        self, batch: Any, rows: DecodeRows, verified: verify.VerifyBatch, allowed: Allowed | None
    ) -> tuple[verify.Tensors, torch.Tensor, torch.Tensor | None]:
        """The verified tokens on the device, the target's draws int64 [T], and logits where there are any."""
        target, info = self.device.target, batch.sampling_info
        tensors = self.device.put({**verified.arrays(), **target.arrays(verified.batch)})
        wanted = batch.return_logprob or (self.learner is not None and self.learner.tap.is_open)
        if allowed is None and not wanted and sampling.is_plain_greedy(info, batch.reqs):
            return tensors, target.argmax(target.run(verified.batch, tensors)), None
        step = sampling.Step(
            self.device, batch.reqs, rows.states, info, verified, tensors, self._penalties, allowed
        )
        logits = target.logits(target.run(verified.batch, tensors))
        sampling.adjust_logits(logits, step)
        return tensors, sampling.draw(logits, step), logits

    def _result(
        self,
        batch: Any,
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
            new_seq_lens=batch.seq_lens + acceptance.length,
            next_draft_input=RootTokens(acceptance.bonus),
            speculative_num_draft_tokens=self.stride,
            speculative_output_stride=self.stride,
            can_run_cuda_graph=False,
        )

    def _compact(
        self, verified: verify.VerifyBatch, tensors: verify.Tensors, acceptance: verify.Acceptance
    ) -> None:
        """Makes the accepted paths contiguous in all KV caches."""
        if self.device.in_place(verified, acceptance):
            return
        table = self.req_to_token_pool.req_to_token
        n = len(verified.root)
        target, sources = verify.moves(tensors, acceptance, table, n, verified.deepest)
        pools = [self._kv_pools[0], *(self._kv_pools[1 + number] for number in verified.drafted)]
        for pool, source in zip(pools, sources, strict=True):
            self.device.move(pool, target, source)
        if self.device.target_states is not None:
            self.device.move(self.device.target_states, target, sources[0])

    # -- what follows -------------------------------------------------------------------------

    def _settle(self) -> None:
        """Takes in the outcome of the last iteration, if that is still to be done."""
        self._advance()
        self._observe()

    def _advance(self) -> None:
        """Brings requests and sources up to date with what the last iteration accepted."""
        iteration, self._arriving = self._arriving, None
        if iteration is None:
            return
        for state, tokens in zip(iteration.rows.states, iteration.emitted(), strict=True):
            state.advance(tokens)
        accepted = iteration.accepted()
        for source in self._sources:
            source.advanced(iteration.rows, iteration.verified, accepted)

    def _observe(self) -> None:
        """Tells policy, prefills and ledger what the last iteration did."""
        iteration, self._unobserved = self._unobserved, None
        if iteration is None:
            return
        outcome = iteration.outcome(self.times.last_end_s, self.times.has_prefilled)
        self.times.decoded(outcome, iteration.runs)
        iteration.policy.observe(outcome)
        self.prefill.observe(outcome)
        if self._recorder is not None:
            self._recorder.observed(outcome)
        sources = counts_by_source(outcome)
        self.ledger.iteration(outcome.plan.running.rids, sample_of(outcome, sources), sources)
        self.host_costs.observed(outcome.end_s, len(outcome.plan.running))
        leaving, self._leaving = self._leaving, []
        for rid in leaving:
            self._forget(rid)

    def _take_runs(self) -> list[list[Run]]:
        """Forwards since the last time, of the target and of each that drafts beside it."""
        return [model.take_runs() for model in (self.device.target, *self._drafters)]

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """Called before SGLang gives the request's slots to the radix cache."""
        if (row := self.requests.end(rid)) is not None:
            unheard = self._arriving is not None and bool((self._arriving.rows.pool_rows == row).any())
            for source in self._sources:
                source.finished(row, unheard)
        if self._unobserved is None:
            self._forget(rid)
        else:  # it is in an unobserved iteration, whose outcome would bring it back; waiting would cost time
            self._leaving.append(rid)

    def ended_early(self, rid: str, holds_row: bool) -> None:
        """A request that SGLang does not report (``patches/request_ends.py``). The slots of one that has lost
        its row are others' by now."""
        if rid not in self.requests:
            return
        if holds_row:
            self.note_request_finished(rid=rid, natural_stop=False)
        else:
            self.requests.end(rid)
            self._forget(rid)

    def _forget(self, rid: str) -> None:
        self._policies.forget(rid)
        if self.learner is not None:
            self.learner.tap.finished(rid)
        if self._recorder is not None:
            self._recorder.forget(rid)


def _pool_rows(batch: Any) -> np.ndarray:
    """int64 [n]: every request's row of the request pool, from the host's own copy."""
    rows = batch.req_pool_indices if batch.req_pool_indices_cpu is None else batch.req_pool_indices_cpu
    return rows.cpu().numpy().astype(np.int64, copy=False)


def open_device(target: Any, drafts: Sequence[Any], config: AdaServeConfig) -> Device:
    """The parts for the device that holds the models (``ModelRunner``s)."""
    if on_device(target.device):
        from adaserve.engine.device.parts import GraphDevice

        return GraphDevice.of(target, drafts, config)
    from adaserve.engine.host.parts import HostDevice

    return HostDevice.of(target, drafts, config)
