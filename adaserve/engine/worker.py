"""The speculative worker: plan, draft, select, verify, commit, observe (docs/design.md)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import get_observability
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from adaserve.config import AdaServeConfig, slo_classes
from adaserve.engine import measure as calibration
from adaserve.engine import sampling
from adaserve.engine.forwards import TimedForward, tree_forward
from adaserve.engine.host.pricing import native_pricing
from adaserve.engine.iteration import Iteration, StepTimes, sample_of
from adaserve.engine.prefill import PrefillPacer
from adaserve.engine.roots import RootTokens
from adaserve.engine.sources.beam import Drafter
from adaserve.engine.sources.draft_model import DraftModel
from adaserve.engine.state import DecodeRows, RequestState, running_batch
from adaserve.engine.trees import verify
from adaserve.identity import ensure_registered
from adaserve.noise import request_key
from adaserve.pair.acceptance import load_sharpening
from adaserve.scheduler.interface import CandidateTrees, IterationOutcome, Policy
from adaserve.scheduler.policies import PolicyConfig, build_policy, policy_names
from adaserve.scheduler.pricing import Pricing
from adaserve.scheduler.replay import Recorder
from adaserve.slo.ledger import SLOLedger
from adaserve.slo.prometheus import ServerMetrics
from adaserve.slo.stats import SLOStats

logger = logging.getLogger(__name__)

Publish = Callable[[torch.Tensor], None]
"""SGLang's relay of new sequence lengths to its overlapped scheduler."""

KNEE = 1.5
"""Without a given budget B is what can be verified in this many times the time of one token."""

LEAST_GAIN = 0.05
"""`priced` drafts on a CPU only for that much more: trees are host work that no latency model has."""

BASELINE_CONTEXT = 256
"""Cached tokens of the lone request whose plain decoding defines the baseline latency."""


class AdaServeWorker(BaseSpecWorker):
    """Serves each request at its TPOT SLO. Constructed by SGLang's scheduler, one per rank."""

    _pricing: Pricing | None = None  # the host's own way to price nodes
    _least_gain = 0.0

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        super().__init__()
        ensure_registered()
        self.config = AdaServeConfig.load()
        self._target_worker = target_worker
        self._draft_worker = DraftModel(server_args, gpu_id, nccl_port, target_worker)
        self.stride = self.config.max_depth + 1
        self._times = dict.fromkeys(("decode_s", "iterations", "prefill_s", "prefills"), 0.0)
        self._times |= {"loop_s": 0.0, "loops": 0.0}  # decode iterations in a row, from end to end
        self._prefilled = True  # since the last decode iteration
        self._states: dict[int, RequestState] = {}  # by request-pool slot
        self._policies: dict[str, Policy] = {}  # built so far, by name
        # Outlives a retraction, which gives the slot away, and dies with the request.
        self._decode_starts: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
        self._last_end_s = 0.0
        self._seed, self._started = server_args.random_seed, 0  # of the noise that sampled requests draw by
        if server_args.device == "cpu":
            self._pricing, self._least_gain = native_pricing(), LEAST_GAIN
        self._models = (server_args.model_path, server_args.speculative_draft_model_path)

    def init_cuda_graphs(self) -> None:
        """Last step of SGLang's start: pools and backends are there, so the host can be measured."""
        super().init_cuda_graphs()
        self._target = TimedForward(tree_forward(self.target_worker))
        self._draft = draft = TimedForward(tree_forward(self._draft_worker.draft_worker))
        sharpening = load_sharpening(Path(self._models[1]))
        self._drafter = Drafter(draft, sharpening.reading, self.config.max_candidates)
        runner = self.target_worker.model_runner
        measure = partial(
            calibration.measure,
            self._target,
            draft,
            runner.token_to_kv_pool.size,
            context_len=runner.model_config.context_len,
        )
        meta = calibration.fingerprint(*self._models, self.config)
        self._profile = calibration.save_full_profile(meta, lambda grid, tick: measure(grid, progress=tick))
        self.latency = calibration.load_or_measure(self.config, meta, lambda: measure(calibration.QUICK))
        self._recorder = Recorder(Path(self.config.record)) if self.config.record else None
        self.set_policy(self.config.policy)
        self._init_ledger()
        self.prefill = PrefillPacer(self.config, self.latency, self.ledger, self._states)

    @property
    def policy_names(self) -> tuple[str, ...]:
        """What ``set_policy`` accepts."""
        named = tuple(n for n in policy_names() if n != "chain-K")
        return named + tuple(f"chain-{k}" for k in range(1, self.config.max_depth + 1))

    def build_policy(self, name: str) -> Policy:
        """A fresh policy for this host. Raises ValueError for an unknown name."""
        config = PolicyConfig(
            latency=self.latency,
            budget=self._budget(name),
            d_max=self.config.max_depth,
            w_max=self.config.max_width,
            early_stop=True,
            pricing=self._pricing,
            least_gain=self._least_gain,
        )
        return build_policy(name, config)

    def _budget(self, name: str) -> int | None:
        """B. Fixed shapes know none; TurboSpec and `priced` weigh each token against the latency."""
        unbounded = name.startswith(("chain-", "fixed-")) or name in ("turbospec", "priced", "none")
        if self.config.budget is not None or unbounded:
            return self.config.budget
        return self.latency.knee_tokens(KNEE)

    def set_policy(self, name: str) -> None:
        """Takes effect at the next iteration. A policy that comes back knows what it had learned."""
        if name not in self._policies:
            self._policies[name] = self.build_policy(name)
        self.policy = self._policies[name]
        self._drafts = name != "none"

    def _init_ledger(self) -> None:
        baseline_ms = self.config.baseline_ms
        measured_s = self.latency.verify_s(1.0, BASELINE_CONTEXT) + self.latency.overhead_s
        baseline_s = measured_s if baseline_ms is None else baseline_ms / 1e3
        metrics = ServerMetrics() if get_observability().enable_metrics else None
        self.ledger = SLOLedger(baseline_s, SLOStats(slo_classes(), metrics))
        logger.info(
            "AdaServe: policy %s, baseline %.1f ms per token, budget %s tokens",
            self.policy.name,
            baseline_s * 1e3,
            self.config.budget or self.latency.knee_tokens(KNEE),
        )

    def report(self) -> dict[str, Any]:
        """State for ``/server_info`` and the live page; JSON values."""
        return {
            "policy": self.policy.name,
            "profile": None if self._profile is None else str(self._profile),
            "baseline_ms": self.ledger.baseline_s * 1e3,
            "latency": self.latency.to_json(),
            "times": {**self._times, "target_s": self._target.busy_s, "draft_s": self._draft.busy_s},
            "stats": self.ledger.stats.state(),
        }

    # -- prefill ------------------------------------------------------------------------------

    def forward_batch_generation(
        self, batch: Any, on_publish: Publish | None = None, pp_proxy_tensors: Any = None
    ) -> GenerationBatchResult:
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return self._prefill(batch, on_publish)
        return self._decode(batch, on_publish)

    def _prefill(self, batch: Any, on_publish: Publish | None) -> GenerationBatchResult:
        start_s = time.perf_counter()
        sampling.restore_penalties(batch.sampling_info, batch.reqs)
        result = self.target_worker.forward_batch_generation(batch)
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(batch.seq_lens)
        if self._drafts:
            self._draft_worker.extend(batch)
        result.next_draft_input = RootTokens(result.next_token_ids.long())
        self._start_requests(batch, result.next_token_ids.tolist())
        end_s = time.perf_counter()
        self._times["prefill_s"] += end_s - start_s
        self._times["prefills"] += 1
        self._prefilled = True
        self.ledger.prefilled(batch.reqs, end_s - start_s)
        self.policy.observe_prefill(int(batch.extend_num_tokens), end_s - start_s, end_s)
        self.prefill.observe_prefill(int(batch.extend_num_tokens), end_s - start_s)
        return result

    def _start_requests(self, batch: Any, first_tokens: list[int]) -> None:
        now_s = time.perf_counter()
        slots = batch.req_pool_indices.tolist()
        lengths = batch.seq_lens.tolist()
        for req, slot, length, token in zip(batch.reqs, slots, lengths, first_tokens, strict=True):
            old = self._states.get(slot)
            slo = self.ledger.slo(req)
            self._started += 1
            key = request_key(self._seed, self._started, req.rid)
            state = RequestState(req.rid, slo.slo_class, slo.tpot_s, now_s, key=key)
            if old is not None and old.rid != req.rid:
                # Its request ended, perhaps aborted in the queue, of which nobody tells us.
                self._forget(old.rid)
            state.generated = [*req.output_ids, token]
            if req.output_ids:
                # Retracted and prefilled again: its clock goes on.
                state.decode_start_s = self._decode_starts.get(req, now_s)
                state.decoded = len(state.generated) - 1
            else:
                self._decode_starts[req] = now_s
            if self._drafts:
                state.draft_len = length
            else:  # a policy that drafts may take over later
                state.pending = [*req.origin_input_ids, *req.output_ids][:length]
            self._states[slot] = state

    # -- decode -------------------------------------------------------------------------------

    def _decode(self, batch: Any, on_publish: Publish | None) -> GenerationBatchResult:
        start_s = time.perf_counter()
        rows = self._rows(batch)
        plan = self.policy.plan(rows.running, start_s)
        if self._recorder is not None:
            self._recorder.planned(plan)
        draft = self._drafter.draft(plan, rows, self.policy.keep_drafting) if plan.depth else None
        drafted_s = time.perf_counter()
        trees = draft.trees if draft is not None else CandidateTrees.empty(len(rows))
        selection = self.policy.select(plan, trees)
        times = StepTimes(start_s, drafted_s, time.perf_counter())
        verified = verify.build(rows, draft, selection)
        draws, logits = self._target_draws(batch, rows, verified)
        acceptance = verify.accept(verified, draws)
        iteration = Iteration(rows, plan, draft, selection, verified, draws, acceptance, times)
        result = self._commit(batch, iteration, logits)
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        self._observe(iteration.outcome(time.perf_counter(), self._last_end_s))
        return result

    def _rows(self, batch: Any) -> DecodeRows:
        slots = batch.req_pool_indices.tolist()
        states = [self._states[slot] for slot in slots]
        seq_lens = batch.seq_lens.numpy().astype(np.int64, copy=False)
        return DecodeRows(
            states=states,
            seq_lens=seq_lens,
            roots=batch.spec_info.bonus_tokens.numpy().astype(np.int64, copy=False),
            pool_indices=batch.req_pool_indices,
            req_to_token=self.req_to_token_pool.req_to_token,
            running=running_batch(batch.reqs, states, seq_lens, self.config.max_depth),
        )

    def _target_draws(
        self, batch: Any, rows: DecodeRows, verified: verify.VerifyBatch
    ) -> tuple[np.ndarray, torch.Tensor | None]:
        tokens, positions = torch.from_numpy(verified.tokens), torch.from_numpy(verified.positions)
        hidden = self._target.hidden(tokens, positions, verified.slots, verified.plan)
        info = batch.sampling_info
        # SGLang fills these in when it makes a ForwardBatch, which we do not.
        info.grammars = [r.grammar for r in batch.reqs] if batch.has_grammar else None
        if not batch.return_logprob and sampling.is_plain_greedy(info, batch.reqs):
            return self._target.argmax(hidden).numpy(), None
        logits = self._target.logits(hidden)
        sampling.adjust_logits(logits, verified, info, batch.reqs, rows.states)
        return sampling.draw(logits, verified, info, rows.keys), logits

    def _commit(self, batch: Any, iteration: Iteration, logits: torch.Tensor | None) -> GenerationBatchResult:
        """Keeps the accepted paths: compacts both KV caches, advances the states, builds the result."""
        if (moves := iteration.moves()) is not None:
            for runner in (self.target_worker.model_runner, self._draft_worker.draft_runner):
                runner.token_to_kv_pool.move_kv_cache(*moves)
        emitted = iteration.emitted(self.stride)
        iteration.advance(emitted)
        accept_lens = torch.from_numpy(iteration.acceptance.count + 1)
        logits_output = LogitsProcessorOutput(next_token_logits=logits)
        if batch.return_logprob:
            index = torch.from_numpy(iteration.path_index(self.stride))
            compute_spec_logprobs(batch, logits_output, torch.from_numpy(iteration.draws), accept_index=index)
        return GenerationBatchResult(
            logits_output=logits_output,
            next_token_ids=torch.from_numpy(emitted.reshape(-1)),
            accept_lens=accept_lens.int(),
            new_seq_lens=batch.seq_lens + accept_lens,
            next_draft_input=RootTokens(torch.from_numpy(iteration.bonus)),
            speculative_num_draft_tokens=self.stride,
            speculative_output_stride=self.stride,
            can_run_cuda_graph=False,
        )

    # -- bookkeeping --------------------------------------------------------------------------

    def _observe(self, outcome: IterationOutcome) -> None:
        self._last_end_s = outcome.end_s
        self._times["decode_s"] += outcome.total_s
        self._times["iterations"] += 1
        if not self._prefilled:
            self._times["loop_s"] += outcome.since_last_s
            self._times["loops"] += 1
        self._prefilled = False
        self.policy.observe(outcome)
        self.prefill.observe(outcome)
        if self._recorder is not None:
            self._recorder.observed(outcome)
        self.ledger.iteration(outcome.plan.running.rids, sample_of(outcome))

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        self._forget(rid)

    def _forget(self, rid: str) -> None:
        self.policy.forget(rid)
        if self._recorder is not None:
            self._recorder.forget(rid)
