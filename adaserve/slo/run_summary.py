"""What is measured, and how: TTFT, TPOT, attainment, goodput, and the summary of a run.

One module for the load generator, the server and the simulator, so that they cannot disagree.

============  ==================================================================================
TTFT          first non-empty token received - sent
TPOT          (last token - first chunk) / (output tokens - tokens of the first chunk), one number
              per request; tokens come from the server's usage, not from chunk counts
attainment    requests that met all their SLOs / all requests but those that their client gave up or
              that the end of the run cut off; failures are misses, and so are turns that a failure
              before them kept from being sent
goodput       tokens/s of requests that attained, and requests/s that attained
violations    1 - attainment
============  ==================================================================================
"""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from adaserve.slo.classes import seconds
from adaserve.slo.validity import invalid_reasons

SCHEMA_VERSION = 1
RATIO_EDGES = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)
"""Histogram edges of TPOT / SLO."""
PERCENTILES = (50, 90, 95, 99)
NOT_JUDGED = frozenset({"client_disconnect", "interrupted"})
"""Errors that the client caused itself: such requests are counted, but neither met nor missed."""

NEVER_SENT = "not sent: an earlier turn of its conversation failed"
"""The error of such a turn, which is a miss."""
PLAYED = "played_s"
"""In a summary: how long requests took that were played in pieces, one piece after the other. The times of
their records overlap."""
PREDICTED = "tpot_predicted_ms"
"""In a server's verdict: the TPOT that it predicted at the arrival, if it did."""

_ROUNDING = 1e-9  # an SLO of exactly the measured time is met


def mean_tpot_s(
    first_s: float, last_s: float, output_tokens: int, first_chunk_tokens: int = 1
) -> float | None:
    """Seconds per output token after the first chunk; None when no token followed it."""
    later = output_tokens - first_chunk_tokens
    return (last_s - first_s) / later if later > 0 else None


def within(value_s: float | None, slo_s: float) -> bool:
    """Whether a measured time meets its SLO (inclusive). A TPOT that does not exist meets any SLO."""
    return value_s is None or value_s <= slo_s * (1 + _ROUNDING)


@dataclass(slots=True)
class RequestRecord:
    """One request as the client saw it. Times are seconds from the start of the schedule."""

    id: str
    slo_class: str
    slo_ttft_ms: float | None  # None = no objective
    slo_tpot_ms: float | None
    scheduled_s: float
    sent_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    n_chunks: int = 0
    finish_reason: str | None = None
    error: str | None = None  # None = the answer is complete
    met_ttft: bool = False
    met_tpot: bool = False
    first_chunk_tokens: int = 1
    token_source: str = "usage"  # "chunks" when the server sent no usage: counts are then a guess
    end_s: float | None = None  # stream closed, or failed
    http_status: int | None = None
    session_id: str | None = None
    turn: int = 0
    worker: int = 0
    accept_length: float | None = None  # tokens per verification, where the server tells it
    itl_ms: Sequence[float] = field(default_factory=list)  # gaps between chunks that carried text
    # The server's own verdict, where it sends one: tpot_ms, tpot_slo_ms, ttft_ms, ttft_slo_ms, met, and
    # maybe PREDICTED.
    server_slo: Mapping[str, Any] | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        if self.first_token_s is None or self.last_token_s is None:
            return None
        return mean_tpot_s(self.first_token_s, self.last_token_s, self.output_tokens, self.first_chunk_tokens)

    @property
    def e2e_s(self) -> float | None:
        return None if self.last_token_s is None else self.last_token_s - self.sent_s

    @property
    def lag_s(self) -> float:
        """How much later than planned the request left."""
        return self.sent_s - self.scheduled_s

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def judged(self) -> bool:
        """False for requests that the client itself ended."""
        return self.error not in NOT_JUDGED

    @property
    def attained(self) -> bool:
        return self.met_ttft and self.met_tpot

    @property
    def tpot_ratio(self) -> float | None:
        """TPOT / SLO; None without either."""
        tpot = self.tpot_s
        return None if tpot is None or self.slo_tpot_ms is None else tpot * 1e3 / self.slo_tpot_ms

    def judge(self) -> None:
        """Sets ``met_ttft`` and ``met_tpot`` from the times. Failures miss both."""
        answered = self.ok and self.first_token_s is not None
        self.met_ttft = answered and within(self.ttft_s, seconds(self.slo_ttft_ms))
        self.met_tpot = answered and within(self.tpot_s, seconds(self.slo_tpot_ms))

    def to_json(self) -> str:
        """One line of ``requests.jsonl`` (no newline). Times keep microseconds."""
        data = {k: round(v, 6) if isinstance(v, float) else v for k, v in asdict(self).items()}
        data["itl_ms"] = [round(v, 2) for v in self.itl_ms]
        return json.dumps(data, ensure_ascii=False)

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> RequestRecord:
        """Ignores keys that it does not know, so that newer records can be read."""
        known = {f.name for f in fields(cls)}
        record = cls(**{k: v for k, v in data.items() if k in known})
        record.itl_ms = array("f", record.itl_ms)  # an eighth of the memory of a list of floats
        return record


def read_records(lines: Iterable[str]) -> Iterator[RequestRecord]:
    """Parses ``requests.jsonl``; a last line that was cut off (killed run) is left out."""
    pending: str | None = None
    for line in lines:
        if pending is not None:
            yield RequestRecord.from_mapping(json.loads(pending))
        pending = line if line.strip() else None
    if pending is not None:
        try:
            yield RequestRecord.from_mapping(json.loads(pending))
        except json.JSONDecodeError:
            return


def distribution_ms(name: str, values_s: Iterable[float | None]) -> dict[str, float | None]:
    """``{mean,median,p90,p95,p99}_<name>_ms`` of times in seconds; None if there are none."""
    values = np.array([v for v in values_s if v is not None], float) * 1e3
    result: dict[str, float | None] = {f"mean_{name}_ms": _or_none(values.mean()) if len(values) else None}
    for p in PERCENTILES:
        label = "median" if p == 50 else f"p{p}"
        result[f"{label}_{name}_ms"] = _or_none(np.percentile(values, p)) if len(values) else None
    return result


def _or_none(value: Any) -> float | None:
    return round(float(value), 4) if math.isfinite(value) else None


def class_summary(records: Sequence[RequestRecord], duration_s: float) -> dict[str, Any]:
    """The figures of one class (or of all requests)."""
    judged = [r for r in records if r.judged]
    done = [r for r in judged if r.ok]
    met = [r for r in judged if r.attained]
    tokens, good_tokens = sum(r.output_tokens for r in done), sum(r.output_tokens for r in met)
    accepts = [r.accept_length for r in done if r.accept_length is not None]
    ratios = [q for r in done if (q := r.tpot_ratio) is not None]
    return {
        "requests": len(judged),
        "completed": len(done),
        "failed": len(judged) - len(done),
        "never_sent": sum(r.error == NEVER_SENT for r in judged),  # of those that failed
        "disconnected": len(records) - len(judged),
        "attained": len(met),
        "total_input_tokens": sum(r.prompt_tokens for r in done),
        "total_output_tokens": tokens,
        "request_throughput": _per(len(done), duration_s),
        "output_throughput": _per(tokens, duration_s),
        "request_goodput": _per(len(met), duration_s),
        "token_goodput": _per(good_tokens, duration_s),
        "slo_attainment": _per(len(met), len(judged)),
        "slo_attainment_stderr": attainment_stderr(len(met), len(judged)),
        "slo_attainment_by_metric": {  # of those who have such an SLO: others would count as met
            "ttft": _share_of(r.met_ttft for r in judged if r.slo_ttft_ms is not None),
            "tpot": _share_of(r.met_tpot for r in judged if r.slo_tpot_ms is not None),
        },
        **distribution_ms("ttft", (r.ttft_s for r in done)),
        **distribution_ms("tpot", (r.tpot_s for r in done)),
        **distribution_ms("itl", (gap_ms / 1e3 for r in done for gap_ms in r.itl_ms)),
        **distribution_ms("e2el", (r.e2e_s for r in done)),
        "tpot_ratio_p50": _or_none(np.percentile(ratios, 50)) if ratios else None,
        "tpot_ratio_p99": _or_none(np.percentile(ratios, 99)) if ratios else None,
        "accept_length": _or_none(np.mean(accepts)) if accepts else None,
        "slo_tpot_ms": _common(r.slo_tpot_ms for r in records),
        "slo_ttft_ms": _common(r.slo_ttft_ms for r in records),
    }


def class_summaries(records: Iterable[RequestRecord], duration_s: float) -> dict[str, dict[str, Any]]:
    """The figures of each class, by its name."""
    by_class: dict[str, list[RequestRecord]] = {}
    for r in records:
        by_class.setdefault(r.slo_class, []).append(r)
    return {name: class_summary(mine, duration_s) for name, mine in sorted(by_class.items())}


def _common(values: Iterable[float | None]) -> float | list[float] | None:
    """The one value that all requests have, else [smallest, largest]."""
    given = {v for v in values if v is not None}
    if len(given) > 1:
        return [min(given), max(given)]
    return next(iter(given), None)


def _share_of(met: Iterable[bool]) -> float | None:
    outcomes = list(met)
    return _per(sum(outcomes), len(outcomes))


def _per(count: float, total: float) -> float | None:
    return round(count / total, 6) if total > 0 else None


def percent(share: float, digits: int = 1) -> str:
    """A share in percent, without the sign. Only all is 100: what would be rounded to it gets more digits."""
    while share < 1 and round(100 * share, digits) >= 100 and digits < 9:
        digits += 1
    return f"{100 * share:.{digits}f}"


def attainment_stderr(met: int, n: int) -> float | None:
    """Standard error of an attainment, half the Wilson interval of z = 1: not 0 when all or none were met."""
    if n == 0:
        return None
    p = met / n
    return round(math.sqrt(p * (1 - p) / n + 1 / (4 * n * n)) / (1 + 1 / n), 6)


def run_duration_s(records: Sequence[RequestRecord]) -> float:
    """From the first request sent to the last one that ended, seconds."""
    if not records:
        return 0.0
    ends = [e for r in records for e in (r.end_s, r.last_token_s, r.sent_s) if e is not None]
    return max(ends) - min(r.sent_s for r in records)


def summarize(
    records: Iterable[RequestRecord],
    warmup_s: float = 0.0,
    meta: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The ``summary.json`` of a run.

    Requests scheduled before ``warmup_s`` are left out. ``meta`` (git_sha, seed, trace_sha256, ...) is
    merged in, and a duration in it (``PLAYED``) is taken as it is. The run is ``valid`` when its dispatch lag
    was small, something was sent and it was not interrupted; ``invalid_reasons`` says what was wrong."""
    everything = sorted(records, key=lambda r: r.scheduled_s)
    counted = [r for r in everything if r.scheduled_s >= warmup_s]
    meta = meta or {}
    duration_s = meta.get(PLAYED) or run_duration_s(counted)
    # Later turns of a session wait for earlier answers, so only first turns have a planned time.
    lag = distribution_ms("lag", (r.lag_s for r in everything if r.turn == 0))
    sched_lag = {k.removesuffix("_lag_ms"): v for k, v in lag.items()}
    reasons = invalid_reasons(len(counted), any(r.error == "interrupted" for r in counted), sched_lag["p99"])
    return {
        "schema_version": SCHEMA_VERSION,
        **class_summary(counted, duration_s),
        "duration": round(duration_s, 6),
        "by_class": class_summaries(counted, duration_s),
        "sched_lag_ms": sched_lag,
        "errors": _error_counts(counted),
        "warmup_s": warmup_s,
        "warmup_requests": len(everything) - len(counted),
        "tokens_guessed": sum(r.ok and r.token_source != "usage" for r in counted),
        "valid": not reasons,
        "invalid_reasons": reasons,
        **meta,
    }


def _error_counts(records: Sequence[RequestRecord]) -> dict[str, int]:
    return dict(Counter(r.error for r in records if r.error is not None).most_common(20))
