"""TTFT, TPOT, attainment, goodput and the summary of a run, on numbers worked out by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from adaserve.slo.run_summary import RequestRecord, attainment_stderr, read_records, summarize


def record(number: int = 0, **values: Any) -> RequestRecord:
    """10 tokens after a first one at 0.1 s, 20 ms each, unless told otherwise."""
    at = float(values.pop("at", number))
    defaults: dict[str, Any] = {
        "slo_class": "chat",
        "slo_ttft_ms": None,
        "slo_tpot_ms": 25.0,
        "scheduled_s": at,
        "sent_s": at,
        "first_token_s": at + 0.1,
        "last_token_s": at + 0.3,
        "output_tokens": 11,
        "finish_reason": "length",
    }
    r = RequestRecord(str(number), **(defaults | values))
    r.judge()
    return r


def test_tpot_counts_tokens_not_chunks() -> None:
    assert record(n_chunks=3).tpot_s == pytest.approx(0.020)


def test_tokens_of_the_first_chunk_are_subtracted() -> None:
    assert record(first_chunk_tokens=3).tpot_s == pytest.approx(0.2 / 8)


def test_one_token_has_no_tpot_and_meets_any() -> None:
    r = record(output_tokens=1, last_token_s=0.1)
    assert r.tpot_s is None and r.met_tpot


@pytest.mark.parametrize(("slo", "met"), [(20.0, True), (19.99, False), (None, True)])
def test_slo_is_inclusive(slo: float | None, met: bool) -> None:
    assert record(slo_tpot_ms=slo).met_tpot is met


def test_failures_are_misses_and_hang_ups_are_neither() -> None:
    rs = [
        record(0),
        record(1, error="HTTP 500"),
        record(2, error="client_disconnect"),
        record(3, slo_tpot_ms=1.0),
    ]
    s = summarize(rs)
    assert (s["requests"], s["failed"], s["disconnected"], s["attained"]) == (3, 1, 1, 1)
    assert s["slo_attainment"] == pytest.approx(1 / 3, abs=1e-6)
    assert not rs[1].met_ttft and not rs[1].met_tpot


def test_goodput_counts_only_what_attained() -> None:
    s = summarize([record(0), record(1, slo_tpot_ms=1.0), record(2)])
    assert s["duration"] == pytest.approx(2.3)
    assert s["token_goodput"] == pytest.approx(22 / 2.3, abs=1e-4)
    assert s["output_throughput"] == pytest.approx(33 / 2.3, abs=1e-4)
    assert s["request_goodput"] == pytest.approx(2 / 2.3, abs=1e-4)
    assert s["mean_e2el_ms"] == pytest.approx(300)
    assert s["tpot_ratio_p50"] == pytest.approx(20 / 25) and 19 < s["tpot_ratio_p99"] < 20


def test_a_ttft_miss_is_a_miss() -> None:
    s = summarize([record(0, slo_ttft_ms=99.0), record(1, slo_ttft_ms=101.0)])
    assert s["slo_attainment"] == 0.5
    assert s["slo_attainment_by_metric"] == {"ttft": 0.5, "tpot": 1.0}


def test_each_objective_is_judged_by_those_who_have_it() -> None:
    """A class without TTFT SLOs would show that all were met."""
    late = record(0, slo_ttft_ms=99.0)
    assert summarize([late, record(1)])["slo_attainment_by_metric"] == {"ttft": 0.0, "tpot": 1.0}
    free = summarize([record(0, slo_tpot_ms=None)])
    assert free["slo_attainment_by_metric"] == {"ttft": None, "tpot": None}


def test_lag_makes_a_run_invalid() -> None:
    late = [record(k, sent_s=k + 0.02) for k in range(10)]
    s = summarize(late)
    assert not s["valid"] and "20.0 ms" in s["invalid_reasons"][0]
    assert summarize([record(k, sent_s=k + 0.005) for k in range(10)])["valid"]


def test_warmup_is_left_out() -> None:
    s = summarize([record(k) for k in range(10)], warmup_s=4.0)
    assert (s["requests"], s["warmup_requests"]) == (6, 4)


def test_records_survive_json_and_a_cut_file() -> None:
    rs = [record(0, itl_ms=[20.0, 1.5]), record(1, error="x", first_token_s=None, last_token_s=None)]
    lines = [r.to_json() for r in rs]
    newer = lines[0][:-1] + ', "later": 1}'
    for written in ([newer, lines[1]], [*lines, lines[0][:30]]):
        assert [r.to_json() for r in read_records(written)] == lines
    assert json.loads(lines[0])["met_tpot"] is True


def test_standard_error_is_never_zero() -> None:
    assert attainment_stderr(50, 100) == pytest.approx(0.05, rel=0.02)
    assert attainment_stderr(100, 100) == pytest.approx(0.005, rel=0.1)
    assert attainment_stderr(1, 1) == 0.25
    assert attainment_stderr(0, 0) is None


def test_schema_keys() -> None:
    s = summarize([record(0, accept_length=2.0)], meta={"seed": 1})
    wanted = [
        "duration",
        "completed",
        "total_input_tokens",
        "total_output_tokens",
        "request_throughput",
        "output_throughput",
        "mean_ttft_ms",
        "median_ttft_ms",
        "p90_tpot_ms",
        "p95_tpot_ms",
        "p99_itl_ms",
        "request_goodput",
        "slo_attainment",
        "slo_attainment_by_metric",
        "accept_length",
        "by_class",
        "sched_lag_ms",
        "schema_version",
        "seed",
        "valid",
    ]
    assert not set(wanted) - set(s)
    json.dumps(s)
