"""Trace formats, fitting and errors."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from adaserve.slo.classes import SLOClass, SLOConfig, SLOLimits
from adaserve.slo.trace import Trace, TraceError, TraceRow, assign_classes, write_jsonl
from adaserve.slo.trace_formats import read_trace

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
)
BURST = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,Conversation log\n"
    "110.5,GPT-4,417,505,922,API log\n"
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}\n'
    '{"timestamp": 3000, "input_length": 10, "output_length": 5, "hash_ids": [46]}\n'
)
ARTIFACT = json.dumps(
    [
        {"emission_time_ms": t, "input_length": 8, "output_length": 256, "prompt": p, "slo_ratio": r}
        for t, p, r in ((0.0, "a b", -50.0), (250.5, "c", 0.9), (900.0, "d", -70.0), (950.0, "e", -150.0))
    ]
)


def read(tmp_path: Path, text: str, sort: bool = False) -> Trace:
    path = tmp_path / "trace"
    path.write_bytes(text.encode())
    return read_trace(path, sort=sort)


QUOTED = re.sub(r"[^,\r\n]+", r'"\g<0>"', AZURE)


@pytest.mark.parametrize("text", [AZURE + "\r\n", QUOTED])
def test_azure(text: str, tmp_path: Path) -> None:
    rows = read(tmp_path, text).rows
    assert [(r.prompt_tokens, r.output_tokens) for r in rows] == [(374, 44), (396, 109)]
    assert rows[1].arrival_s == pytest.approx(4.314579, abs=1e-6)


@pytest.mark.parametrize(
    "later", ["18:15:50+00:00", "18:15:50.000Z", "20:15:50.0000000+02:00", "13:15:50-05:00"]
)
def test_azure_without_fraction_and_with_zone(later: str, tmp_path: Path) -> None:
    text = AZURE.replace(".6805900", "").replace("2023-11-16 18:15:50.9951690", f"2023-11-16T{later}")
    assert read(tmp_path, text).rows[1].arrival_s == pytest.approx(4.0)


def test_burstgpt_leaves_out_failures(tmp_path: Path) -> None:
    trace = read(tmp_path, BURST)
    assert [r.arrival_s for r in trace.rows] == [0.0, 105.5]


def test_mooncake(tmp_path: Path) -> None:
    rows = read(tmp_path, MOONCAKE).rows
    assert rows[0].prompt_tokens == 6955 and rows[1].arrival_s == 3.0


def test_artifact(tmp_path: Path) -> None:
    rows = read(tmp_path, ARTIFACT).rows
    assert [r.slo_class for r in rows] == ["chat", "coding", "custom", "summarization"]
    _, coding, custom, _ = (row.slo(SLOConfig(), 0.03) for row in rows)
    assert coding.slo_class == "coding" and coding.tpot_s == pytest.approx(0.027), "its own, not its class's"
    assert custom.tpot_s == pytest.approx(0.070)
    assert rows[0].text == "a b"


def test_simplified_artifact(tmp_path: Path) -> None:
    row = {"arrival_s": 0.5, "prompt_tokens": 8, "output_tokens": 9, "category": "chat"}
    slos = ("x_baseline", 0.9), ("abs_ms", 70.0), (None, None)
    lines = [json.dumps(row | {"slo_kind": kind, "slo_value": value}) for kind, value in slos]
    tpots_s = [r.slo(SLOConfig(), 0.03).tpot_s for r in read(tmp_path, "\n".join(lines)).rows]
    assert tpots_s == pytest.approx([0.027, 0.070, 0.050])


def test_round_trip_and_gzip(tmp_path: Path) -> None:
    rows = (
        TraceRow(0.0, 5, 7, "coding", slo_x_baseline=1.2, session_id="s", text="hé"),
        TraceRow(1.5, 6, 8, "chat", slo_tpot_ms=50.0, slo_ttft_ms=900.0, prompt_id="p"),
    )
    path = tmp_path / "t.jsonl"
    write_jsonl(rows, path)
    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_trace(path).rows == read_trace(packed).rows == rows
    assert read_trace(path).sha256 == read_trace(packed).sha256


def test_what_was_served_is_not_limited_by_what_clients_may_ask_for() -> None:
    """A server's own log names the class and the milliseconds of every request."""
    limits = SLOLimits(own_ms=False, least_tpot_ms=20)
    config = SLOConfig(classes={"fast": SLOClass(name="fast", tpot_ms=5)}, limits=limits)
    slo = TraceRow(0.0, 1, 1, "fast", slo_tpot_ms=5.0, slo_ttft_ms=300.0).slo(config, None)
    assert (slo.slo_class, slo.tpot_s, slo.ttft_s) == ("fast", 0.005, 0.3)


def test_prompts_may_hold_the_line_separators_of_unicode(tmp_path: Path) -> None:
    """JSON lets them stand in a text as they are."""
    rows = (TraceRow(0.0, 1, 1, text="a\u2028b"), TraceRow(1.0, 1, 1, text="c\x85d\u2029"))
    write_jsonl(rows, tmp_path / "trace.jsonl")
    assert read_trace(tmp_path / "trace.jsonl").rows == rows
    assert len(read(tmp_path, MOONCAKE.replace("\n", "\r\n"))) == 2


def test_fitting() -> None:
    trace = Trace(tuple(TraceRow(float(t), 1, 1) for t in range(11)))
    assert trace.rps == pytest.approx(1.0)
    assert trace.at_rps(4.0).duration_s == pytest.approx(2.5)
    window = trace.window(3.0, 4.0)
    assert [r.arrival_s for r in window.rows] == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(TraceError, match="no rate to scale"):
        window.window(1.0, 1.0).at_rps(4.0)
    with pytest.raises(TraceError, match="positive number, not inf"):
        trace.at_rps(5e-324)


def test_mix_is_seeded_and_keeps_given_classes() -> None:
    rows = [TraceRow(float(t), 1, 1) for t in range(400)] + [TraceRow(500.0, 1, 1, "x")]
    first = assign_classes(rows, {"a": 3, "b": 1}, 7)
    assert first == assign_classes(rows, {"a": 3, "b": 1}, 7)
    assert first != assign_classes(rows, {"a": 3, "b": 1}, 8)
    assert 0.65 < sum(r.slo_class == "a" for r in first) / 400 < 0.85
    assert first[-1].slo_class == "x"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (MOONCAKE.replace("3000", "-5"), ":2: the timestamp is -0.005"),
        (MOONCAKE.replace('"timestamp": 0', '"timestamp": 9000'), ":2: timestamps go back"),
        (MOONCAKE.replace("6955", "0"), ":1: 'input_length' is 0"),
        (MOONCAKE.replace("6955", '"many"'), "expected a finite number"),
        (MOONCAKE.replace("3000", "NaN"), "expected a finite number"),
        (MOONCAKE + "{oops\n", ":3: not a JSON object"),
        (AZURE.replace("2023-11-16 18:15:50.9951690", "yesterday"), "'yesterday' is not a time"),
        (AZURE.replace(",109", ""), "2 columns where the header has 3"),
        ("hello\nworld\n", "not a known trace format"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no requests"),
        (ARTIFACT.replace('"slo_ratio"', '"x"'), "'slo_ratio' is missing"),
        (ARTIFACT.replace("a b", r"\ud83d"), r"\[0\]: text holds '\\ud83d', not a character of UTF-8"),
    ],
)
def test_errors_name_place_and_remedy(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=says):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("fmt", "text", "says"),
    [
        ("azure", AZURE.replace("TIMESTAMP", "Time"), ":2: 'timestamp' is missing: rename the column"),
        ("azure", "", "holds no requests"),
        ("csv", "x" * 200_000, "not a table"),
        ("adaserve", "5", "expected a JSON array, got int"),
    ],
)
def test_a_file_of_another_format_than_was_stated(fmt: str, text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(text)
    with pytest.raises(TraceError, match=says):
        read_trace(tmp_path / "trace", fmt)


def test_sorting_on_request(tmp_path: Path) -> None:
    text = MOONCAKE.replace('"timestamp": 0', '"timestamp": 9000')
    assert [r.arrival_s for r in read(tmp_path, text, sort=True).rows] == [3.0, 9.0]
