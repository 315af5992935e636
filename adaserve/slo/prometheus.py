"""Prometheus metrics of the scheduler process. Label values are bounded: classes of the config.

``prometheus_client`` is imported when the first metric is needed: SGLang sets up its multiprocess
folder before that, and a metric that was created too early would be lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import msgspec

from adaserve.slo.events import STAGES, DraftLearning, FinishedRequest, IterationSample
from adaserve.slo.forecast_types import Forecast
from adaserve.slo.run_summary import RATIO_EDGES

_TTFT_EDGES = (0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
_TOKEN_EDGES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
_SMALL_EDGES = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
_ACCEPT_EDGES = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 5, 6, 8)

_ERROR_EDGES = (-0.5, -0.25, -0.15, -0.05, 0.05, 0.15, 0.25, 0.5, 1.0)

# Fields of IterationSample -> metric.
_COUNTERS = {
    "drafted_tokens": ("drafted_tokens", "Candidate tokens drafted"),
    "verify_tokens": ("verified_tokens", "Tokens of verification forwards"),
    "new_tokens": ("emitted_tokens", "Tokens emitted by decode iterations"),
    "expected_tokens": ("expected_tokens", "Tokens that selection expected decode iterations to emit"),
    "running": ("decoded_rows", "Requests summed over decode iterations"),
}
_HISTOGRAMS = {
    "depth": ("tree_depth", "Depth d of the candidate trees", _SMALL_EDGES),
    "width": ("tree_width", "Width w of the candidate trees", _SMALL_EDGES),
    "budget": ("token_budget", "Token budget B of a verification", _TOKEN_EDGES),
    "verify_tokens": ("verify_batch_tokens", "Tokens of a verification", _TOKEN_EDGES),
}


# Fields of DraftLearning -> metric.
_LEARNED = {
    "swaps": ("swaps", "Better drafts that were swapped in"),
    "rejected": ("rejected", "Drafts in training that were worse or could not be served"),
    "tokens": ("learned_tokens", "Served tokens that the draft has learned from"),
    "cpu_s": ("trainer_cpu_seconds", "Processor time that the trainer has used"),
}


class _OfModel:
    """A metric with labels besides the model's."""

    def __init__(self, metric: Any, model_name: str) -> None:
        self._metric, self._model_name = metric, model_name

    def labels(self, *values: str) -> Any:
        return self._metric.labels(self._model_name, *values)


def _of_model(
    model_name: str, kind: Any, name: str, says: str, labels: tuple[str, ...] = (), **settings: Any
) -> Any:
    """A metric of this model only: one Prometheus may watch servers of several, whose SLO classes have the
    same names."""
    metric = kind(name, says, ("model_name", *labels), **settings)
    return _OfModel(metric, model_name) if labels else metric.labels(model_name)


class ServerMetrics:
    """The metrics named ``adaserve:*``. ``model_name``: the label that SGLang's metrics have as well."""

    def __init__(self, model_name: str, registry: Any = None) -> None:
        import prometheus_client as prometheus

        where = {"registry": registry if registry is not None else prometheus.REGISTRY}
        made: Callable[..., Any] = partial(_of_model, model_name, **where)
        counter, histogram = partial(made, prometheus.Counter), partial(made, prometheus.Histogram)
        gauge = partial(made, prometheus.Gauge, multiprocess_mode="mostrecent")
        by_class = ("slo_class",)
        self.requests = counter(
            "adaserve:slo_requests",
            "Finished requests by SLO class, objective (tpot, ttft, all) and outcome (met, missed, failed)",
            ("slo_class", "objective", "outcome"),
        )
        ratio = "TPOT of a request divided by its SLO"
        self.ratio = histogram("adaserve:slo_tpot_ratio", ratio, by_class, buckets=RATIO_EDGES)
        first = "Time to first token of finished requests by SLO class, seconds"
        self.ttft = histogram("adaserve:ttft_seconds", first, by_class, buckets=_TTFT_EDGES)
        held = "Prompts that the admission gate holds back for the TPOT SLOs of running requests"
        self.gated = made(
            prometheus.Gauge, "adaserve:gated_prompts", held, by_class, multiprocess_mode="livesum"
        )
        oldest = "How long the oldest prompt at the admission gate has waited, seconds"
        self.gated_s = made(
            prometheus.Gauge, "adaserve:gated_longest_seconds", oldest, by_class, multiprocess_mode="livemax"
        )
        self._gated: set[str] = set()  # classes whose gauges are not 0
        good = "Output tokens of requests that met all their SLOs"
        self.goodput = counter("adaserve:goodput_tokens", good, by_class)
        self.tokens = counter("adaserve:output_tokens", "Output tokens of all finished requests", by_class)
        self.iterations = counter("adaserve:iterations", "Decode iterations")
        phases = "Time in decode iterations by phase (draft, select, verify, other)"
        self.seconds = counter("adaserve:iteration_seconds", phases, ("phase",))
        self.counters = {
            field: counter(f"adaserve:{name}", says) for field, (name, says) in _COUNTERS.items()
        }
        says = "Tokens that each source of drafts proposed, and of these the verified and accepted ones"
        self.sources = counter("adaserve:source_tokens", says, ("source", "stage"))
        says = "Requests drafted for, over iterations, by the recent tokens of the context that were read"
        self.windows = counter("adaserve:draft_window_rows", says, ("window",))
        self.histograms = {
            field: histogram(f"adaserve:{name}", says, buckets=edges)
            for field, (name, says, edges) in _HISTOGRAMS.items()
        }
        emitted = "Tokens emitted per request and iteration, bonus token included"
        self.accept = histogram("adaserve:accept_length", emitted, buckets=_ACCEPT_EDGES)
        wrong = "Expected tokens / emitted tokens - 1 of the last iterations"
        self.calibration = gauge("adaserve:calibration_error", wrong)
        target = "Share of requests of a class that should meet all their SLOs"
        self.target = gauge("adaserve:slo_target", target, by_class)
        self._expected, self._emitted = 0.0, 0.0
        shed = "Requests answered with 429 by class and reason (see --shed)"
        self.refused = counter("adaserve:shed_requests", shed, ("slo_class", "reason"))
        came = "Finished requests by how they came (router, direct) and whether they stated an SLO (yes, no)"
        self.arrivals = counter("adaserve:requests", came, ("through", "slo_stated"))
        error = "Predicted / delivered TPOT - 1 of finished requests, predicted when they arrived"
        self.error = histogram("adaserve:predicted_tpot_error", error, by_class, buckets=_ERROR_EDGES)
        self._make_forecasts(partial(made, prometheus.Gauge))
        says = "Expected accepted tokens of a chain of 4, on the newest requests"
        self.accepted = gauge("adaserve:draft_accepted", says, ("draft", "slo_class"))
        self.trainer = gauge("adaserve:draft_trainer_running", "1 while the trainer runs")
        self.learning = {
            field: counter(f"adaserve:draft_{name}", says) for field, (name, says) in _LEARNED.items()
        }
        self._learned = DraftLearning(trainer="starting")  # as counted so far

    def _make_forecasts(self, gauge: Callable[..., Any]) -> None:
        """What data-parallel ranks say is added up as a router sees it: the best one serves the request."""
        by_class = ("slo_class",)
        best_least = partial(gauge, multiprocess_mode="min")
        best_most = partial(gauge, multiprocess_mode="max")
        tpot = "Predicted TPOT of one more request, seconds"
        self.tpot = best_least("adaserve:predicted_tpot_seconds", tpot, by_class)
        headroom = "TPOT SLO of the class / predicted TPOT of one more request"
        self.headroom = best_most("adaserve:predicted_headroom", headroom, by_class)
        wait = "Predicted wait of one more request until its prefill starts, seconds"
        self.wait = best_least("adaserve:predicted_wait_seconds", wait, by_class)
        admission = "1 = a new prompt starts at once, below 1 = it waits while it can for those that run"
        self.admission = best_most("adaserve:admission_open", admission)

    def start(self, targets: Mapping[str, float]) -> None:
        """Publishes the targets, and zeros for each class: a rate needs a first value."""
        for through in ("router", "direct"):
            for stated in ("yes", "no"):
                self.arrivals.labels(through, stated)
        for name, target in targets.items():
            self.target.labels(name).set(target)
            for objective, outcome in product(("all", "tpot", "ttft"), ("met", "missed", "failed")):
                self.requests.labels(name, objective, outcome)
            for metric in (self.tokens, self.goodput, self.ratio, self.error, self.ttft):
                metric.labels(name)
            self.gated.labels(name).set(0)
            self.gated_s.labels(name).set(0)

    def finish(self, request: FinishedRequest) -> None:
        """Counts a finished request."""
        name = request.slo.slo_class
        outcomes = {"all": request.met}
        if math.isfinite(request.slo.tpot_s):
            outcomes["tpot"] = request.met_tpot
        if math.isfinite(request.slo.ttft_s):
            outcomes["ttft"] = request.met_ttft
        for objective, met in outcomes.items():
            outcome = "failed" if request.failed else "met" if met else "missed"
            self.requests.labels(name, objective, outcome).inc()
        self.tokens.labels(name).inc(request.output_tokens)
        if outcomes["all"]:
            self.goodput.labels(name).inc(request.output_tokens)
        if (ratio := request.tpot_ratio) is not None:
            self.ratio.labels(name).observe(ratio)
        if request.ttft_s is not None:
            self.ttft.labels(name).observe(request.ttft_s)
        if (error := request.prediction_error) is not None:
            self.error.labels(name).observe(error)

    def forecast(self, forecast: Forecast) -> None:
        """Publishes what one more request would get."""
        self.admission.set(forecast.admission_open)
        for name, told in forecast.classes.items():
            self.tpot.labels(name).set(told.tpot_ms / 1e3)
            self.wait.labels(name).set(told.wait_ms / 1e3)
            if told.headroom is not None:
                self.headroom.labels(name).set(told.headroom)

    def came(self, routed: bool, stated: bool) -> None:
        """Counts how a request came."""
        self.arrivals.labels("router" if routed else "direct", "yes" if stated else "no").inc()

    def shed(self, name: str, reason: str) -> None:
        """Counts a request that got 429."""
        self.refused.labels(name, reason).inc()

    def iteration(self, sample: IterationSample) -> None:
        """Counts a decode iteration."""
        self.iterations.inc()
        parts = {"draft": sample.draft_s, "select": sample.select_s, "verify": sample.verify_s}
        parts["other"] = max(0.0, sample.total_s - sum(parts.values()))
        for phase, seconds in parts.items():
            self.seconds.labels(phase).inc(max(0.0, seconds))
        for field, counter in self.counters.items():
            counter.inc(max(0.0, getattr(sample, field)))
        for source, counts in sample.sources.items():
            for stage, tokens in zip(STAGES, counts, strict=True):
                self.sources.labels(source, stage).inc(tokens)
        for window, rows in sample.windows.items():
            self.windows.labels(window).inc(rows)
        for field, histogram in self.histograms.items():
            histogram.observe(getattr(sample, field))
        if sample.running:
            self.accept.observe(sample.new_tokens / sample.running)
        self.held(sample.gated)
        self._calibrate(sample)

    def held(self, gated: Mapping[str, Sequence[float]]) -> None:
        """Publishes what the admission gate holds back now, as ``IterationSample.gated``."""
        for name in self._gated | set(gated):
            count, longest_s = gated.get(name, (0, 0.0))
            self.gated.labels(name).set(count)
            self.gated_s.labels(name).set(longest_s)
        self._gated = set(gated)

    def learned(self, learning: DraftLearning) -> None:
        """How a draft that learns is doing."""
        for slo_class, scores in learning.judged[-1].classes.items() if learning.judged else ():
            self.accepted.labels("present", slo_class).set(scores.present)
            self.accepted.labels("first", slo_class).set(scores.first)
        self.trainer.set(learning.trainer == "running")
        for field, counter in self.learning.items():
            counter.inc(max(0.0, getattr(learning, field) - getattr(self._learned, field)))
        self._learned = msgspec.structs.replace(learning)  # the learner goes on writing into its own

    def _calibrate(self, sample: IterationSample) -> None:
        """Exponential averages over about 200 iterations: single ones are noise."""
        self._expected += (sample.expected_tokens - self._expected) / 200
        self._emitted += (sample.new_tokens - self._emitted) / 200
        if self._emitted > 0:
            self.calibration.set(self._expected / self._emitted - 1)
