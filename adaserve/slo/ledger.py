"""What the scheduler process records: how fast each request was, and whether that met its SLO."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from adaserve.slo.classes import SLO, to_ms
from adaserve.slo.delivered_tpot import DeliveredTPOT
from adaserve.slo.events import STAGES, FinishedRequest, IterationSample
from adaserve.slo.lengths import OutputLengths
from adaserve.slo.request_log import RequestLog
from adaserve.slo.resolve import RequestSLO
from adaserve.slo.run_summary import mean_tpot_s
from adaserve.slo.stats import SLOStats

SERVER_FAULT = 500
"""An aborted request with at least this HTTP status counts as failed; otherwise the client is the reason."""

HEALTH_CHECK = "HEALTH_CHECK"
"""How the ids of SGLang's own requests begin: ``GET /health`` generates a token."""


def asked_of(req: Any) -> RequestSLO:
    """What the HTTP process has resolved of one of SGLang's requests."""
    return RequestSLO.from_params(req.sampling_params.custom_params)


@dataclass(slots=True, weakref_slot=True)
class _Company:
    """What went on beside a request while it decoded."""

    prefills_before_s: float  # the ledger's sum when its own prefill had ended
    stall_s: float = 0.0  # prefills of others until its last iteration
    iterations: int = 0
    running: int = 0  # summed over its iterations
    sources: dict[str, list[int]] = field(default_factory=dict)  # tokens by STAGES


class SLOLedger:
    """Knows each request's SLO, and settles requests when they finish."""

    def __init__(self, baseline_s: float, stats: SLOStats, log: RequestLog | None = None) -> None:
        # Of the unloaded server, per token. If it changes, requests that were seen already keep their SLO.
        self.baseline_s = baseline_s
        self.stats = stats
        self._log = log
        self._prefills_s = 0.0
        # SGLang does not report a request that is aborted while it waits, so its entries are held weakly.
        self._slos: WeakKeyDictionary[Any, SLO] = WeakKeyDictionary()
        self._company: WeakKeyDictionary[Any, _Company] = WeakKeyDictionary()
        self._by_rid: WeakValueDictionary[str, _Company] = WeakValueDictionary()
        self.delivered = DeliveredTPOT()
        self.lengths = OutputLengths()
        # TPOT: what it was told at its arrival, and what the load alone said.
        self._predicted_s: WeakKeyDictionary[Any, tuple[float, float]] = WeakKeyDictionary()
        self._queue = 0
        self._gated: dict[str, list[float]] = {}
        self._kv_use = 0.0

    def slo(self, req: Any) -> SLO:
        """The request's SLO, settled when it is first asked for."""
        if (known := self._slos.get(req)) is None:
            known = self._slos[req] = asked_of(req).at(self.baseline_s)
        return known

    def arrival_s(self, req: Any) -> float:
        """When the request came to the HTTP process, by the clock of ``time.perf_counter``; the earliest time
        known."""
        times = req.time_stats
        arrival_s: float = times.created_time or times.scheduler_recv_time or times.wait_queue_entry_time
        return arrival_s

    def predict(self, req: Any, by_load_s: float) -> None:
        """Predicts the TPOT of a request that arrives. ``by_load_s``: what the load alone says."""
        tpot_s = self.delivered.predict(self.slo(req), by_load_s, self.arrival_s(req))
        self._predicted_s[req] = tpot_s, by_load_s

    def _learn_tpot(self, request: FinishedRequest, by_load_s: float | None, end_s: float) -> None:
        if by_load_s is not None and request.tpot_s is not None and not request.failed:
            self.delivered.add(request.slo, request.output_tokens, request.tpot_s, by_load_s, end_s)

    def load(self, queue: int, kv_use: float) -> None:
        """Notes the number of waiting requests and the share of the KV pool in use (0 to 1)."""
        self._queue, self._kv_use = queue, kv_use

    def gate(self, held: Iterable[tuple[str, float]]) -> None:
        """Notes the prompts that the admission gate holds back for an iteration: class, seconds waited."""
        self._gated = {}
        for slo_class, waited_s in held:
            count, longest_s = self._gated.get(slo_class, (0, 0.0))
            self._gated[slo_class] = [count + 1, max(longest_s, waited_s)]

    def prefilled(self, reqs: Iterable[Any], duration_s: float) -> None:
        """Notes a prefill of these requests (or chunks of them), for which all others waited so long."""
        self._prefills_s += duration_s
        for req in reqs:
            company = self._company.get(req)
            if company is not None and company.iterations:
                # Retracted and prefilled again: that was not a prefill of others.
                company.prefills_before_s += duration_s
            else:
                self._company[req] = self._by_rid[req.rid] = _Company(self._prefills_s)

    def iteration(
        self, rids: Sequence[str], sample: IterationSample, sources: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Counts a decode iteration of the requests ``rids``; ``sources``: their tokens by source, [n, 3]."""
        by_source = {name: counts.tolist() for name, counts in (sources or {}).items()}
        for i, rid in enumerate(rids):
            company = self._by_rid.get(rid)
            if company is not None:
                for name, counts in by_source.items():
                    known = company.sources.get(name, (0, 0, 0))
                    company.sources[name] = [a + b for a, b in zip(known, counts[i], strict=True)]
                company.iterations += 1
                company.running += len(rids)
                company.stall_s = self._prefills_s - company.prefills_before_s
        sample.queue, sample.kv_use = self._queue, self._kv_use
        sample.gated, self._gated = self._gated, {}
        self.stats.iteration(sample)

    def close(self, req: Any) -> dict[str, Any]:
        """The report of a finished request; counted once.

        Not counted are requests that the client aborted, requests refused for their own contents, health
        checks, the request with which SGLang starts, and requests for no tokens: SGLang warms the cache with
        one for n > 1, and scores texts with them. A request that the server gave up counts as failed."""
        aborted = type(req.finished_reason).__name__ == "FINISH_ABORT"
        failed = aborted and int(req.finished_reason.status_code or 0) >= SERVER_FAULT
        sources = self._company[req].sources if req in self._company else {}
        predicted_s, by_load_s = self._predicted_s.pop(req, (None, None))
        request = self._finished(req, failed, predicted_s)
        asked = asked_of(req)
        own = req.rid.startswith(HEALTH_CHECK) or not asked.counted  # SGLang's
        served = not own and req.sampling_params.max_new_tokens != 0
        if served and (failed or not aborted):
            self.stats.finish(request)
            if asked.speculation is None:  # others get less than their class does
                self._learn_tpot(request, by_load_s, _last_s(req))
            if not failed and request.output_tokens:
                cut = type(req.finished_reason).__name__ == "FINISH_LENGTH"
                self.lengths.add(request.slo.slo_class, request.output_tokens - 1, cut)
            self.stats.came(asked.routed, asked.stated)
            if self._log is not None:
                self._log.add(request, self.arrival_s(req), len(req.origin_input_ids))
        slo = request.slo
        return {
            "class": slo.slo_class,
            "tpot_ms": _ms(request.tpot_s),
            "tpot_slo_ms": _ms(slo.tpot_s),
            "tpot_predicted_ms": _ms(request.predicted_tpot_s),
            "ttft_ms": _ms(request.ttft_s),
            "ttft_slo_ms": _ms(slo.ttft_s),
            "met": not aborted and request.met,
            "drafts": {name: dict(zip(STAGES, counts, strict=True)) for name, counts in sources.items()},
        }

    def _finished(self, req: Any, failed: bool, predicted_s: float | None) -> FinishedRequest:
        times = req.time_stats
        # A verification can accept tokens after the stop; they are not sent.
        tokens = len(req.output_ids_through_stop)
        first_s = times.prefill_finished_time
        last_s = _last_s(req)
        started_s = self.arrival_s(req)
        company = self._company.pop(req, None) or _Company(self._prefills_s)
        return FinishedRequest(
            slo=self.slo(req),
            ttft_s=first_s - started_s if first_s and started_s else None,
            tpot_s=mean_tpot_s(first_s, last_s, tokens) if first_s and last_s else None,
            predicted_tpot_s=predicted_s,
            output_tokens=tokens,
            failed=failed,
            iterations=req.spec_verify_ct,
            stall_s=company.stall_s,
            retractions=req.retraction_count,
            mean_running=company.running / company.iterations if company.iterations else 0.0,
        )


def _last_s(req: Any) -> float:
    """When the last token was there; 0 = never, or not known of one that has ended while it waited again."""
    # A retraction resets both; a request may end in the prefill that follows.
    times = req.time_stats
    return float(max(times.last_decode_finish_time, times.last_prefill_finished_time))


def _ms(seconds: float | None) -> float | None:
    return None if (ms := to_ms(seconds)) is None else round(ms, 3)
