"""Client-side times against the times at which a fake server really sent each chunk."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fake_server import Fake, running_fake

from adaserve.loadgen.arrivals import Arrivals
from adaserve.loadgen.bench import class_cells, run_bench
from adaserve.loadgen.config import BenchConfig, ClassLoad, Endpoint, Length
from adaserve.loadgen.report import write_report
from adaserve.loadgen.results import iter_records
from adaserve.loadgen.run_folder import read_run
from adaserve.slo.run_summary import NEVER_SENT, RequestRecord


def load(
    fake: Fake,
    out: Path,
    rps: float,
    duration_s: float,
    tokens: int,
    *,
    processes: int = 1,
    slo_ms: float = 1000.0,
    api: str = "completions",
    **class_settings: Any,
) -> list[RequestRecord]:
    """Runs the load generator against the fake and returns its records."""
    one = ClassLoad(
        name="chat",
        tpot_ms=slo_ms,
        prompt_tokens=Length(median=20),
        output_tokens=Length(median=tokens),
        **class_settings,
    )
    config = BenchConfig(
        server=Endpoint(url=fake.url, model="fake", api=api, continuous_usage=True),
        classes={"chat": one},
        arrivals=Arrivals(kind="constant", rps=rps),
        duration_s=duration_s,
    )
    run_bench(config, out, processes, checked=True)
    return list(iter_records(out))


def errors(records: list[RequestRecord], log: list[dict[str, Any]]) -> list[str]:
    """Requests whose TTFT or TPOT is off by more than 2 ms and 2%."""
    truth = {e["id"].removeprefix("bench-"): e for e in log}
    wrong = []
    for r in records:
        chunks = truth[r.id]["chunks"]
        (first_s, first_n), (last_s, n) = chunks[0], chunks[-1]
        true_ttft = first_s - truth[r.id]["received"]
        true_tpot = (last_s - first_s) / (n - first_n) if n > first_n else None
        assert r.ttft_s is not None, r.error
        if abs(r.ttft_s - true_ttft) > max(2e-3, 0.02 * true_ttft):
            wrong.append(f"TTFT {r.ttft_s * 1e3:.2f} ms, truly {true_ttft * 1e3:.2f}")
        if true_tpot is None or r.tpot_s is None:
            if true_tpot != r.tpot_s:
                wrong.append(f"TPOT {r.tpot_s}, truly {true_tpot}")
        elif abs(r.tpot_s - true_tpot) > max(2e-3, 0.02 * true_tpot):
            wrong.append(f"TPOT {r.tpot_s * 1e3:.2f} ms, truly {true_tpot * 1e3:.2f}")
    return wrong


BUSY = os.environ.get("ADASERVE_QUIET") != "1"
"""Whether other work may run beside the tests; with ``ADASERVE_QUIET=1`` everything is judged."""


def assert_faithful(records: list[RequestRecord], log: list[dict[str, Any]]) -> None:
    """TPOT must always be right: it is a mean over a stream. On a busy machine both processes are
    woken up late, which delays single first tokens: there, only a part of them is asked for."""
    wrong = errors(records, log)
    late = [w for w in wrong if w.startswith("TTFT")]
    assert len(wrong) - len(late) <= max(1, 0.05 * len(records)), wrong[:5]
    if not BUSY:
        assert len(late) <= max(1, 0.05 * len(records)), late[:5]


CASES = {
    # name: (behavior, requests/s, seconds, tokens)
    "1 ms, one stream": ({"token_ms": 1}, 4, 2, 200),
    "20 ms, 40 streams": ({"token_ms": 20}, 40, 3, 50),
    "several tokens per chunk": ({"token_ms": 5, "per_chunk": 4}, 20, 1.5, 81),
    "several tokens in the first chunk": ({"token_ms": 20, "per_chunk": 3, "first_chunk": 5}, 20, 1.5, 35),
    "slow first token": ({"token_ms": 5, "first_ms": 1500}, 10, 1.5, 30),
    "everything in one chunk": ({"first_chunk": 64, "per_chunk": 64}, 10, 1, 64),
}


@pytest.mark.parametrize("case", CASES)
def test_times_match_what_the_server_did(case: str, tmp_path: Path) -> None:
    behavior, rps, duration_s, tokens = CASES[case]
    with running_fake(**behavior) as fake:
        records = load(fake, tmp_path / "run", rps, duration_s, tokens)
        log = fake.log()
    assert len(records) == len(log) >= duration_s * rps - 1
    assert all(r.ok and r.output_tokens == tokens for r in records)
    assert_faithful(records, log)


@pytest.mark.quiet
@pytest.mark.skipif(BUSY, reason="needs a quiet machine: ADASERVE_QUIET=1")
@pytest.mark.parametrize(("token_ms", "rps", "seconds", "tokens"), [(100, 100, 3.5, 60), (20, 85, 5, 160)])
def test_256_concurrent_streams(
    token_ms: int, rps: float, seconds: float, tokens: int, tmp_path: Path
) -> None:
    with running_fake(token_ms=token_ms, first_ms=100) as fake:
        records = load(fake, tmp_path / "run", rps, seconds, tokens)
        log, peak = fake.log(), fake.state()["max_open"]
    assert peak >= 256
    assert_faithful(records, log)


@pytest.mark.parametrize("api", ["chat", "generate"])
def test_other_apis(api: str, tmp_path: Path) -> None:
    with running_fake(token_ms=10, per_chunk=2) as fake:
        records = load(fake, tmp_path / "run", 20, 1, 31, api=api)
        assert_faithful(records, fake.log())
    assert all(r.output_tokens == 31 and r.finish_reason == "length" for r in records)
    assert all((r.accept_length is not None) == (api == "generate") for r in records)


@pytest.mark.parametrize("lie", [{"usage_factor": 0.5}, {"late_header_ms": 30}], ids=str)
def test_a_fake_that_lies_is_found_out(lie: dict[str, float], tmp_path: Path) -> None:
    with running_fake(token_ms=20, **lie) as fake:
        records = load(fake, tmp_path / "run", 20, 1, 40)
        log = fake.log()
    assert len(errors(records, log)) > 0.9 * len(records)


def test_failures_are_misses(tmp_path: Path) -> None:
    with running_fake(token_ms=5, error_after=10) as fake:
        broken = load(fake, tmp_path / "error", 10, 1, 30)
        fake.set(token_ms=5, drop_after=10)
        dropped = load(fake, tmp_path / "drop", 10, 1, 30)
        fake.set(status=503)
        refused = load(fake, tmp_path / "refuse", 10, 1, 30)
    assert {r.error for r in broken} == {"the fake broke"}
    assert {r.error for r in dropped} == {"connection closed before the end of the answer"}
    assert {r.error for r in refused} == {"HTTP 503: the fake was told to refuse"}
    assert not any(r.attained for r in broken + dropped + refused)


def test_a_dead_server_is_no_dispatch_lag(tmp_path: Path) -> None:
    with running_fake() as fake:
        pass
    records = load(fake, tmp_path / "run", 20, 1, 10)
    assert len(records) == 20
    assert {r.error for r in records} == {"ConnectionRefusedError: Connection refused"}
    assert not any(r.attained for r in records)
    assert all(r.lag_s >= -1e-6 and r.end_s is not None and r.end_s >= r.sent_s for r in records)


def test_no_usage_is_said(tmp_path: Path) -> None:
    with running_fake(token_ms=5, no_usage=True) as fake:
        lengths = {"prompt_tokens": Length(median=9), "output_tokens": Length(median=12)}
        one = ClassLoad(name="chat", tpot_ms=50, **lengths)
        config = BenchConfig(
            server=Endpoint(url=fake.url, model="fake", continuous_usage=False),
            classes={"chat": one},
            arrivals=Arrivals(kind="constant", rps=5),
            duration_s=1,
        )
        summary = run_bench(config, tmp_path / "run", checked=True)
    assert summary["tokens_guessed"] == 5
    assert summary["total_output_tokens"] == 60


@pytest.mark.quiet
@pytest.mark.skipif(BUSY, reason="needs a quiet machine: ADASERVE_QUIET=1")
def test_dispatch_lag_at_200_per_second(tmp_path: Path) -> None:
    with running_fake(token_ms=10) as fake:
        records = load(fake, tmp_path / "run", 200, 10, 8)
    lags = sorted(r.lag_s for r in records)
    assert len(lags) == 2000
    assert lags[int(0.99 * len(lags))] < 0.010


@pytest.fixture
def no_usual_port() -> Iterator[None]:
    """Somebody listens where Locust's processes usually meet, as another run does."""
    with ExitStack() as stack:
        with suppress(OSError):  # then somebody does already
            stack.enter_context(socket.create_server(("", 5557)))
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("no_usual_port")
def test_distributed_runs_send_the_same_schedule(tmp_path: Path) -> None:
    with running_fake(token_ms=5) as fake:
        alone = load(fake, tmp_path / "one", 20, 2, 20)
        bodies = [e["body"] for e in sorted(fake.log(), key=lambda e: int(e["id"][6:]))]
        fake.set(token_ms=5)
        shared = load(fake, tmp_path / "two", 20, 2, 20, processes=2)
        shared_bodies = [e["body"] for e in sorted(fake.log(), key=lambda e: int(e["id"][6:]))]
        fake.set(token_ms=5)
        assert len(load(fake, tmp_path / "few", 1, 1, 5, processes=2)) == 1, "one worker has nothing to send"
    assert {r.id for r in alone} == {r.id for r in shared}
    assert {r.worker for r in shared} == {0, 1}
    assert bodies == shared_bodies
    for folder in ("one", "two"):
        summary = json.loads((tmp_path / folder / "summary.json").read_text())
        assert 0 <= summary["read_lag_ms"]["median"] <= summary["read_lag_ms"]["p99"]
    by_id = {r.id: r for r in alone}
    assert all(abs(r.scheduled_s - by_id[r.id].scheduled_s) < 1e-6 for r in shared)


def test_sessions_and_disconnects(tmp_path: Path) -> None:
    with running_fake(token_ms=5) as fake:
        records = load(fake, tmp_path / "turns", 10, 1, 20, turns=3, think_s=0.1)
        log = {e["id"]: e for e in fake.log()}
        fake.set(token_ms=20)
        cut = load(fake, tmp_path / "cut", 20, 1, 40, disconnect=1.0)
        lost = fake.state()["lost"]
    assert len(records) == 30
    sessions: dict[str | None, list[RequestRecord]] = {}
    for r in records:
        sessions.setdefault(r.session_id, []).append(r)
    for turns in sessions.values():
        turns.sort(key=lambda r: r.turn)
        assert [r.turn for r in turns] == [0, 1, 2]
        for before, after in pairwise(turns):
            assert before.last_token_s is not None
            assert after.sent_s >= before.last_token_s + 0.1 - 1e-3
            prompt = log[f"bench-{after.id}"]["body"]["prompt"]
            assert log[f"bench-{before.id}"]["body"]["prompt"] in prompt and "tok tok" in prompt
    assert all(r.error == "client_disconnect" and not r.judged for r in cut)
    assert not any(r.error == NEVER_SENT for r in records)
    assert lost >= 0.8 * len(cut)


def test_turns_that_a_failure_keeps_from_being_sent_are_misses(tmp_path: Path) -> None:
    """Else a server that turns conversations away would be judged by those that it takes."""
    with running_fake(status=503) as fake:
        records = load(fake, tmp_path / "run", 10, 1, 20, turns=3, think_s=0.1)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    told = (summary["requests"], summary["failed"], summary["never_sent"], summary["unsent"])
    assert len(records) == 30 and told == (30, 30, 20, 0)
    assert summary["slo_attainment"] == 0.0 and summary["errors"][NEVER_SENT] == 20
    by_turn = {turn: {r.error for r in records if r.turn == turn} for turn in range(3)}
    assert by_turn[1] == by_turn[2] == {NEVER_SENT} and NEVER_SENT not in by_turn[0]
    assert class_cells(summary)[0] == "30 (30 failed,\n20 never sent)"
    write_report([read_run(tmp_path / "run")], tmp_path, png=False)
    assert "never sent" in (tmp_path / "report.html").read_text()


def test_a_client_that_hangs_up_wants_no_more_turns(tmp_path: Path) -> None:
    with running_fake(token_ms=5) as fake:
        records = load(fake, tmp_path / "run", 10, 1, 40, turns=3, disconnect=1.0)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert {r.error for r in records} == {"client_disconnect"} and {r.turn for r in records} == {0}
    assert (summary["requests"], summary["never_sent"], summary["unsent"]) == (0, 0, 20)
