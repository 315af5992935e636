"""Where client and server judge the same requests otherwise, and what the report says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_report import folder, page_of

from adaserve.loadgen.comparison_table import comparison_rows
from adaserve.loadgen.report import group_runs
from adaserve.loadgen.run_folder import read_run
from adaserve.loadgen.server_comparison import compare
from adaserve.slo.run_summary import RequestRecord


def record(**values: Any) -> RequestRecord:
    defaults: dict[str, Any] = {
        "slo_class": "chat", "slo_ttft_ms": None, "slo_tpot_ms": 30.0, "scheduled_s": 0.5, "sent_s": 0.5,
        "first_token_s": 1.0, "last_token_s": 1.1, "output_tokens": 11,
    }  # fmt: skip
    made = RequestRecord(**(defaults | values))
    made.judge()
    return made


def told(record: RequestRecord, tpot_ms: float, met: bool, **more: float) -> RequestRecord:
    """The record with the server's verdict."""
    verdict = {"tpot_ms": tpot_ms, "tpot_slo_ms": record.slo_tpot_ms, "ttft_ms": 400.0, "ttft_slo_ms": None}
    record.server_slo = {**verdict, "met": met} | more
    record.judge()
    return record


def test_client_and_server_are_compared(tmp_path: Path) -> None:
    """The report shows both counts, and which requests may explain a difference."""
    records = [
        record(id="0", last_token_s=1.0 + 10 * 0.0299),  # 29.9 ms against 30: close
        record(id="1", last_token_s=1.0 + 10 * 0.010),
        record(id="2", error="connection closed before the end of the answer"),
        record(id="3", last_token_s=1.0 + 10 * 0.050),
    ]
    server = {"chat": {"all": {"requests": 3, "attainment": 0.333333}}}
    learning = {"chat": {"present": 1.5, "first": 1.2}, "chat2": {"present": "x"}}
    run = read_run(folder(tmp_path / "run", records, server=server, learning=learning))
    (row,) = comparison_rows(run)
    assert (row["client"], row["client_n"], row["server_n"]) == (0.5, 4, 3)
    assert row["points"] == pytest.approx(16.7, abs=0.1)
    assert row["why"] == (
        "1 within 5% of their SLO; 1 failed at the client; "
        "1 never counted by the server: turned away or aborted"
    )
    page = page_of([run], tmp_path)
    assert "Client and server" in page and "+16.7" in page and "1 within 5% of their SLO" in page
    assert page.count("Draft that learns") == 1 and "+25.0%" in page


def test_requests_that_are_judged_differently_are_listed_with_the_reason() -> None:
    tpot = 30.3 / 1e3  # the client's; the SLO is 30
    records = [
        told(record(id="late", last_token_s=1.0 + 10 * tpot), 29.8, True),
        told(record(id="slo", last_token_s=1.0 + 10 * tpot), 30.2, True, tpot_slo_ms=40.0),
        told(record(id="chunk", last_token_s=1.0 + 7 * tpot, first_chunk_tokens=4), 29.0, True),
        told(record(id="lost", error="connection closed before the end of the answer"), 20.0, True),
        told(record(id="ttft", slo_ttft_ms=450.0), 10.0, True, ttft_slo_ms=450.0),
        told(record(id="agreed", last_token_s=1.0 + 10 * tpot), 30.2, False),
        told(record(id="fast", last_token_s=1.1), 10.0, True),
        record(id="no verdict"),
    ]
    verdicts = compare(records)
    why = {f.id: f.why for f in verdicts.flips}
    assert why == {
        "late": "10 tokens were made in 298.0 ms and arrived in 303.0 ms",
        "slo": "the server judged it by an SLO of 40 ms",
        "chunk": "its first chunk held 4 tokens: the client measures the other 7 (212 ms), "
        "the server all after the first (290 ms)",
        "lost": "it failed on its way to the client: connection closed before the end of the answer",
        "ttft": "+100.0 ms on the way to the server's HTTP process, and from its first token back",
    }
    flips = {f.id: f for f in verdicts.flips}
    assert (flips["ttft"].objective, flips["ttft"].client_ms, flips["ttft"].server_ms) == (
        "TTFT",
        500.0,
        400.0,
    )
    assert (flips["late"].client_ms, flips["late"].server_ms) == (pytest.approx(30.3), 29.8)
    assert not flips["late"].client_met and flips["late"].server_met
    assert (verdicts.told, verdicts.met, verdicts.attainment) == (7, 6, 6 / 7)
    assert verdicts.gap is not None and verdicts.gap[2] > 0.015
    assert verdicts.undecided >= 2  # "late" and "agreed" lie nearer to 30 ms than the clocks differ
    assert verdicts.ttft_gap_ms is not None and verdicts.ttft_gap_ms[1] == pytest.approx(100.0)
    near, far = (told(record(id="x", slo_ttft_ms=slo), 10.0, True, ttft_slo_ms=slo) for slo in (480.0, 550.0))
    assert [compare([r]).undecided for r in (near, far)] == [1, 0]


def test_an_slo_that_only_the_server_has_is_the_reason_why_it_judged_otherwise() -> None:
    """As with --slo-headers class, where it goes by its own classes."""
    one = told(record(id="x", last_token_s=1.1), 10.0, False, ttft_ms=400.0, ttft_slo_ms=300.0)
    assert one.slo_ttft_ms is None and one.attained
    (flip,) = compare([one]).flips
    assert (flip.objective, flip.slo_ms, flip.server_ms) == ("TTFT", 300.0, 400.0)
    assert flip.why == "the server judged it by an SLO of 300 ms"


def test_seeds_need_not_have_the_same_classes(tmp_path: Path) -> None:
    runs = [
        read_run(folder(tmp_path / f"priced-seed{k}", [told(record(id="1", slo_class=name), 10.0, True)]))
        for k, name in enumerate(("chat", "coding"))
    ]
    page = page_of(runs, tmp_path)
    assert "priced: 2 seeds" in page and "Of priced-seed0, the first of 2 runs." in page
    alone = page_of(runs[:1], tmp_path)
    assert "the first of" not in alone and "all requests except those that their client ended" in alone


def test_the_report_lists_them(tmp_path: Path) -> None:
    records = [told(record(id="late7", last_token_s=1.303), 29.8, True), told(record(id="1"), 10.0, True)]
    records += [told(record(id=f"c{k}", slo_class="coding"), 10.0, True) for k in range(2)]
    server = {name: {"all": {"requests": 2, "attainment": 1.0}} for name in ("chat", "coding")}
    run = read_run(folder(tmp_path / "run", records, server=server))
    rows = {r["name"]: r for r in comparison_rows(run)}
    told_of = {n: (r["points"], r["flips"], r["told"]) for n, r in rows.items()}
    assert told_of == {"chat": (-50.0, 1, 2), "coding": (0.0, 0, 2), "all": (-25.0, 1, 4)}
    (group,) = group_runs([run])
    assert (group.mean("requests"), group.mean("requests", "chat")) == (4, 2)
    assert (group.met("tpot"), group.met("tpot", "chat")) == (0.75, 0.5)
    assert group.error("mean_tpot_ms") is None, "of one run"
    page = page_of([run], tmp_path)
    assert "judged differently" in page and "<td>late7</td>" in page
    assert "10 tokens were made in 298.0 ms and arrived in 303.0 ms" in page
