"""Prefills run in chunks between decode iterations, as the running requests' slack allows.

Why: SGLang prefers prefills to decoding, and with speculation a prefill shares no forward with decoding,
so a queue of prompts stops every running request. Its ``--prefill-decode-interval`` counts iterations
and knows no SLO, and its chunk size is fixed. ``get_new_batch_prefill`` is the one place where a prefill
batch is made: here it is made later, or smaller. The worker's ``PrefillPacer`` decides which.

SGLang admits a prompt when there are KV slots for all of it, and then takes for granted that nobody else
allocates between its chunks. So decode iterations run in between only while the slots of the rest of the
prompt stay free; when they would not, the prompt is finished first. Then it can be retracted like any other.

SGLang gives a started prompt the whole chunk, however long it is and whoever waits, save under its policy
``shortest-prefill-first``. Prompts that are due earlier pass it here, if there is room for all of them beside
it: the started one gets what they leave, and nobody else starts. They may need less than was foreseen, since
part of them turns out to be cached, and then the next of them would be started beside the first. SGLang can
hold one started prompt and ends where there are two, so a prompt that would not be read whole waits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import compress
from operator import not_
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook
from adaserve.patches.scheduler.worker_interface import is_paced, load_of, worker_of


def register() -> None:
    target = "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill"
    hook(target, _paced, HookType.AROUND)
    adder = "sglang.srt.managers.schedule_policy.PrefillAdder"
    hook(f"{adder}.add_one_req", _whole_beside_a_started_one, HookType.AROUND)


def _paced(original: Callable[[Any, Any], Any], self: Any, running_batch: Any) -> Any:
    """One decision per scheduling step: no prefill now, or one of at most a number of tokens."""
    from sglang.srt.managers.schedule_batch import NextBatchPlan

    worker = worker_of(self)
    if not is_paced(worker):
        return original(self, running_batch)
    _queue_ready_grammars(self)
    spare = _spare_slots(self, running_batch)
    if not _something_waits(self, running_batch) or spare <= 0:
        return original(self, running_batch)
    first = _by_priority(self)
    load = replace(load_of(self), running=_decoding(self, running_batch), first=first)
    plan = worker.prefill.plan(load, time.perf_counter())
    if plan.tokens == 0:
        return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
    usual, align = self.chunked_prefill_size, self.truncation_align_size or 1
    order = plan.order.tolist()
    passing = order[: order.index(0)] if plan.reserved and self.chunked_req is not None and 0 in order else []
    shares = bool(passing) and _tokens(self.waiting_queue[i - 1] for i in passing) < spare
    held = _line_up(self, passing if shares else order)
    if usual is not None:
        self.chunked_prefill_size = min(usual, -(-plan.tokens // align) * align)
    if shares:
        self.policy.shortest_prefill_chunk_limit = partial(_left_over, plan.reserved)
    try:
        made = original(self, running_batch)
    finally:
        vars(self.policy).pop("shortest_prefill_chunk_limit", None)
        self.chunked_prefill_size = usual
        self.waiting_queue = self.waiting_queue + held
    if held and made.batch_to_run is not None:  # whose log line says how much waits
        made.batch_to_run.prefill_stats.num_pending_tokens += sum(req.seqlen for req in held)
    return made


def _tokens(reqs: Iterable[Any]) -> int:
    """Of whole prompts: what is cached of one can be had by nobody else once it has started."""
    return sum(len(r.origin_input_ids) + len(r.output_ids) for r in reqs)


def _left_over(reserved: int, _started: Any, _waiting: Any, budget: int, _page_size: int) -> int | None:
    """In place of SGLang's rule for ``shortest-prefill-first``: the started prompt's part of a chunk."""
    return budget - reserved if budget > reserved else None


def _whole_beside_a_started_one(
    original: Callable[..., Any],
    self: Any,
    req: Any,
    has_chunked_req: bool,
    truncation_align_size: int | None,
) -> Any:
    from sglang.srt.managers.schedule_policy import AddReqResult

    if has_chunked_req and self.rem_chunk_tokens is not None:
        left = self.ceil_paged_tokens(len(req.full_untruncated_fill_ids) - req.prefix_len)
        if left > self.rem_chunk_tokens or self.is_hybrid_swa:
            return AddReqResult.OTHER
    return original(self, req, has_chunked_req, truncation_align_size)


def _queue_ready_grammars(scheduler: Any) -> None:
    """Requests whose grammar is compiled join the queue before a decision is made. SGLang lets them join in
    the call that makes the batch, where they would start whatever was decided.
    """
    if scheduler.grammar_manager.has_waiting_grammars():
        for req in scheduler.grammar_manager.get_ready_grammar_requests():
            scheduler._add_request_to_queue(req)


def _decoding(scheduler: Any, running_batch: Any) -> list[Any]:
    """Requests that a prefill would hold up."""
    if running_batch.is_prefill_only:
        return []
    finishing = scheduler._reqs_finishing_inflight(running_batch)
    return [r for r in running_batch.reqs if not r.finished() and r not in finishing]


def _something_waits(scheduler: Any, running_batch: Any) -> bool:
    return scheduler.chunked_req is not None or (
        bool(scheduler.waiting_queue) and not running_batch.batch_is_full
    )


def _spare_slots(scheduler: Any, running_batch: Any) -> float:
    """KV slots beyond those that a decode iteration now and the rest of the started prompt could take."""
    req = scheduler.chunked_req
    if req is None:
        return math.inf
    left = len(req.full_untruncated_fill_ids) - req.prefix_len
    free = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
    decoding = running_batch.new_tokens_required_next_decode() if running_batch.reqs else 0
    return float(free - decoding - left)


def _by_priority(scheduler: Any) -> int | None:
    """Where SGLang serves by priorities, puts the prompts of the highest one that waits at the beginning of
    the queue, and says how many may start; None = all. A retracted request waits for nobody."""
    queue = scheduler.waiting_queue
    if not queue or not scheduler.enable_priority_scheduling:
        return None
    sign = 1 if scheduler.schedule_low_priority_values_first else -1
    best = min(sign * req.priority for req in queue)
    may = [sign * req.priority == best or bool(req.output_ids) for req in queue]
    scheduler.waiting_queue = [*compress(queue, may), *compress(queue, map(not_, may))]
    return sum(may)


def _line_up(scheduler: Any, order: list[int]) -> list[Any]:
    """Keeps in the queue, in this order, the requests that may start now; returns the others, to be put back.

    First tokens due first; first come first served as long as nobody states a TTFT SLO. Where SGLang would
    not serve in order of arrival, its own order stays.
    """
    from sglang.srt.managers.schedule_policy import CacheAgnosticPolicy

    before = int(scheduler.chunked_req is not None)
    queue = scheduler.waiting_queue
    places = [i - before for i in order if i >= before]
    if scheduler.enable_priority_scheduling or scheduler.policy.policy != CacheAgnosticPolicy.FCFS:
        places.sort()
    may = set(places)
    scheduler.waiting_queue = [queue[i] for i in places]
    return [request for i, request in enumerate(queue) if i not in may]
