"""One engine replica: its queue, its prefills, its memory and its clock. Subclasses say how it decodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np

from adaserve.scheduler.admission.interference import Interference, RecentWork
from adaserve.scheduler.admission.prefill import plan_prefill
from adaserve.scheduler.admission.situation import PrefillConfig, Situation
from adaserve.scheduler.costs.latency import LatencyModel, StepCost
from adaserve.scheduler.costs.prefills import LearnedPrefills, each_token_s
from adaserve.scheduler.interface import Context, IntArray
from adaserve.scheduler.simulator.rows import Rows
from adaserve.scheduler.simulator.waiting import WaitingPrompts, waiting_batch
from adaserve.scheduler.simulator.workload import SimRequest
from adaserve.slo.lengths import OutputLengths

Chunk = list[tuple[SimRequest, int]]
"""Requests whose prompts are read, and how many tokens of each."""


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """The engine around the policy."""

    latency: LatencyModel  # the truth; the policy has its own model
    kv_tokens: int = 400_000
    max_running: int = 512
    mixed: bool = True  # prompts share forwards with verification; else they have forwards of their own
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    shed: bool = False  # answer 429 to prompts that have not started when their TTFT SLO has passed
    prefill_cost: StepCost | None = None  # of forwards of prompts alone, both models; None = by ``latency``
    noise: float = 0.03  # standard deviation of log seconds
    row_overhead_s: float = 0.0  # per iteration and running request, whose tokens are streamed
    lag: bool = False  # overlap schedule: an outcome is observed after the next plan
    busy: tuple[tuple[float, float, float], ...] = ()
    """When others use the host: from, until (simulated seconds), how many times as long everything takes. The
    admission gate goes by the times of a quiet host nevertheless, unlike a server's."""


class Replica(ABC):
    """Steps one iteration at a time; ``now_s`` is the end of the last one."""

    def __init__(self, config: ReplicaConfig, rng: np.random.Generator, drafts: bool) -> None:
        """``drafts``: whether prompts are read by a draft model as well."""
        self.config = config
        self.now_s = 0.0
        self.waiting = WaitingPrompts(config.prefill)
        self._lengths = OutputLengths()
        self.rows = Rows(self._lengths)
        self.done: list[SimRequest] = []
        self._rng, self._drafts = rng, drafts
        self._reserved = 0  # KV tokens promised to started and running requests
        self._output_left, self._prompt_left = 0, 0  # tokens of all requests here, outputs by their caps
        self._last_end_s = 0.0
        self._recent = RecentWork()
        one_s, far_s = (self._both_s(tokens) for tokens in (1.0, LearnedPrefills.FAR))
        self._prefills = LearnedPrefills(one_s, far_s)
        self._beside = LearnedPrefills.beside(one_s, far_s)
        self._drafted_chunk = 0  # tokens of the present chunk that the draft model reads, too

    @abstractmethod
    def _decode(self, prefill_tokens: int) -> None:
        """One decode iteration, with a chunk of ``prefill_tokens`` in its forward; ends with ``_decoded``."""

    def _drafts_for_next(self) -> bool:
        """Whether the draft model reads the prompt that starts now. Otherwise nothing is drafted for it."""
        return True

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return len(self.waiting) > 0 or len(self.rows) > 0

    @property
    def load_tokens(self) -> float:
        """Work left, in output tokens (prompt tokens count a tenth): what least-work routing compares."""
        return self._output_left + 0.1 * self._prompt_left

    @property
    def seconds_per_token(self) -> float:
        """Recent seconds per output token of a running request; 0 while nothing ran."""
        return self._recent.cycle_s.value / self._recent.pace

    def submit(self, request: SimRequest) -> None:
        """Queues a request that has just arrived. One that can never fit the cache is shed."""
        self.now_s = max(self.now_s, request.arrival_s) if not self.busy else self.now_s
        if request.prompt_tokens + request.cap_tokens > self.config.kv_tokens:
            request.shed = True
            self.done.append(request)
            return
        self.waiting.add(request)
        self._output_left += request.cap_tokens
        self._prompt_left += request.prompt_tokens

    def step(self) -> None:
        """One iteration: a prefill chunk shares a forward with the decode (mixed), or goes before it."""
        chunk = self._take_chunk()
        tokens = sum(t for _, t in chunk)
        self._drafted_chunk = sum(t for r, t in chunk if r.drafts) if self._drafts else 0
        if tokens and not (self.config.mixed and len(self.rows)):
            self._prefill(tokens)
        elif len(self.rows):
            self._decode(tokens)
        else:
            self.now_s += 1e-3  # everyone waits behind a closed gate or a full cache
        self._finish_prefill(chunk)

    # -- prefills -----------------------------------------------------------------------------

    def _prefill(self, tokens: int) -> None:
        """A forward of its own."""
        cost = self.config.prefill_cost
        if cost is None:
            alone_s = self.config.latency.verify_s(tokens) + self._draft_prefill_s()
        else:
            alone_s = float(cost.alone(np.array([float(tokens)]))[0])
        seconds = self._noisy(alone_s)
        self.now_s += seconds
        self._recent.prefilled(seconds)
        self._prefills.observe(tokens, seconds)

    def _take_chunk(self) -> Chunk:
        if not len(self.waiting):
            return []
        looked = self.waiting.looked_at(self.now_s)
        if self.config.shed:
            looked = self._shed_late(looked)
        plan = plan_prefill(self._situation(looked), len(self.rows))
        if plan.lost:
            self._recent.lost_at_s = self.now_s
        left = plan.tokens
        chunk: Chunk = []
        full = False
        for request in (looked[i] for i in plan.order.tolist()):
            if left <= 0:
                break
            if request.prefilled == 0:
                full = full or not self._fits(request)
                if full:
                    continue  # in order: a small request must not starve a large one
                self._reserved += request.prompt_tokens + request.cap_tokens
                request.drafts = self._drafts_for_next()
                self.waiting.start(request)
            take = min(left, request.prompt_tokens - request.prefilled)
            request.prefilled += take
            left -= take
            self._prompt_left -= take
            chunk.append((request, take))
        return chunk

    def _fits(self, request: SimRequest) -> bool:
        """Whether there are KV tokens and a slot for a prompt that has not started."""
        size = request.prompt_tokens + request.cap_tokens
        running = len(self.rows) + self.waiting.started
        return self._reserved + size <= self.config.kv_tokens and running < self.config.max_running

    def _shed_late(self, looked: list[SimRequest]) -> list[SimRequest]:
        """Refuses those of the prompts that have not started and whose TTFT SLO has passed; returns the
        others."""
        staying = []
        for request in looked:
            if request.prefilled or self.now_s - request.arrival_s <= request.ttft_slo_s:
                staying.append(request)
                continue
            request.shed = True
            self.waiting.leave(request)
            self._output_left -= request.cap_tokens
            self._prompt_left -= request.prompt_tokens
            self.done.append(request)
        return staying

    def _situation(self, looked: list[SimRequest]) -> Situation:
        waiting, interference = waiting_batch(looked), self._interference(len(looked))
        return Situation(self.config.prefill, waiting, self.now_s, interference)

    def _interference(self, joining: int) -> Interference:
        """What chunks would cost the running requests, as learned: in forwards of their own, or what they add
        to a verification."""
        running = self.rows.batch(None, 0)
        prefills = self._beside if self.config.mixed and len(self.rows) else self._prefills
        chunks = prefills.chunks(self.config.prefill.chunk_tokens)
        return self._recent.interference(self.config.latency, running, joining, chunks, self.now_s)

    def _finish_prefill(self, chunk: Chunk) -> None:
        ready = [r for r, _ in chunk if r.prefilled >= r.prompt_tokens]
        if not ready:
            return
        self._output_left -= len(ready)
        for request in ready:
            self.waiting.leave(request)
            request.first_token_s = self.now_s
            if request.output_tokens <= 1:
                self._end(request)
        self.rows.join([r for r in ready if not r.finished])

    def _both_s(self, tokens: float) -> float:
        """Seconds that a server expects of a prefill of so many tokens before it has seen one."""
        latency = self.config.latency
        return latency.verify_s(tokens) + (latency.draft_step_s(tokens) if self._drafts else 0.0)

    def _draft_prefill_s(self) -> float:
        """What the draft model takes for its part of the chunk. ``prefill_cost`` is of both models."""
        tokens = self._drafted_chunk
        return self.config.latency.draft_step_s(tokens) if tokens and not self.config.prefill_cost else 0.0

    def _verify_s(self, verified: float, prefill_tokens: int, context: Context) -> float:
        """Of a verification of so many tokens, with a chunk in its forward. If it is known what prompts cost
        alone, each of their tokens adds as much as there."""
        latency, cost = self.config.latency, self.config.prefill_cost
        if cost is None:
            return latency.verify_s(verified + prefill_tokens, context)
        token_s = each_token_s(*cost.alone(np.array([1.0, LearnedPrefills.FAR])).tolist())
        return latency.verify_s(verified, context) + prefill_tokens * token_s

    def _read_beside(self, tokens: int, forward_s: float, alone_s: float) -> None:
        """Learns from a chunk in a verification, which took ``forward_s`` and would have taken ``alone_s``
        without it."""
        longer_s = max(0.0, forward_s - self._slowed(alone_s)) + self._slowed(self._draft_prefill_s())
        self._beside.observe(tokens, longer_s)

    # -- decoding -----------------------------------------------------------------------------

    def _decoded(
        self,
        pick: slice | IntArray,
        new: IntArray,
        verified: float,
        prefill_tokens: int,
        cycle_s: float,
    ) -> None:
        """Accounts for an iteration that has just ended: ``new`` tokens [n] of the rows ``pick``. ``cycle_s``
        as in ``IterationOutcome``."""
        self._last_end_s = self.now_s
        rids = self.rows.rids if isinstance(pick, slice) else [self.rows.rids[i] for i in pick]
        self._recent.decoded(rids, new, verified, prefill_tokens, cycle_s)
        self._output_left -= int(new.sum())
        for request, tokens, iterations in self.rows.advance(pick, new):
            request.produced, request.iterations = tokens, iterations
            self._end(request)

    def _end(self, request: SimRequest) -> None:
        request.last_token_s = self.now_s
        self._reserved -= request.prompt_tokens + request.cap_tokens
        self._output_left -= request.cap_tokens - 1 - request.produced  # it may have stopped early
        cut = request.output_tokens >= request.cap_tokens
        self._lengths.add(request.slo_class, request.output_tokens - 1, cut)
        self.done.append(request)

    def _slowed(self, seconds: float) -> float:
        """``seconds``, or more of them while others use the host."""
        for begin, end, times in self.config.busy:
            if begin <= self.now_s < end:
                seconds *= times
        return seconds

    def _noisy(self, seconds: float) -> float:
        return self._slowed(seconds) * float(np.exp(self._rng.normal(0.0, self.config.noise)))
