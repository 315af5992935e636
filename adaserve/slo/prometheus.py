"""Prometheus metrics of the scheduler process. Label values are bounded: classes of the config.

``prometheus_client`` is imported when the first metric is needed: SGLang sets up its multiprocess
folder before that, and a metric that was created too early would be lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from adaserve.slo.metrics import RATIO_EDGES

if TYPE_CHECKING:
    from adaserve.slo.stats import FinishedRequest, IterationSample

_TOKEN_EDGES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
_SMALL_EDGES = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
_ACCEPT_EDGES = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 5, 6, 8)


class ServerMetrics:
    """The metrics named ``adaserve:*``."""

    def __init__(self, registry: Any = None) -> None:
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram

        where = {"registry": registry if registry is not None else REGISTRY}
        by_class = ("slo_class",)
        self.requests = Counter(
            "adaserve:slo_requests",
            "Finished requests by SLO class, objective (tpot, ttft, all) and outcome (met, missed, failed)",
            ("slo_class", "objective", "outcome"),
            **where,
        )
        self.ratio = Histogram(
            "adaserve:slo_tpot_ratio",
            "TPOT of a request divided by its SLO",
            by_class,
            buckets=RATIO_EDGES,
            **where,
        )
        self.goodput = Counter(
            "adaserve:goodput_tokens", "Output tokens of requests that met all their SLOs", by_class, **where
        )
        self.tokens = Counter(
            "adaserve:output_tokens", "Output tokens of all finished requests", by_class, **where
        )
        self.iterations = Counter("adaserve:iterations", "Decode iterations", **where)
        self.seconds = Counter(
            "adaserve:iteration_seconds",
            "Time in decode iterations by phase (draft, select, verify, other)",
            ("phase",),
            **where,
        )
        self.drafted = Counter("adaserve:drafted_tokens", "Candidate tokens drafted", **where)
        self.verified = Counter("adaserve:verified_tokens", "Tokens of verification forwards", **where)
        self.emitted = Counter("adaserve:emitted_tokens", "Tokens emitted by decode iterations", **where)
        self.expected = Counter(
            "adaserve:expected_tokens", "Tokens that selection expected decode iterations to emit", **where
        )
        self.rows = Counter("adaserve:decoded_rows", "Requests summed over decode iterations", **where)
        self.depth = Histogram(
            "adaserve:tree_depth", "Depth d of the candidate trees", buckets=_SMALL_EDGES, **where
        )
        self.width = Histogram(
            "adaserve:tree_width", "Width w of the candidate trees", buckets=_SMALL_EDGES, **where
        )
        self.budget = Histogram(
            "adaserve:token_budget", "Token budget B of a verification", buckets=_TOKEN_EDGES, **where
        )
        self.tree = Histogram(
            "adaserve:verify_batch_tokens", "Tokens of a verification", buckets=_TOKEN_EDGES, **where
        )
        self.accept = Histogram(
            "adaserve:accept_length",
            "Tokens emitted per request and iteration, bonus token included",
            buckets=_ACCEPT_EDGES,
            **where,
        )
        self.calibration = Gauge(
            "adaserve:calibration_error",
            "Expected tokens / emitted tokens - 1 of the last iterations",
            multiprocess_mode="mostrecent",
            **where,
        )
        self.target = Gauge(
            "adaserve:slo_target",
            "Share of requests of a class that should meet all their SLOs",
            by_class,
            multiprocess_mode="mostrecent",
            **where,
        )
        self._expected, self._emitted = 0.0, 0.0

    def start(self, targets: Mapping[str, float]) -> None:
        """Publishes the targets, and zeros for each class: a rate needs a first value."""
        for name, target in targets.items():
            self.target.labels(name).set(target)
            for outcome in ("met", "missed", "failed"):
                self.requests.labels(name, "all", outcome)
            self.tokens.labels(name)
            self.goodput.labels(name)
            self.ratio.labels(name)

    def finish(self, name: str, request: FinishedRequest, met_tpot: bool, met_ttft: bool) -> None:
        """Counts a finished request under the class label ``name``."""
        outcomes = {"all": met_tpot and met_ttft}
        if math.isfinite(request.tpot_slo_s):
            outcomes["tpot"] = met_tpot
        if math.isfinite(request.ttft_slo_s):
            outcomes["ttft"] = met_ttft
        for objective, met in outcomes.items():
            outcome = "failed" if request.failed else "met" if met else "missed"
            self.requests.labels(name, objective, outcome).inc()
        self.tokens.labels(name).inc(request.output_tokens)
        if outcomes["all"]:
            self.goodput.labels(name).inc(request.output_tokens)
        if request.tpot_s is not None and math.isfinite(request.tpot_slo_s):
            self.ratio.labels(name).observe(request.tpot_s / request.tpot_slo_s)

    def iteration(self, sample: IterationSample) -> None:
        """Counts a decode iteration."""
        self.iterations.inc()
        parts = {"draft": sample.draft_s, "select": sample.select_s, "verify": sample.verify_s}
        parts["other"] = max(0.0, sample.total_s - sum(parts.values()))
        for phase, seconds in parts.items():
            self.seconds.labels(phase).inc(max(0.0, seconds))
        self.drafted.inc(sample.drafted_tokens)
        self.verified.inc(sample.verify_tokens)
        self.emitted.inc(sample.new_tokens)
        self.expected.inc(max(0.0, sample.expected_tokens))
        self.rows.inc(sample.running)
        self.depth.observe(sample.depth)
        self.width.observe(sample.width)
        self.budget.observe(sample.budget)
        self.tree.observe(sample.verify_tokens)
        if sample.running:
            self.accept.observe(sample.new_tokens / sample.running)
        self._calibrate(sample)

    def _calibrate(self, sample: IterationSample) -> None:
        """Exponential averages over about 200 iterations: single ones are noise."""
        self._expected += (sample.expected_tokens - self._expected) / 200
        self._emitted += (sample.new_tokens - self._emitted) / 200
        if self._emitted > 0:
            self.calibration.set(self._expected / self._emitted - 1)
