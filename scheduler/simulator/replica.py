"""One engine replica: the iteration loop of the engine, with a clock that a latency model moves."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from adaserve.scheduler.averages import MovingAverage
from adaserve.scheduler.interface import (
    BoolArray,
    CandidateTrees,
    Context,
    FloatArray,
    IntArray,
    IterationOutcome,
    IterationPlan,
    Policy,
    Selection,
)
from adaserve.scheduler.latency import LatencyModel
from adaserve.scheduler.policies.turbospec import TurboSpecPolicy
from adaserve.scheduler.prefill import (
    PrefillConfig,
    PrefillPlan,
    Pressure,
    WaitingBatch,
    least_chunk,
    plan_prefill,
    predicted_room,
    stall_slack,
)
from adaserve.scheduler.selection import row_of
from adaserve.scheduler.simulator.order import RowOrder, everyone
from adaserve.scheduler.simulator.rows import Rows
from adaserve.scheduler.simulator.trees import TreeSampler
from adaserve.scheduler.simulator.workload import SimRequest

PrefillMode = Literal["mixed", "exclusive"]


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """The engine around the policy."""

    latency: LatencyModel  # the truth; the policy has its own model
    kv_tokens: int = 400_000
    max_running: int = 512
    prefill_mode: PrefillMode = "mixed"
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    exclusive_tokens: int = 4096  # largest separate prefill forward
    noise: float = 0.03  # standard deviation of log seconds
    row_overhead_s: float = (
        0.0  # per running request and iteration, outside the models: its token is streamed
    )
    lag: bool = False  # overlap schedule: plans see the state before the last outcome
    busy: tuple[tuple[float, float, float], ...] = ()
    """When others use the host: from, until (simulated seconds), how many times as long everything takes."""


class Replica:
    """Steps one iteration at a time; ``now_s`` is the end of the last one."""

    def __init__(
        self,
        policy: Policy,
        config: ReplicaConfig,
        sampler: TreeSampler,
        rng: np.random.Generator,
        order: RowOrder = everyone,
    ) -> None:
        self.policy, self.config, self.sampler = policy, config, sampler
        self.now_s = 0.0
        self.waiting: deque[SimRequest] = deque()
        self.rows = Rows()
        self.done: list[SimRequest] = []
        self.log: list[tuple[float, ...]] = []  # LOG_FIELDS of every iteration
        self.outcomes: list[IterationOutcome] | None = None  # set to [] to record iterations
        self._rng, self._order = rng, order
        self._reserved = 0  # KV tokens promised to started and running requests
        self._last_end_s = 0.0
        self._late: IterationOutcome | None = None
        self._period_s = MovingAverage(0.1)  # of iterations with the prefills between them
        self._pace = MovingAverage(0.1)  # tokens per request and iteration
        self._iteration_s = MovingAverage(0.1)  # decode iterations alone
        self._verified = MovingAverage(0.1)  # tokens per verification
        self._lost_at_s = 0.0  # when a lost prompt was last started for having waited longest
        self._decodes, self._spent_s = 0, 0.0  # since the last chunk; since the last decode iteration

    LOG_FIELDS = (
        "now_s",
        "rows",
        "depth",
        "width",
        "verify",
        "prefill",
        "seconds",
        "draft_s",
        "new",
        "late_rows",
    )

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.waiting) or len(self.rows) > 0

    @property
    def load_tokens(self) -> float:
        """Work left, in output tokens (prompt tokens count a tenth): what least-work routing compares."""
        prompts = sum(r.prompt_tokens - r.prefilled for r in self.waiting)
        waiting_out = sum(r.cap_tokens for r in self.waiting)
        return float((self.rows.limit - self.rows.decoded).sum()) + waiting_out + 0.1 * prompts

    @property
    def seconds_per_token(self) -> float:
        """Recent seconds per output token of a running request; 0 while nothing ran."""
        return self._period_s.value / self._pace.value if self._pace.value else 0.0

    def submit(self, request: SimRequest) -> None:
        """Queues a request that has just arrived. One that can never fit the cache is shed."""
        self.now_s = max(self.now_s, request.arrival_s) if not self.busy else self.now_s
        if request.prompt_tokens + request.cap_tokens > self.config.kv_tokens:
            request.shed = True
            self.done.append(request)
            return
        self.waiting.append(request)

    def step(self) -> None:
        """One iteration: prefill chunk and decode share a forward (mixed), or prefill goes first."""
        chunk = self._take_chunk()
        tokens = sum(t for _, t in chunk)
        start = self.now_s
        if tokens and (self.config.prefill_mode == "exclusive" or not len(self.rows)):
            seconds = self._noisy(self.config.latency.verify_s(tokens) + self._draft_prefill_s(tokens))
            self.now_s += seconds
            self._decodes, self._spent_s = 0, self._spent_s + seconds
            self.policy.observe_prefill(tokens, seconds, self.now_s)
        elif len(self.rows):
            self._decode(tokens)
        else:
            self.now_s += 1e-3  # everyone waits behind a closed gate or a full cache
        self._finish_prefill(chunk)
        if self.now_s - start > 30:
            raise RuntimeError(f"one iteration took {self.now_s - start:.0f} s; the latency model is wrong")

    def _take_chunk(self) -> list[tuple[SimRequest, int]]:
        if not self.waiting:
            return []
        plan = self._plan_prefill()
        if plan.lost:
            self._lost_at_s = self.now_s
        if plan.shed.any():
            for request, out in zip(list(self.waiting), plan.shed.tolist(), strict=True):
                request.shed = out
            self.done.extend(r for r in self.waiting if r.shed)
        exclusive = self.config.prefill_mode == "exclusive"
        paced = self.config.prefill.pacing == "slack" and len(self.rows)
        left = self.config.exclusive_tokens if exclusive and not paced else plan.tokens
        chunk, started = [], len(self.rows) + sum(r.prefilled > 0 for r in self.waiting)
        queue = list(self.waiting)
        for i in plan.order.tolist():
            request = queue[i]
            if left <= 0:
                break
            if request.prefilled == 0:
                size = request.prompt_tokens + request.cap_tokens
                if self._reserved + size > self.config.kv_tokens or started >= self.config.max_running:
                    break  # in order: a small request must not starve a large one
                self._reserved += size
                started += 1
            take = min(left, request.prompt_tokens - request.prefilled)
            request.prefilled += take
            left -= take
            chunk.append((request, take))
        if plan.shed.any():
            self.waiting = deque(r for r in self.waiting if not r.shed)
        return chunk

    def _plan_prefill(self) -> PrefillPlan:
        queue = self.waiting
        batch = WaitingBatch(
            arrival_s=np.array([r.arrival_s for r in queue]),
            ttft_slo_s=np.array([r.ttft_slo_s for r in queue]),
            prompt_left=np.array([r.prompt_tokens - r.prefilled for r in queue]),
            started=np.array([r.prefilled > 0 for r in queue]),
        )
        pace = np.full(len(self.rows), max(1.0, self._pace.value))
        config = self.config.prefill
        wanted = config.pacing == "slack" or config.gate is not None
        pressure = self._pressure(pace) if wanted and len(self.rows) else None
        if pressure is not None and config.pacing == "slack":  # as the engine's pacer does it
            least = least_chunk(pressure.sizes, pressure.seconds)
            config = replace(config, least_tokens=max(config.least_tokens, least))
        return plan_prefill(config, batch, len(self.rows), self.now_s, pressure)

    def _pressure(self, pace: FloatArray) -> Pressure:
        """What chunks would cost the running requests: alone, or riding in their verification (mixed)."""
        config, latency, n = self.config.prefill, self.config.latency, len(self.rows)
        sizes = np.unique(np.linspace(1, config.chunk_tokens, 64).astype(np.int64))
        draft = np.array([self._draft_prefill_s(int(t)) for t in sizes])
        if self.config.prefill_mode == "exclusive":
            seconds = latency.verify_s(sizes.astype(np.float64)) + draft
        else:
            seconds = latency.verify_s(n + sizes.astype(np.float64)) - latency.verify_s(float(n)) + draft
        period_s = self._iteration_s.value or latency.iteration_s(n, 0, 1, n)
        running = self.rows.batch(None, self.config.lag, 0)
        slack = stall_slack(running, self.now_s, pace, period_s, config.horizon_tokens)
        room = None
        if config.gate is not None:
            cycle_s, verified = self._period_s.value or period_s, self._verified.value
            room = predicted_room(latency, self.rows.slo, pace, cycle_s, verified, len(self.waiting))
        lost_wait_s = self.now_s - self._lost_at_s
        return Pressure(slack, period_s, sizes, seconds, self._decodes, self._spent_s, room, lost_wait_s)

    def _finish_prefill(self, chunk: list[tuple[SimRequest, int]]) -> None:
        ready = [r for r, _ in chunk if r.prefilled >= r.prompt_tokens]
        if not ready:
            return
        first = {r.rid for r in ready}
        self.waiting = deque(r for r in self.waiting if r.rid not in first)
        for request in ready:
            request.first_token_s = self.now_s
            if request.output_tokens <= 1:
                self._end(request)
        can_draft = True
        if isinstance(self.policy, TurboSpecPolicy):
            can_draft = self.policy.wants_draft_prefill(len(self.rows))
        self.rows.join([r for r in ready if not r.finished], can_draft)

    def _decode(self, prefill_tokens: int) -> None:
        at = self._order(self.rows, self.now_s)
        running = self.rows.batch(at, self.config.lag, prefill_tokens)
        plan = self.policy.plan(running, self.now_s)
        pick = slice(None) if at is None else at
        trees, selection, accepted, draft_s = self._speculate(plan, pick)
        counts = np.bincount(row_of(trees)[accepted], minlength=len(running))
        left = (self.rows.length - self.rows.decoded)[pick]
        new = np.minimum(1 + counts, left)
        tokens = selection.verify_tokens + prefill_tokens
        context = Context(float(running.context_tokens.sum()), len(running))
        verify_s = self._noisy(self.config.latency.verify_s(tokens, context))
        total = draft_s + verify_s + self.config.latency.overhead_s + self._draft_prefill_s(prefill_tokens)
        total += self.config.row_overhead_s * len(running)
        self.now_s += total
        since = self.now_s - self._last_end_s if self._last_end_s else total
        self._last_end_s = self.now_s
        outcome = IterationOutcome(
            plan,
            trees,
            selection,
            accepted,
            new,
            self.now_s,
            draft_s,
            0.0,
            verify_s,
            total,
            since,
            prefilled=self._spent_s > 0,
            prefill_tokens=prefill_tokens,
        )
        self._report(outcome)
        self._commit(pick, new, outcome)

    def _speculate(
        self, plan: IterationPlan, pick: slice | IntArray
    ) -> tuple[CandidateTrees, Selection, BoolArray, float]:
        n = plan.drafting_rows
        if plan.depth == 0:
            trees = CandidateTrees.empty(len(plan.running))
            return trees, self.policy.select(plan, trees), np.zeros(0, np.bool_), 0.0
        drafted = self.sampler.draft(
            plan,
            self.rows.difficulty[pick],
            self.rows.bias[pick],
            lambda step, frontier: self.policy.keep_drafting(plan, step, frontier),
        )
        selection = self.policy.select(plan, drafted.trees)
        accepted = self.sampler.verify(drafted, selection)
        fed = [n, *(n * (s.stop - s.start) for s in drafted.levels[:-1])]  # rows of each draft forward
        latency, read = self.config.latency, plan.draft_context
        seconds = latency.draft_start_s(n, read) + sum(latency.draft_step_s(rows, read) for rows in fed)
        return drafted.trees, selection, accepted, self._noisy(seconds)

    def _report(self, outcome: IterationOutcome) -> None:
        if self.outcomes is not None:
            self.outcomes.append(outcome)
        arrived = outcome
        if self.config.lag:
            arrived, self._late = self._late, outcome  # type: ignore[assignment]
        if arrived is not None:
            self.policy.observe(arrived)
        if not outcome.prefill_tokens:
            self._iteration_s.add(outcome.total_s)
        self._verified.add(float(outcome.selection.verify_tokens))
        self._period_s.add(outcome.cycle_s)
        self._pace.add(float(outcome.new_tokens.mean()))
        self._decodes = 0 if outcome.prefill_tokens else self._decodes + 1
        self._spent_s = 0.0

    def _commit(self, pick: slice | IntArray, new: IntArray, outcome: IterationOutcome) -> None:
        rows = self.rows
        rows.seen_decoded = rows.decoded.copy()
        rows.decoded[pick] += new
        depth = int(outcome.trees.depth.max(initial=0))
        late = int((outcome.plan.need > depth + 1).sum())
        self.log.append(
            (self.now_s, len(new), depth, outcome.plan.width, outcome.selection.verify_tokens,
             outcome.prefill_tokens, outcome.total_s, outcome.draft_s, int(new.sum()), late)
        )  # fmt: skip
        for request in rows.requests if isinstance(pick, slice) else [rows.requests[i] for i in pick]:
            request.iterations += 1
        gone = rows.decoded >= rows.length
        if gone.any():
            for i in np.flatnonzero(gone):
                rows.requests[i].produced = int(rows.decoded[i])
                self._end(rows.requests[i])
            rows.leave(gone)

    def _end(self, request: SimRequest) -> None:
        request.last_token_s = self.now_s
        self._reserved -= request.prompt_tokens + request.cap_tokens
        self.policy.forget(request.rid)
        self.done.append(request)

    def _draft_prefill_s(self, tokens: int) -> float:
        speculates = self.policy.name != "none"
        return self.config.latency.draft_step_s(tokens) if tokens and speculates else 0.0

    def _noisy(self, seconds: float) -> float:
        for begin, end, times in self.config.busy:
            if begin <= self.now_s < end:
                seconds *= times
        return seconds * float(np.exp(self._rng.normal(0.0, self.config.noise)))


def iteration_log(replica: Replica) -> dict[str, FloatArray]:
    """The replica's log by field name."""
    table = np.asarray(replica.log, np.float64).reshape(-1, len(Replica.LOG_FIELDS))
    return {name: table[:, i] for i, name in enumerate(Replica.LOG_FIELDS)}
