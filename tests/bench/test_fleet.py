"""What ``adaserve bench fleet`` makes of its samples; real replicas are in tests/clients/test_fleet.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaserve.bench.fleet.run import Predictions, Ranking, counted, forget_beginning, load_rows, summary_text
from adaserve.slo.run_summary import RequestRecord
from adaserve.slo.trace import Trace, TraceRow


def record(predicted_ms: float | None, tpot_ms: float | None, error: str | None = None) -> RequestRecord:
    made = RequestRecord("r", "chat", None, 40.0, 0.0, 0.0, error=error)
    made.server_slo = {"tpot_predicted_ms": predicted_ms, "tpot_ms": tpot_ms, "met": True}
    return made


def test_predictions_are_compared_with_what_the_server_delivered() -> None:
    records = [record(20, 20), record(23, 20), record(24, 20), record(10, 20)]
    found = Predictions.of(records)
    assert (found.requests, found.close, found.close_25) == (4, 0.5, 0.75)
    assert found.median_error == pytest.approx(0.075)


def test_answers_that_say_nothing_are_left_out() -> None:
    silent = RequestRecord("r", "chat", None, 40.0, 0.0, 0.0)
    records = [silent, record(None, 20), record(20, None), record(20, 20, error="http_500")]
    assert Predictions.of(records).requests == 0


def test_a_tie_is_no_right_answer() -> None:
    ranking = counted([(1.0, 2.0), (2.0, 2.0), (3.0, 2.0), (1.0, 3.0)])
    assert ranking == Ranking(samples=4, right=2, ties=1)
    assert ranking.share == 0.5 and counted([]).share == 0.0


def test_the_summary_says_how_far_simulation_and_measurement_are_apart() -> None:
    told = {"requests": 10, "close": 0.8, "close_25": 0.9, "median_error": -0.02}
    result = {
        "headroom": {"samples": 20, "ties": 1, "share": 0.95},
        "predictions": {"all": told},
        "capacity": {"measured": 0.9, "simulated": {1: 0.5, 2: 0.93}},
        "other_programs": 0.1,
        "invalid_reasons": ["requests left late"],
    }
    text = summary_text(result, 2)
    assert text.endswith("\nthis run is not valid: requests left late")
    assert "95.0% of 20 samples (1 ties)" in text and "80.0% of 10 requests" in text and "+3.0 points" in text


@pytest.mark.parametrize("cut", [6, 9])  # the end of a line, and the middle of one
def test_a_recording_without_its_beginning_has_whole_lines_of_the_rest(tmp_path: Path, cut: int) -> None:
    recording = tmp_path / "iterations.jsonl"
    recording.write_text("first\nsecond\nthird\n")
    forget_beginning(recording, cut)
    assert recording.read_text() == "third\n"


def test_measured_and_simulated_are_the_same_requests() -> None:
    """The load test asks the server a few things before it begins; replicas record these as well."""
    asked = [TraceRow(float(k), 1, 1, "chat") for k in range(3)]
    sent = [TraceRow(100.0 + k, 7, 7, "chat") for k in range(5)]
    records = [RequestRecord("r", "chat", None, 40.0, float(k), float(k)) for k in range(5)]
    trace, warm_up = load_rows(Trace((*asked, *sent), "t"), records, warmup_s=2.0)
    assert [row.prompt_tokens for row in trace.rows] == [7] * 5 and warm_up == 2
    assert [row.arrival_s for row in trace.rows] == [0.0, 1.0, 2.0, 3.0, 4.0]
    records[3].error = "HTTP 503"  # of what was turned away a replica records nothing
    trace, warm_up = load_rows(Trace((*asked, *sent[:3], sent[4]), "t"), records, warmup_s=2.0)
    assert len(trace) == 4 and warm_up == 2
