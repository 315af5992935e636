"""When prefills run beside decoding requests, and how large their chunks are: the engine's side.

The rule is ``scheduler/prefill.py``, which the simulator calls too. Here it gets what the engine knows:
who decodes, who waits, how long an iteration and a chunk take.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from adaserve.config import AdaServeConfig
from adaserve.engine.state import RequestState, running_batch
from adaserve.scheduler.averages import MovingAverage, blend
from adaserve.scheduler.costs import LearnedCosts
from adaserve.scheduler.fairness import HoldBudget, binding_rows
from adaserve.scheduler.forecast import Outlook
from adaserve.scheduler.interface import IterationOutcome, RunningBatch
from adaserve.scheduler.policies import is_slo_aware
from adaserve.scheduler.prefill import (
    MOST_LATE,
    MOST_WAITING,
    PrefillConfig,
    PrefillPlan,
    Pressure,
    WaitingBatch,
    plan_prefill,
    stakes_of,
    stall_slack,
)
from adaserve.slo.classes import ANONYMOUS
from adaserve.slo.ledger import SLOLedger

NEWEST = 0.1
"""Weight of the newest iteration in the moving averages."""


class Chunks(NamedTuple):
    """Chunk sizes on offer, and the seconds that prefills of them take; int64 and float64 [k], rising."""

    sizes: np.ndarray
    seconds: np.ndarray


class Situation(NamedTuple):
    """What a decision about prefills is based on."""

    rule: PrefillConfig
    queue: WaitingBatch
    reqs: list[Any]  # the rows of ``batch``
    batch: RunningBatch
    pressure: Pressure


class PrefillPacer:
    """Answers ``plan`` before each scheduling step; learns from every prefill and iteration."""

    def __init__(
        self,
        config: AdaServeConfig,
        costs: LearnedCosts,
        ledger: SLOLedger,
        states: Mapping[int, RequestState],
        alone: bool = True,
        tenant_share: float = 1.0,
    ) -> None:
        """``states``: the worker's, by request-pool row. ``alone``: no other rank shares the requests.
        ``tenant_share``: of the time, that one tenant's TPOT SLOs may hold up other prompts; in one go at
        most that share of a prompt's patience."""
        self._alone = alone
        self.mode: str | None = None
        self.set_mode(config.prefill if alone else "exclusive")
        self._interval, self._patience_s = config.prefill_interval, config.prefill_patience_ms / 1e3
        self._gate = config.prefill_headroom or None
        self._lost_every_s = config.prefill_lost_interval_ms / 1e3 or None
        self._lost_at_s = -np.inf  # when a lost prompt was last started for having waited longest
        self._costs, self._ledger, self._states = costs, ledger, states
        self._prefills = costs.prefills()
        self.outlook = Outlook(costs)
        self._period_s = MovingAverage(NEWEST)  # of decode iterations
        self._cycle_s = MovingAverage(NEWEST)  # from the end of one to that of the next
        self._verified = MovingAverage(NEWEST)  # tokens per verification
        self._mean_pace = MovingAverage(NEWEST, start=1.0)  # tokens per request and iteration
        self._pace: dict[str, float] = {}  # the same per request, of those that ran in the last iteration
        self._decodes, self._spent_s = 0, 0.0  # since the last chunk; since the last decode iteration
        self._holds = HoldBudget(tenant_share, tenant_share * self._patience_s)
        self._holders: set[str] = set()  # tenants for whose SLOs somebody waits in this iteration
        self._aims: WeakKeyDictionary[Any, tuple[float, float]] = WeakKeyDictionary()

    def paces(self, policy: str) -> bool:
        """Whether prefills are paced. Slack comes from SLOs, so policies that ignore SLOs get SGLang's own
        prefills unless the configuration says otherwise.
        """
        return self.mode == "slack" or (self.mode is None and is_slo_aware(policy))

    def check_mode(self, mode: str | None) -> None:
        """``slack``, ``exclusive``, or None for what fits the policy. Raises ValueError.

        When prefills run is decided by every tensor-parallel rank for itself, so there it must not depend on
        the clock.
        """
        if not self._alone and mode != "exclusive":
            raise ValueError(
                "tensor-parallel ranks must prefill alike, so prefills can't be paced by the clock: only the "
                "prefill mode 'exclusive' is possible"
            )

    def set_mode(self, mode: str | None) -> None:
        """From the next prefill on. Raises ValueError, see ``check_mode``."""
        self.check_mode(mode)
        self.mode = mode

    # -- learning -----------------------------------------------------------------------------

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """A prefill forward, target and draft."""
        self._decodes, self._spent_s = 0, self._spent_s + seconds
        if tokens > 0:
            self._prefills.observe(tokens, seconds, self._costs.slowdown)

    def observe(self, outcome: IterationOutcome) -> None:
        """A decode iteration."""
        self._period_s.add(outcome.total_s)
        self._cycle_s.add(outcome.cycle_s)
        self._verified.add(float(outcome.selection.verify_tokens))
        self._decodes, self._spent_s = self._decodes + 1, 0.0
        self._holds.charge(self._holders, outcome.total_s, outcome.end_s)
        self._holders = set()
        self.outlook.observe(outcome)
        self._mean_pace.add(float(outcome.new_tokens.mean()))
        known, usual = self._pace, self._mean_pace.value
        self._pace = {
            rid: blend(known.get(rid, usual), float(new), NEWEST)
            for rid, new in zip(outcome.plan.running.rids, outcome.new_tokens.tolist(), strict=True)
        }

    # -- deciding -----------------------------------------------------------------------------

    def plan(
        self,
        running: Sequence[Any],
        started: Any | None,
        waiting: Sequence[Any],
        most_tokens: int,
        now_s: float,
    ) -> PrefillPlan:
        """How many prompt tokens to prefill before the next decode iteration (0 = none), and in which order.

        ``running``: the requests that decode. ``started``: the request whose prompt is partly
        in the cache, row 0 of the plan if there is one. ``waiting``: the queue, the further rows.
        ``most_tokens``: SGLang's own chunk size. Rows that the plan's order leaves out have to wait; only
        those of ``looked_at`` can be in it.
        """
        picked, before = self.looked_at(waiting, now_s), int(started is not None)
        looked = [*([] if started is None else [started]), *(waiting[i] for i in picked)]
        rule, queue, known, batch, pressure = self.situation(running, started, looked, most_tokens, now_s)
        plan = plan_prefill(rule, queue, len(running), now_s, pressure)
        if plan.lost:
            self._lost_at_s = now_s
        admitted = set(plan.order.tolist())
        self._ledger.gate(
            (self._ledger.slo(r).slo_class, now_s - arrived_s)
            for i, (r, arrived_s) in enumerate(zip(looked, queue.arrival_s.tolist(), strict=True))
            if i not in admitted
        )
        if self._holds.limits:
            starting = admitted if plan.tokens else set()
            held = [r for i, r in enumerate(looked) if i not in starting]
            tight = [known[i] for i in binding_rows(pressure.slack_s, batch.tpot_slo_s)]
            self._holders = self._holding_up(tight, held)
        rows = np.array([*range(before), *(before + i for i in picked)], np.int64)
        return replace(plan, order=rows[plan.order], shed=np.zeros(before + len(waiting), np.bool_))

    def _holding_up(self, tight: Iterable[Any], held: Iterable[Any]) -> set[str]:
        """Tenants of the ``tight`` requests for whose SLOs a prompt of somebody else is ``held``. Requests
        without a key may be of different people."""
        waiting = set(map(self._tenant, held))
        return {t for t in map(self._tenant, tight) if waiting - ({t} - {ANONYMOUS})}

    def looked_at(self, waiting: Sequence[Any], now_s: float) -> list[int]:
        """Places in the queue of the prompts that are due first among those that can still be in time, among
        those that are late without a TTFT SLO, and among the lost ones."""
        due_s = [self._due_s(r) for r in waiting]
        in_time, late, lost = list[int](), list[int](), list[int]()
        for i in sorted(range(len(waiting)), key=due_s.__getitem__):
            if self._lost_every_s is None or not -np.inf < due_s[i] < now_s:
                in_time.append(i)
            else:
                (lost if math.isfinite(self._aim(waiting[i])[1]) else late).append(i)
        return sorted(in_time[:MOST_WAITING]) + late[:MOST_LATE] + lost[:MOST_LATE]

    def _due_s(self, req: Any) -> float:
        """When the first token should be out; of a request that was retracted it has been out for long."""
        if req.output_ids:
            return -np.inf
        arrival_s, ttft_s = self._aim(req)
        return arrival_s + (ttft_s if math.isfinite(ttft_s) else self._patience_s)

    def situation(
        self,
        running: Sequence[Any],
        started: Any | None,
        waiting: Sequence[Any],
        most_tokens: int,
        now_s: float,
    ) -> Situation:
        """As for ``plan``; ``waiting`` are the rows, ``started`` is one of them. The pressure foresees one
        request more than those."""
        sizes = np.unique(np.linspace(1, most_tokens, 128).astype(np.int64))
        curve = self._prefills.quiet_curve(most_tokens)[sizes] * self._costs.slowdown
        chunks = Chunks(sizes, np.maximum.accumulate(curve))
        rule = self._rule(most_tokens)
        queue = self._waiting(waiting, started)
        known, batch = self._decoding(running, now_s)
        pressure = self._pressure(rule, batch, len(queue.arrival_s) + 1, now_s, chunks)
        return Situation(rule, queue, known, batch, pressure)

    def _tenant(self, req: Any) -> str:
        return self._ledger.slo(req).tenant

    def _decoding(self, running: Sequence[Any], now_s: float) -> tuple[list[Any], RunningBatch]:
        """The running requests, without the SLOs of tenants that have held others up for too long."""
        pairs = [(r, self._states.get(r.kv.req_pool_idx)) for r in running]
        known = [(r, s) for r, s in pairs if s is not None and s.rid == r.rid]
        reqs, states = [r for r, _ in known], [s for _, s in known]
        batch = running_batch(reqs, states, np.zeros(len(known), np.int64), 0, self._ledger.lengths)
        if self._holds.limits:
            counts = np.array([self._holds.has(self._tenant(r), now_s) for r in reqs], np.bool_)
            batch = replace(batch, tpot_slo_s=np.where(counts, batch.tpot_slo_s, np.inf))
        return reqs, batch

    def _rule(self, most_tokens: int) -> PrefillConfig:
        return PrefillConfig(
            chunk_tokens=most_tokens,
            order="deadline",
            pacing="slack",
            most_decodes=self._interval,
            patience_s=self._patience_s,
            gate=self._gate,
            lost_every_s=self._lost_every_s,
        )

    def _pressure(
        self, rule: PrefillConfig, batch: RunningBatch, joining: int, now_s: float, chunks: Chunks
    ) -> Pressure:
        n = max(1, len(batch))
        pace = np.array([self._pace.get(rid, self._mean_pace.value) for rid in batch.rids])
        period_s = self._period_s.value or self._costs.iteration_s(n, 0, 1, n)
        slack = stall_slack(batch, now_s, pace, period_s)
        stakes = None
        if self._gate is not None and len(batch):
            usual, cycle_s = self._mean_pace.value, self._cycle_s.value or period_s
            stakes = stakes_of(self._costs, batch, now_s, usual, cycle_s, self._verified.value, joining)
        lost_wait_s = now_s - self._lost_at_s
        return Pressure(slack, period_s, *chunks, self._decodes, self._spent_s, stakes, lost_wait_s)

    def _waiting(self, reqs: Sequence[Any], started: Any | None) -> WaitingBatch:
        aims = [self._aim(r) for r in reqs]
        left = [_prompt_left(r, r is started) for r in reqs]
        return WaitingBatch(
            arrival_s=np.array([a for a, _ in aims]),
            ttft_slo_s=np.array([t for _, t in aims]),
            prompt_left=np.array(left, np.int64),
            started=np.array([r is started or bool(r.output_ids) for r in reqs], np.bool_),
        )

    def _aim(self, req: Any) -> tuple[float, float]:
        """Arrival and TTFT SLO, seconds."""
        if (found := self._aims.get(req)) is None:
            found = self._aims[req] = (self._ledger.arrival_s(req), self._ledger.slo(req).ttft_s)
        return found


def _prompt_left(req: Any, started: bool) -> int:
    if started:
        return max(1, len(req.full_untruncated_fill_ids) - req.prefix_len)
    tokens = len(req.origin_input_ids) + len(req.output_ids)
    return max(1, tokens - req.num_matched_prefix_tokens)
