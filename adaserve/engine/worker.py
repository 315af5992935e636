"""The worker that SGLang calls, and how a server's parts are put together at startup
(docs/architecture.md)."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import get_observability, get_parallel, get_schedule, get_serving
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from adaserve.checkpoints.fingerprint import local_folder
from adaserve.config import AdaServeConfig, slo_classes
from adaserve.engine.admission.encoders import tokens_to_encode
from adaserve.engine.admission.forecaster import Forecaster
from adaserve.engine.admission.prefill import PrefillPacer
from adaserve.engine.admission.shedding import Shedder
from adaserve.engine.costs import cost_cache, measure
from adaserve.engine.costs.baseline import Baseline
from adaserve.engine.costs.cost_monitor import CostMonitor
from adaserve.engine.decisions import Decisions
from adaserve.engine.decode import DecodeLoop, Publish
from adaserve.engine.device import Device
from adaserve.engine.iteration import counts_by_source, sample_of
from adaserve.engine.kv_compaction import KVCompactor
from adaserve.engine.learning.learner import Learner
from adaserve.engine.learning.swap import Swap
from adaserve.engine.learning.tap import Tap
from adaserve.engine.model_support import require_own_positions, require_supported_model, require_windows
from adaserve.engine.penalties import restore_penalties
from adaserve.engine.policies import ServedPolicies
from adaserve.engine.rank_sync import RankSync
from adaserve.engine.requests import Requests, rows_of_pool
from adaserve.engine.roots import RootTokens
from adaserve.engine.sources.beam import BeamSource
from adaserve.engine.sources.build_sources import sources_of
from adaserve.engine.sources.draft_model import DraftModels
from adaserve.engine.sources.source import TreeSource
from adaserve.engine.trees.batch import TreeBatch
from adaserve.host.device import on_device
from adaserve.patches.start.kv_sizing import draft_paths
from adaserve.scheduler.costs.latency import LatencyModel
from adaserve.scheduler.costs.learned import LearnedCosts
from adaserve.scheduler.interface import IterationOutcome
from adaserve.scheduler.iteration_recording import Recorder
from adaserve.sglang_compat import ensure_registered
from adaserve.slo.ledger import SLOLedger
from adaserve.slo.prometheus import ServerMetrics
from adaserve.slo.request_log import RequestLog
from adaserve.slo.stats import SLOStats

logger = logging.getLogger(__name__)


class AdaServeWorker(BaseSpecWorker):
    """Serves each request at its TPOT SLO. Constructed by SGLang's scheduler, one per rank, with its models.

    After that SGLang makes the pools, and at the end of its startup ``init_cuda_graphs`` makes all other
    parts.
    """

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        super().__init__()
        ensure_registered()
        self.config = AdaServeConfig.load()
        target = target_worker.model_runner
        require_supported_model(target.model_config)
        require_own_positions(target.model, target.model_config.context_len, self.config.deepest)
        require_windows(target.model, self.config.deepest, leaves_out=self.config.has_self)
        self._target_worker = target_worker
        paths = draft_paths(self.config)
        self._draft_worker = (
            DraftModels(paths, server_args, gpu_id, nccl_port, target_worker) if paths else None
        )
        self._server_args = server_args
        self._read: Any = None  # the batch whose prompts were read in the last verification
        # The arguments have none where none was given; SGLang has then drawn one.
        self._requests = Requests((target_worker.random_seed, get_parallel().dp_rank or 0))

    # -- the start ----------------------------------------------------------------------------

    def init_cuda_graphs(self) -> None:
        """Last step of SGLang's startup: pools and backends exist, so the host can be measured."""
        super().init_cuda_graphs()
        config, classes, target = self.config, slo_classes(), self.target_worker.model_runner
        rank_sync = RankSync(get_tp_group())
        decides = rank_sync.decides
        models = () if self._draft_worker is None else self._draft_worker.models
        drafts = [model.runner for model in models]
        pools = tuple(runner.token_to_kv_pool for runner in (target, *drafts))
        table, tokenizer = self.req_to_token_pool.req_to_token, self.target_worker.tokenizer
        device = open_device(target, drafts, config)
        sources = tuple(sources_of(config, device, models, table, tokenizer))
        meta, self._profile, self._latency = self._measure(device, saves=decides)
        self._costs = LearnedCosts(self._latency)
        windows = config.has_self or (bool(models) and all(m.kind == "model" for m in models))
        self.policies = ServedPolicies(config, self._costs, device, windows)
        self.ledger = self._make_ledger(speaks=decides)
        self._baseline = Baseline(self._costs, self.ledger, fixed=config.baseline_ms is not None)
        self._cost_monitor = CostMonitor(self._costs, self._baseline, meta, saves=decides)
        self.prefill = PrefillPacer(
            config,
            self._costs,
            self.ledger,
            self._requests.states,
            rank_sync,
            tenant_share=classes.limits.tenant_share,
            most_beside=device.target.most_beside,
        )
        self.forecaster = Forecaster(self.prefill, self.ledger, classes)
        self.shedder = Shedder(config.shed, self.forecaster, self.ledger, classes)
        hidden = device.target_states
        tap = Tap(config.learn_share, None if hidden is None else partial(hidden.of_requests, table))
        self.learner = self._make_learner(sources, tap)
        # Ranks and data-parallel replicas have one file, and one of them may write to it.
        records = config.record if decides and not get_parallel().dp_rank else None
        self.loop = DecodeLoop(
            device=device,
            sources=sources,
            compactor=KVCompactor(device, pools, table),
            requests=self._requests,
            decisions=Decisions(self.policies, rank_sync, Recorder(Path(records)) if records else None),
            tap=tap,
            learner=self.learner,
            lengths=self.ledger.lengths,
            observed=self._observed,
            deepest=config.deepest,
            overlaps=not get_schedule().disable_overlap_schedule,
        )
        logger.info(
            "AdaServe: policy %s, baseline %.1f ms per token, budget %s tokens",
            self.policies.current.name,
            self.ledger.baseline_s * 1e3,
            self.policies.budget_tokens,
        )
        # What is there by now stays. A collection that goes through all of it takes tens of milliseconds.
        gc.collect()
        gc.freeze()

    def _measure(self, device: Device, saves: bool) -> tuple[dict[str, str], Path | None, LatencyModel]:
        """Returns what identifies this host and its models, the profile that was written if `adaserve
        profile` asked for one, and the cost of forwards: from an earlier run, a profile, or a short
        measurement."""
        runner = self.target_worker.model_runner
        room = measure.Room(
            device,
            self.req_to_token_pool.req_to_token,
            runner.token_to_kv_pool.size,
            most_rows=int(runner.max_running_requests),
            context_len=runner.model_config.context_len,
        )
        run = partial(measure.measure, room, device.drafters)
        names = ("itself",) if self.config.has_self else draft_paths(self.config)
        if self.config.medusa is not None:
            names = (self.config.medusa,)
        meta = cost_cache.cache_key(names, self.config, self._server_args)
        profile = cost_cache.save_full_profile(meta, run, saves=saves)
        return meta, profile, cost_cache.start_model(self.config, meta, lambda: run(measure.QUICK))

    def _make_ledger(self, speaks: bool) -> SLOLedger:
        """``speaks``: whether this rank counts requests. Tensor-parallel ranks see the same requests, and
        Prometheus adds up the counts of all processes."""
        baseline_ms = self.config.baseline_ms
        baseline_s = self._costs.baseline_s() if baseline_ms is None else baseline_ms / 1e3
        told = speaks and get_observability().enable_metrics
        metrics = ServerMetrics(get_serving().served_model_name) if told else None
        path = self.config.record_requests if speaks else None
        log = None if path is None else RequestLog(Path(path))
        return SLOLedger(baseline_s, SLOStats(slo_classes(), metrics), log)

    def _make_learner(self, sources: Sequence[TreeSource], tap: Tap) -> Learner | None:
        """Started last, so that the trainer does not disturb the measurements."""
        if not self.config.learn or self._draft_worker is None:
            return None
        draft, source = self._draft_worker.models[0], sources[0]
        assert isinstance(source, BeamSource)
        target: str | None = None
        if draft.kind != "model":
            target = local_folder(self._server_args.model_path, self._server_args.revision)
        weights, stats = swap_of(draft.runner.model), self.ledger.stats
        vocabulary = int(self.target_worker.model_runner.model_config.vocab_size)
        return Learner(self.config, tap, weights, source, draft.folder, stats, vocabulary, target)

    @property
    def spec_v2_attn_backends(self) -> tuple[Any, ...]:
        """Backends for which SGLang reads sequence lengths on the host, before every iteration, and so waits
        for the device. We count lengths ourselves, so there are none unless SGLang's log of forward passes
        needs them."""
        return (self,) if get_observability().enable_forward_pass_metrics else ()

    # -- while it serves ----------------------------------------------------------------------

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Publish | None = None,
        pp_proxy_tensors: Any = None,
        grammar_barrier: Callable[[], None] | None = None,
    ) -> GenerationBatchResult:
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return self._prefill(batch, on_publish)
        return self.loop.decode(batch, on_publish, grammar_barrier)

    def read_beside(self, batch: Any) -> None:
        """The next decode iteration reads the prompts of SGLang's ``batch`` in its forward. After it, SGLang
        has this batch prefilled as usual."""
        if (shift := self.loop.device.shift) is not None:
            shift.start(batch)
        starts, q_lens = np.array([batch.prefix_lens, batch.extend_lens], np.int64)
        tokens = batch.prefill_input_ids_cpu.numpy().astype(np.int64)
        self.loop.read_beside(TreeBatch.causal(tokens, rows_of_pool(batch), starts, q_lens))
        self._read = batch

    def _prefill(self, batch: Any, on_publish: Publish | None) -> GenerationBatchResult:
        start_s, target = time.perf_counter(), self.loop.device.target
        was_read, self._read = self._read is batch, None
        restore_penalties(batch.sampling_info, batch.reqs)
        if not was_read:
            target.forget_read()
            if (shift := self.loop.device.shift) is not None:
                shift.start(batch)
        ends = batch.seq_lens_cpu.tolist()
        encoded = tokens_to_encode(zip(batch.reqs, batch.prefix_lens, ends, strict=True))
        result = self.target_worker.forward_batch_generation(batch)
        target.forget_read()
        self.loop.settle()  # the last iteration was still running when this forward was queued
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(batch.seq_lens)
        for source in self.loop.sources:
            source.prefilled(batch, self.policies.speculates)
        result.next_draft_input = RootTokens(result.next_token_ids.long())
        self._start_requests(batch, result.next_token_ids.tolist())
        tokens, seconds = int(batch.extend_num_tokens), time.perf_counter() - max(start_s, self.loop.free_s())
        self.loop.times.prefilled(seconds)
        if was_read:
            seconds = self.prefill.observe_beside(tokens, seconds)
        else:
            self.loop.decisions.prefilled(tokens, seconds)
            self.prefill.observe_prefill(tokens, seconds, encoded)
        self.ledger.prefilled(batch.reqs, seconds)
        return result

    def _start_requests(self, batch: Any, first_tokens: list[int]) -> None:
        now_s = time.perf_counter()
        for req, row, token in zip(batch.reqs, rows_of_pool(batch).tolist(), first_tokens, strict=True):
            state, lost = self._requests.start(req, row, token, self.ledger.slo(req), now_s)
            if lost is not None:
                self.loop.finished(lost, holds_row=False)
            if req is batch.chunked_req:  # more of its prompt comes, and this token means nothing
                self.loop.tap.finished(req.rid)
            else:
                self.loop.tap.started(req, state)

    def _observed(self, outcome: IterationOutcome) -> None:
        """Tells prefills, ledger and costs what an iteration did."""
        running, sources = outcome.plan.running, counts_by_source(outcome)
        self.prefill.observe(outcome)
        self.ledger.iteration(running.rids, sample_of(outcome, sources), sources)
        self._cost_monitor.observed(outcome.end_s, len(running))

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """Called before SGLang gives the request's slots to the radix cache."""
        self.loop.finished(rid)

    def ended_early(self, rid: str, holds_row: bool) -> None:
        """A request that SGLang does not report (``patches/scheduler/request_ends.py``)."""
        if rid in self._requests:
            self.loop.finished(rid, holds_row)

    def fix_baseline(self, baseline_s: float) -> None:
        """As the setting ``baseline_ms`` does, from now on."""
        self._baseline.fix(baseline_s)

    def number_requests(self, number: int) -> None:
        """Gives the next request to be prefilled this number, and so the noise of the request that had it
        before.

        SGLang draws first tokens from torch's generator, so that is seeded anew as well."""
        torch.manual_seed(self._requests.number(number) >> 1)

    def report(self) -> dict[str, Any]:
        """State for ``/server_info`` and the live page; JSON values.

        ``latency`` is where learning started, ``latency_learned`` what is known by now about the quiet host.
        """
        self.loop.settle()
        learned = self._costs.learned()
        return {
            "policy": self.policies.current.name,
            "profile": None if self._profile is None else str(self._profile),
            "baseline_ms": self.ledger.baseline_s * 1e3,
            "latency": self._latency.to_json(),
            "latency_learned": None if learned is None else learned.to_json(),
            "times": self.loop.times.report(),
            "stats": self.ledger.stats.state(),
            "device": self.loop.device.report(),
            "host": self._cost_monitor.report(time.perf_counter()),
        }


def open_device(target: Any, drafts: Sequence[Any], config: AdaServeConfig) -> Device:
    """The parts for the device that holds the models (``ModelRunner``s)."""
    if on_device(target.device):
        from adaserve.engine.gpu.device import GpuDevice

        return GpuDevice.of(target, drafts, config)
    from adaserve.engine.cpu.device import CpuDevice

    return CpuDevice.of(target, drafts, config)


def swap_of(model: Any) -> Swap:
    """What exchanges the weights of a model that is served."""
    if next(model.parameters()).is_cuda:
        from adaserve.engine.gpu.swap import GpuSwap

        return GpuSwap(model)
    from adaserve.engine.cpu.swap import CpuSwap

    return CpuSwap(model)
