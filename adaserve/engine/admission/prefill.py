"""When prefills run beside decoding requests, and how large their chunks are: the engine's side.

The rule is ``scheduler/admission/prefill.py``, which the simulator calls too. Here it gets what the engine
knows: which requests decode, which wait, and how long an iteration and a chunk take.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from adaserve.config import AdaServeConfig
from adaserve.engine.admission.encoders import tokens_to_encode
from adaserve.engine.rank_sync import RankSync
from adaserve.engine.request_state import RequestState, running_batch
from adaserve.patches.scheduler.worker_interface import Load
from adaserve.scheduler.admission.fairness import HoldBudget, binding_rows
from adaserve.scheduler.admission.interference import RecentWork
from adaserve.scheduler.admission.order import looked_at
from adaserve.scheduler.admission.prediction import TPOTPredictor
from adaserve.scheduler.admission.prefill import PrefillPlan, plan_prefill
from adaserve.scheduler.admission.situation import Situation, WaitingBatch, first_token_due_s, tpot_to_meet_s
from adaserve.scheduler.costs.learned import LearnedCosts
from adaserve.scheduler.costs.prefills import LearnedPrefills
from adaserve.scheduler.interface import Context, IntArray, IterationOutcome, RunningBatch
from adaserve.scheduler.policies import is_slo_aware
from adaserve.slo.classes import ANONYMOUS
from adaserve.slo.ledger import SLOLedger

Turns = dict[float, tuple[str, float]]
"""Of requests with many answers, by arrival: whose turn it is, and since when."""


class View(NamedTuple):
    """The part of a scheduler's load that the rule sees, and the requests it belongs to."""

    situation: Situation
    waiting: list[Any]  # the started prompt, if there is one, and those of the queue that are looked at
    places: IntArray  # of these, in a list of the started prompt, if there is one, and the whole queue
    aims: list[Aim]  # of all in that list
    running: list[Any]  # the rows of ``batch``
    batch: RunningBatch
    turns: Turns


class Aim(NamedTuple):
    """Of a prompt; seconds."""

    arrival_s: float
    ttft_slo_s: float
    due_s: float  # when the first token should be out
    slo_class: str


_Queued = tuple[float, int, float]  # when it is due, its place in the queue, and when it came


class PrefillPacer:
    """Answers ``plan`` before each scheduling step; learns from every prefill and iteration."""

    def __init__(
        self,
        config: AdaServeConfig,
        costs: LearnedCosts,
        ledger: SLOLedger,
        states: Mapping[int, RequestState],
        rank_sync: RankSync,
        tenant_share: float = 1.0,
        most_beside: int = 0,
    ) -> None:
        """``states``: the worker's, by request-pool row. ``tenant_share``: share of the time for which one
        tenant's TPOT SLOs may hold up other prompts; without a break at most that share of a prompt's
        patience. ``most_beside``: as in ``ModelForward``."""
        self._rank_sync = rank_sync
        self.mode: str | None = config.prefill
        self._rule = config.for_prefills()
        self._costs, self._ledger, self._states = costs, ledger, states
        one_s, far_s = costs.first_prefills_s(np.array([1.0, LearnedPrefills.FAR]))
        self._prefills = LearnedPrefills(float(one_s), float(far_s))
        self._beside = LearnedPrefills.beside(float(one_s), float(far_s))  # what they add to verifications
        self._most_beside = most_beside
        self._added_s = 0.0  # by the prompts in the last verification
        self._encoders = LearnedPrefills(float(one_s), float(far_s))  # of images: nothing better is known
        self.predictor = TPOTPredictor(costs)
        self._recent = RecentWork()
        # Credit comes back while it is spent, so it lasts longer than what may be saved up.
        at_once_s = tenant_share * self._rule.patience_s
        self._holds = HoldBudget(tenant_share, (1.0 - tenant_share) * at_once_s)
        self._holders: set[str] = set()  # tenants for whose SLOs somebody waits in this iteration
        self._aims: WeakKeyDictionary[Any, Aim] = WeakKeyDictionary()
        self._turns: Turns = {}

    def paces(self, policy: str) -> bool:
        """Whether prefills are paced. Slack comes from SLOs, so policies that ignore SLOs get SGLang's own
        prefills unless the configuration says otherwise.
        """
        return self.mode in ("mixed", "slack") or (self.mode is None and is_slo_aware(policy))

    def most_beside(self, policy: str) -> int:
        """Prompt tokens that may be in a verification's forward under this policy; 0 = none."""
        return self._most_beside if self.paces(policy) and self.mode != "slack" else 0

    def set_mode(self, mode: str | None) -> None:
        """From the next prefill on; None: what fits the policy."""
        self.mode = mode

    # -- learning -----------------------------------------------------------------------------

    def observe_prefill(self, tokens: int, seconds: float, encoded: int = 0) -> None:
        """A prefill forward, target and draft, for which encoders ran that made ``encoded`` tokens."""
        self._recent.prefilled(seconds)
        quiet_s = seconds / self._costs.slowdown
        if encoded:
            self._encoders.observe(encoded, quiet_s - self._prefills.seconds(tokens))
        else:
            self._prefills.observe(tokens, quiet_s)

    def observe_beside(self, tokens: int, seconds: float) -> float:
        """What was left to do, in the draft above all, for prompts that were in the last verification.
        Returns the seconds of both, for which requests that decode have waited."""
        both_s = self._added_s + seconds
        self._recent.prefilled(seconds)
        self._beside.observe(tokens, both_s / self._costs.slowdown)
        return both_s

    def observe(self, outcome: IterationOutcome) -> None:
        """A decode iteration."""
        running = outcome.plan.running
        rids, verified = running.rids, float(outcome.selection.verify_tokens)
        if outcome.prefill_tokens:
            context = Context(float(running.context_tokens.sum()), len(running))
            self._added_s = max(0.0, outcome.verify_s - self._costs.verify_s(verified, context))
        self._recent.decoded(rids, outcome.new_tokens, verified, outcome.prefill_tokens, outcome.cycle_s)
        self._holds.charge(self._holders, outcome.total_s, outcome.end_s)
        self._holders = set()
        self.predictor.observe(outcome)

    # -- deciding -----------------------------------------------------------------------------

    def plan(self, load: Load, now_s: float) -> PrefillPlan:
        """How many prompt tokens to prefill before the next decode iteration (0 = none), and in which order.

        Row 0 is the started prompt, if there is one, and the further rows are the queue. Rows that the order
        leaves out have to wait; only those of ``View.places`` can be in it. All tensor-parallel ranks have to
        ask at the same time, and the first one decides.
        """
        return self._rank_sync.decide(lambda: self._plan(load, now_s))

    def _plan(self, load: Load, now_s: float) -> PrefillPlan:
        view = self.view(load, now_s)
        situation, self._turns = view.situation, view.turns
        plan = plan_prefill(situation, len(load.running))
        if plan.lost:
            self._recent.lost_at_s = now_s
        order = view.places[plan.order]
        self._ledger.gate((aim.slo_class, now_s - aim.arrival_s) for aim in _held_back(view, order))
        if self._holds.limits:
            starting = set(plan.order.tolist()) if plan.tokens else set()
            held = [r for i, r in enumerate(view.waiting) if i not in starting]
            binding = binding_rows(situation.interference.slack_s, view.batch.tpot_slo_s)
            tight = [view.running[i] for i in binding]
            self._holders = self._holding_up(tight, held)
        return replace(plan, order=order)

    def view(self, load: Load, now_s: float) -> View:
        """The interference is computed for one request more than those that are looked at."""
        started = [] if load.started is None else [load.started]
        every = [self._aim(req) for req in (*started, *load.waiting)]
        queued = every[len(started) :]
        picked, turns = self._looked_at(load.waiting[: load.first], queued[: load.first], now_s)
        waiting = [*started, *(load.waiting[i] for i in picked)]
        aims = [*every[: len(started)], *picked.values()]
        places = np.array([*range(len(started)), *(len(started) + i for i in picked)], np.int64)
        running, batch = self._decoding(load.running, now_s)
        most, cost = load.most_tokens, self._prefills
        if running and load.most_beside:
            most, cost = min(most, load.most_beside), self._beside
        chunks = cost.chunks(most, self._costs.slowdown)
        interference = self._recent.interference(self._costs, batch, len(waiting) + 1, chunks, now_s)
        rule = replace(self._rule, chunk_tokens=most)
        queue = self._waiting(waiting, aims, load.started)
        return View(
            Situation(rule, queue, now_s, interference), waiting, places, every, running, batch, turns
        )

    def _looked_at(
        self, waiting: Sequence[Any], aims: Sequence[Aim], now_s: float
    ) -> tuple[dict[int, Aim], Turns]:
        """By place in the queue, rising: retracted requests, whose first token was out long ago, and the
        prompts that the rule looks at. Also the answers whose turn it is now.

        A client can ask for thousands of answers at once. They are queued like one request: it is the turn of
        one of them, and when that has left the queue, of the next, as if it had only just arrived. The others
        come after all waiting requests. Answers of one request are recognized by their identical arrival
        times."""
        picked, stated, patient = dict[int, Aim](), list[_Queued](), list[_Queued]()
        turns: Turns = {}
        for i, (req, aim) in enumerate(zip(waiting, aims, strict=True)):
            arrival_s, ttft_slo_s, due_s, _ = aim
            if req.output_ids:
                picked[i] = aim
            elif math.isfinite(ttft_slo_s):
                stated.append((due_s, i, arrival_s))
            else:
                since_s = now_s
                if arrival_s not in turns:
                    rid, before_s = self._turns.get(arrival_s, (req.rid, arrival_s))
                    since_s = before_s if rid == req.rid else now_s
                    turns[arrival_s] = req.rid, since_s
                patient.append((since_s + self._rule.patience_s, i, since_s))
        for due_s, i, since_s in looked_at(self._rule, sorted(stated), sorted(patient), now_s):
            picked[i] = aims[i]._replace(arrival_s=since_s, due_s=due_s)
        return dict(sorted(picked.items())), turns

    def _holding_up(self, tight: Iterable[Any], held: Iterable[Any]) -> set[str]:
        """Tenants of the ``tight`` requests because of whose SLOs a prompt of another tenant is ``held``.
        Requests without a key may come from different people."""
        waiting = set(map(self._tenant, held))
        return {t for t in map(self._tenant, tight) if waiting - ({t} - {ANONYMOUS})}

    def _tenant(self, req: Any) -> str:
        return self._ledger.slo(req).tenant

    def _decoding(self, running: Sequence[Any], now_s: float) -> tuple[list[Any], RunningBatch]:
        """The running requests, without the SLOs of tenants that have held others up for too long."""
        pairs = [(r, self._states.get(r.kv.req_pool_idx)) for r in running]
        known = [(r, s) for r, s in pairs if s is not None and s.rid == r.rid]
        reqs, states = [r for r, _ in known], [s for _, s in known]
        batch = running_batch(reqs, states, self._ledger.lengths)
        if self._holds.limits:
            counts = np.array([self._holds.has(self._tenant(r), now_s) for r in reqs], np.bool_)
            batch = replace(batch, tpot_slo_s=np.where(counts, batch.tpot_slo_s, np.inf))
        return reqs, batch

    def _waiting(self, reqs: Sequence[Any], aims: Sequence[Aim], started: Any | None) -> WaitingBatch:
        left = [_prompt_left(r, r is started) for r in reqs]
        return WaitingBatch(
            arrival_s=np.array([a.arrival_s for a in aims]),
            ttft_slo_s=np.array([a.ttft_slo_s for a in aims]),
            prompt_left=np.array(left, np.int64),
            started=np.array([r is started or bool(r.output_ids) for r in reqs], np.bool_),
            tpot_slo_s=np.array(
                [tpot_to_meet_s(self._ledger.slo(r).tpot_s, r.sampling_params.max_new_tokens) for r in reqs]
            ),
            encode_s=np.array([self._encode_s(r, r is started) for r in reqs], np.float64),
        )

    def _encode_s(self, req: Any, started: bool) -> float:
        tokens = tokens_to_encode([(req, _cached(req, started), len(req.origin_input_ids))])
        return self._encoders.seconds(tokens) * self._costs.slowdown

    def _aim(self, req: Any) -> Aim:
        if (found := self._aims.get(req)) is None:
            arrival_s, ttft_slo_s = self._ledger.arrival_s(req), self._ledger.slo(req).ttft_s
            due_s = float(first_token_due_s(arrival_s, ttft_slo_s, self._rule.patience_s))
            found = self._aims[req] = Aim(arrival_s, ttft_slo_s, due_s, self._ledger.slo(req).slo_class)
        return found


def _held_back(view: View, order: IntArray) -> list[Aim]:
    """Prompts that must not start yet; ``order``: those that may. Prompts that were not looked at come after
    the others: they are held back if one of those is."""
    if len(order) == len(view.waiting):
        return []
    starting = set(order.tolist())
    return [aim for i, aim in enumerate(view.aims) if i not in starting]


def _cached(req: Any, started: bool) -> int:
    return req.prefix_len if started else req.num_matched_prefix_tokens


def _prompt_left(req: Any, started: bool) -> int:
    ids = len(req.full_untruncated_fill_ids) if started else len(req.origin_input_ids) + len(req.output_ids)
    return max(1, ids - _cached(req, started))
