"""The scheduler process's books: how fast each request was, and whether that met its SLO."""

from __future__ import annotations

import math
from typing import Any

from adaserve.live.stats import FinishedRequest, IterationSample, SLOStats
from adaserve.scheduler.interface import IterationOutcome
from adaserve.scheduler.slo import SLOConfig, SLOError, resolve


class SLOLedger:
    """Resolves SLOs against the measured baseline, and settles requests when they finish."""

    def __init__(self, config: SLOConfig, baseline_s: float, stats: SLOStats) -> None:
        self._config = config
        self.baseline_s = baseline_s
        self.stats = stats

    def slo(self, req: Any) -> tuple[str, float, float]:
        """Class, TPOT and TTFT SLO in seconds (inf = none) of a request."""
        try:
            slo = resolve({}, req.sampling_params.custom_params, self._config, self.baseline_s)
        except SLOError:
            # The boundary has refused bad values; what is left was meant for somebody else.
            return "default", math.inf, math.inf
        return slo.slo_class, slo.tpot_s, slo.ttft_s

    def close(self, req: Any) -> dict[str, Any]:
        """The report of a finished request; counted once."""
        times = req.time_stats
        slo_class, tpot_slo_s, ttft_slo_s = self.slo(req)
        tokens = len(req.output_ids)
        first_s = times.prefill_finished_time
        started_s = times.created_time or times.scheduler_recv_time or times.wait_queue_entry_time
        ttft_s = first_s - started_s if first_s and started_s else None
        tpot_s = (times.last_decode_finish_time - first_s) / (tokens - 1) if tokens > 1 else None
        aborted = type(req.finished_reason).__name__ == "FINISH_ABORT"
        met_tpot = tpot_slo_s == math.inf or tpot_s is None or tpot_s <= tpot_slo_s
        met_ttft = ttft_slo_s == math.inf or (ttft_s is not None and ttft_s <= ttft_slo_s)
        if not aborted:
            self.stats.finish(
                FinishedRequest(
                    rid=req.rid,
                    slo_class=slo_class,
                    tpot_slo_s=tpot_slo_s,
                    ttft_slo_s=ttft_slo_s,
                    ttft_s=ttft_s,
                    tpot_s=tpot_s,
                    output_tokens=tokens,
                    iterations=req.spec_verify_ct,
                    retractions=req.retraction_count,
                )
            )
        return {
            "class": slo_class,
            "tpot_ms": _ms(tpot_s),
            "tpot_slo_ms": _ms(tpot_slo_s),
            "ttft_ms": _ms(ttft_s),
            "ttft_slo_ms": _ms(ttft_slo_s),
            "met": not aborted and met_tpot and met_ttft,
        }

    def iteration(self, outcome: IterationOutcome) -> None:
        """Counts a decode iteration."""
        plan, selection = outcome.plan, outcome.selection
        self.stats.iteration(
            IterationSample(
                running=len(plan.running),
                queue=0,
                depth=plan.depth,
                width=plan.width if plan.depth else 0,
                budget=plan.budget,
                verify_tokens=selection.verify_tokens,
                drafted_tokens=outcome.trees.n_nodes,
                new_tokens=int(outcome.new_tokens.sum()),
                expected_tokens=float(selection.expected_tokens.sum()),
                draft_s=outcome.draft_s,
                select_s=outcome.select_s,
                verify_s=outcome.verify_s,
                total_s=outcome.total_s,
            )
        )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None or not math.isfinite(seconds) else round(seconds * 1e3, 3)
