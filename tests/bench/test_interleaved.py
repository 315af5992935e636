"""Two settings in turns on one schedule: nobody's requests are counted for the other, none is lost."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from adaserve.bench import interleaved
from adaserve.bench.demo import PLAIN, TEMPERATURE, _caption, _traffic
from adaserve.bench.interleaved import Interleaved, cut
from adaserve.loadgen.arrivals import Arrivals
from adaserve.loadgen.bench import run_bench
from adaserve.loadgen.config import BenchConfig, ClassLoad, Endpoint, Length
from adaserve.loadgen.results import iter_records, provenance
from adaserve.loadgen.run_folder import read_run
from adaserve.loadgen.schedule import build_schedule
from tests.loadgen.fake_server import running_fake


def _steady(url: str, *, rps: float, duration_s: float) -> BenchConfig:
    """Requests of one class, evenly spaced."""
    return BenchConfig(
        server=Endpoint(url=url, api="generate"),
        classes={"chat": ClassLoad(name="chat", tpot_ms=50.0, output_tokens=Length(median=8))},
        arrivals=Arrivals(kind="constant", rps=rps),
        duration_s=duration_s,
    )


@pytest.mark.parametrize(("seconds", "count"), [(5.0, 2), (20.0, 2), (60.0, 6), (61.0, 6), (120.0, 12)])
def test_turns_are_even_in_number_and_of_some_seconds(seconds: float, count: int) -> None:
    at_s = [seconds * k / 100 for k in range(100)]
    slices = cut(at_s, seconds)
    assert len(slices) == count and count % 2 == 0
    assert [s.first for s in slices[1:]] == [s.last for s in slices[:-1]]
    assert (slices[0].first, slices[-1].last) == (0, 100)
    assert all(s.start_s <= at_s[k] < s.start_s + s.seconds for s in slices for k in range(s.first, s.last))


def test_a_slice_without_requests_is_no_turn() -> None:
    assert [(s.first, s.last) for s in cut([1.0, 2.0, 55.0], 60.0)] == [(0, 2), (2, 3)]


def test_every_request_is_served_once_under_each_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[str] = []
    made = provenance()
    monkeypatch.setattr(interleaved, "provenance", lambda: {**made, "played_before": len(played)})
    taken_s = {"fast": 0.0, "slow": 0.0}

    def timed(*given: Any, **more: Any) -> dict[str, Any]:
        summary = run_bench(*given, **more)
        last_s = max(r.end_s for r in iter_records(given[1]) if r.end_s)
        taken_s[played[-1]] += max(given[0].duration_s, last_s)
        return summary

    monkeypatch.setattr(interleaved, "run_bench", timed)
    with running_fake() as fake:

        def switch(name: str, token_ms: float) -> None:
            played.append(name)
            fake.set(token_ms=token_ms)

        server: Any = SimpleNamespace(url=fake.url, drain=lambda: None)
        config = _steady(fake.url, rps=3.0, duration_s=5.0)
        settings = {"fast": partial(switch, "fast", 2.0), "slow": partial(switch, "slow", 100.0)}
        summaries = Interleaved(server, settings, config, tmp_path).play(Console(quiet=True))
    assert played == ["fast", "slow", "fast", "slow", "slow", "fast"], (
        "both warm up, then turns in changing order"
    )
    planned = build_schedule(config).requests
    for name, attained in (("fast", 1.0), ("slow", 0.0)):
        summary = summaries[name]
        assert summary["slo_attainment"] == attained and summary["requests"] == len(planned) == 15
        records = sorted(iter_records(tmp_path / name), key=lambda r: int(r.id))
        assert [int(r.id) for r in records] == [r.index for r in planned]
        assert [r.scheduled_s for r in records] == pytest.approx([r.at_s for r in planned], abs=1e-5)
        assert all(r.first_token_s is not None and r.first_token_s > r.scheduled_s for r in records)
        run = read_run(tmp_path / name)
        assert run.summary["unsent"] == run.env["played_before"] == 0, "time and commit are of the start"
        for told in (
            summary,
            run.summary,
        ):  # of table and page: no slice begins before the answers of the last
            assert told["duration"] == pytest.approx(taken_s[name], abs=1e-5)
            assert told["output_throughput"] == pytest.approx(8 * 15 / taken_s[name], abs=1e-3)
            assert told["by_class"]["chat"]["token_goodput"] == told["output_throughput"] * attained
    assert {p.name for p in tmp_path.iterdir()} == {"fast", "slow", "schedule.jsonl"}


def test_what_went_wrong_in_one_turn_is_not_said_of_all(tmp_path: Path) -> None:
    with running_fake() as fake:
        cut_after = iter((0, 1, 0))  # while it warms up, and in two turns
        server: Any = SimpleNamespace(url=fake.url, drain=lambda: None)
        config = _steady(fake.url, rps=2.0, duration_s=4.0)
        settings = {"one": lambda: fake.set(drop_after=next(cut_after))}
        summary = Interleaved(server, settings, config, tmp_path).play(Console(quiet=True))["one"]
    assert (summary["requests"], summary["failed"], summary["valid"]) == (8, 4, False)
    assert "turn 1: all 4 requests failed" in summary["invalid_reasons"]
    assert "all 4 requests failed" not in summary["invalid_reasons"]


@pytest.mark.parametrize(("share", "says"), [(0.02, "Other programs used 2%"), (0.5, "This host was busy")])
def test_a_busy_host_is_named_in_the_table(share: float, says: str) -> None:
    summaries = {n: {"turns": 6, "other_programs": share} for n in ("priced", PLAIN)}
    assert says in _caption(json.loads(json.dumps(summaries)))


def test_the_demo_decodes_nothing_greedily() -> None:
    """Greedy text of the embedded pair repeats itself, which would flatter drafts."""
    server: Any = SimpleNamespace(url="http://127.0.0.1:1", report=lambda: {"baseline_ms": 10.0})
    planned = build_schedule(_traffic(server, 30.0, 2.0)).requests
    assert {r.slo_class for r in planned} == {"chat", "coding", "summarization"}
    assert {r.temperature for r in planned} == {TEMPERATURE} and TEMPERATURE > 0.5
