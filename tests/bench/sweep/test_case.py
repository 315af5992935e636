"""One case with the real load generator, against a server with known timing: to its end, and cut off."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from adaserve.bench.sweep.measure import Traffic, run_case
from adaserve.bench.sweep.plan import Case, Point
from adaserve.loadgen.errors import LoadgenError
from adaserve.slo.trace import TraceRow, write_jsonl
from tests.loadgen.fake_server import Fake, running_fake

CASE = Case(Point(0.5), "none", 0)
N = 8


def server(fake: Fake) -> Any:
    def report() -> dict[str, Any]:
        raise KeyError("adaserve")  # as SGLang without AdaServe

    return SimpleNamespace(url=fake.url, report=report)


def traffic(folder: Path, seconds: float = 1.0) -> Traffic:
    names = ("coding", "chat")
    slos = {"coding": 100.0, "chat": 1.0}
    rows = tuple(
        TraceRow(
            round(seconds * k / N, 6), 9, 21, slo_class=names[k % 2], text=f"prompt {k}",
            slo_tpot_ms=slos[names[k % 2]], slo_ttft_ms=10_000.0 if k % 2 == 0 else 1.0,
        )
        for k in range(N)
    )  # fmt: skip
    path = folder / "schedule.jsonl"
    write_jsonl(rows, path)
    return Traffic(path, rows, slos, 0.7, seconds, {"coding": 0, "chat": 1})


def when_sent(fake: Fake, n: int, act: Callable[[], None]) -> None:
    """Acts once, from another thread, when n requests have come."""

    def watch() -> None:
        while len(fake.log()) < n:
            time.sleep(0.1)
        act()

    threading.Thread(target=watch, daemon=True).start()


def press(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def test_a_case_is_what_its_clients_saw(tmp_path: Path) -> None:
    with running_fake(first_ms=50.0, token_ms=20.0) as fake:
        before = datetime.now(UTC)
        line, answers = run_case(server(fake), CASE, traffic(tmp_path), tmp_path / "work")
        sent = fake.log()
    assert line["status"] == "ok" and line["error"] is None and line["server"] is None
    began, ended = datetime.fromisoformat(line["started"]), datetime.now(UTC)
    assert isinstance(line["invalid_reasons"], list)
    assert began - before < ended - began, "and not when it was over"
    assert line["all"]["completed"] == N and line["all"]["total_output_tokens"] == 21 * N
    assert line["classes"]["coding"]["slo_attainment"] == 1.0, "20 ms per token, 100 allowed"
    assert line["classes"]["chat"]["slo_attainment"] == 0.0, "1 allowed"
    spans_s = [e["chunks"][-1][0] - e["chunks"][0][0] for e in sent]
    assert line["all"]["mean_tpot_ms"] == pytest.approx(1e3 * sum(spans_s) / N / 20, abs=1.0)
    assert {e["body"]["text"] for e in sent} == {f"prompt {k}" for k in range(N)}
    by_class = {e["headers"]["x-slo-class"]: e for e in sent}
    assert float(by_class["coding"]["headers"]["x-slo-tpot-ms"]) == 100.0
    assert float(by_class["chat"]["headers"]["x-slo-ttft-ms"]) == 1.0
    assert by_class["chat"]["body"]["priority"] == 1
    assert by_class["chat"]["body"]["sampling_params"]["temperature"] == 0.7
    assert all(e["body"]["sampling_params"]["ignore_eos"] for e in sent)
    assert len(answers) == N and {r.slo_ttft_ms for r in answers} == {10_000.0, 1.0}
    assert {a.slo_class: a.met_ttft for a in answers} == {"coding": True, "chat": False}
    assert line["all"]["slo_attainment_by_metric"] == {"ttft": 0.5, "tpot": 0.5}
    assert not (tmp_path / "work").exists(), "what is condensed is not kept twice"


def test_a_case_that_does_not_end_is_cut_off_and_its_requests_are_violations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Traffic, "limit_s", property(lambda _: 600.0))
    with running_fake(first_ms=50.0, token_ms=5000.0) as fake:
        when_sent(fake, N, lambda: press(signal.SIGALRM))  # as the limit's own timer does
        line, _ = run_case(server(fake), CASE, traffic(tmp_path), tmp_path / "work")
    assert line["status"] == "timeout" and "600 s" in line["error"]
    assert line["all"]["requests"] == N and line["all"]["attained"] == 0 == line["all"]["completed"]


def test_ctrl_c_before_anything_is_sent_is_no_result_either(tmp_path: Path) -> None:
    with running_fake() as fake, pytest.raises(KeyboardInterrupt):
        threading.Timer(0.3, press, (signal.SIGINT,)).start()  # Locust takes longer to start
        run_case(server(fake), CASE, traffic(tmp_path), tmp_path / "work")


def kill_locust() -> None:
    (locust,) = (c for c in psutil.Process().children() if "locust" in c.cmdline())
    locust.kill()


def test_a_load_generator_that_is_killed_gives_no_result(tmp_path: Path) -> None:
    with running_fake(first_ms=50.0, token_ms=5000.0) as fake:
        when_sent(fake, 1, kill_locust)
        with pytest.raises(LoadgenError, match="killed"):
            run_case(server(fake), CASE, traffic(tmp_path), tmp_path / "work")


def test_ctrl_c_is_no_result(tmp_path: Path) -> None:
    with running_fake(first_ms=50.0, token_ms=5000.0) as fake:
        when_sent(fake, 1, lambda: press(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            run_case(server(fake), CASE, traffic(tmp_path), tmp_path / "work")
