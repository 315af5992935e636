"""``bench serve`` and ``report`` as a person uses them."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from fake_server import Fake, running_fake
from rich.console import Console
from typer.main import get_command

import adaserve
from adaserve.cli import app
from adaserve.loadgen import bench as bench_module
from adaserve.loadgen.agreement import agreement_rows
from adaserve.loadgen.bench import run_bench, why_not_loaded
from adaserve.loadgen.config import BenchConfig, Endpoint, from_mapping
from adaserve.loadgen.errors import LoadgenError
from adaserve.loadgen.preflight import preflight
from adaserve.loadgen.protocol import MAX_COUNT, NOT_UNDERSTOOD, body, parse_event, slo_headers
from adaserve.loadgen.report import build_charts, group_runs, write_report
from adaserve.loadgen.results import iter_records, make_results_dir
from adaserve.loadgen.run_folder import default_label, read_run
from adaserve.loadgen.schedule import PlannedRequest, build_schedule
from adaserve.loadgen.verdicts import compare
from adaserve.slo.classes import SLOConfig
from adaserve.slo.metrics import RequestRecord
from adaserve.slo.resolve import resolve
from adaserve.slo.trace import TraceRow, write_jsonl

ALONE_AND_DISTRIBUTED = pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "adaserve", *args]


def run(*args: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*args), check=False, capture_output=True, text=True, timeout=300, **more)


def bench(fake: Fake, out: Path, *args: str) -> subprocess.CompletedProcess[str]:
    fixed = ("--output-tokens", "10", "--baseline-ms", "20", "--out", str(out))
    return run("bench", "serve", "--url", fake.url, *fixed, *args)


def test_bench_then_report(tmp_path: Path) -> None:
    out = tmp_path / "rps=8"  # a folder may look as if it gave a name
    with running_fake(token_ms=10) as fake:
        done = bench(fake, out, "--duration", "1", "--rps", "24", "--seed", "3")
        again = bench(fake, out, "--duration", "3")
    assert done.returncode in (0, 4), done.stderr  # 4: a busy machine made the run invalid
    assert "coding" in done.stdout and "all" in done.stdout
    summary = json.loads((out / "summary.json").read_text())
    assert summary["seed"] == 3 and summary["planned_requests"] == summary["requests"] > 5
    assert "bench serve" in summary["command"] and "--seed 3" in summary["command"]
    html = (out / "report.html").read_text()
    assert "bench serve" in html and "<svg" in html
    assert not re.search(r"""(src|href)=["']?https?://""", html)
    assert (out / "attainment.png").read_bytes().startswith(b"\x89PNG")
    assert again.returncode == 2 and "is not empty" in again.stderr

    limits = {"0.0": 0, "1.01": 3}
    for limit, code in limits.items():
        args = ("report", str(out), "--no-png", "--fail-under-attainment", limit)
        assert run(*args).returncode == code


@pytest.mark.slow
def test_a_comparison_has_every_setting(tmp_path: Path) -> None:
    with running_fake(token_ms=10) as fake:
        for tag in ("fast-seed0", "fast-seed1"):
            bench(fake, tmp_path / tag, "--duration", "2", "--rps", "6", "--seed", tag[-1])
        fake.set(token_ms=40)
        bench(fake, tmp_path / "slow", "--duration", "2", "--rps", "6")
    folders = [str(tmp_path / t) for t in ("fast-seed0", "fast-seed1", "slow")]
    done = run("report", *folders, "--out", str(tmp_path / "out"), "--no-png")
    assert done.returncode == 0, done.stderr
    html = (tmp_path / "out/report.html").read_text()
    assert "fast against slow" in html and "fast: 2 seeds" in html
    assert "standard error over seeds" in html


def test_labels() -> None:
    assert default_label(Path("20260101T120000Z-adaserve-seed2")) == "adaserve"
    assert default_label(Path("20260101T120000Z-none")) == "none"
    assert default_label(Path("20260101T120000Z-chain-2")) == "chain-2", "a length is not a seed"
    assert default_label(Path("chain-2-s3")) == "chain-2"


def test_bad_input_is_one_sentence_and_code_2(tmp_path: Path) -> None:
    done = run("bench", "serve", "--out", str(tmp_path / "r"), "--url", "http://127.0.0.1:1")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "no OpenAI-compatible server answers" in line


def test_wrong_model_class_and_key(tmp_path: Path) -> None:
    with running_fake(models=["a", "b"], known_classes=["gold"], key="secret") as fake:
        no_key = bench(fake, tmp_path / "1")
        model = bench(fake, tmp_path / "2", "--api-key", "secret", "--model", "c")
        refused = bench(fake, tmp_path / "3", "--api-key", "secret")
    assert (no_key.returncode, model.returncode, refused.returncode) == (2, 2, 2)
    assert "wants authentication (401)" in no_key.stderr
    assert "no model 'c': it serves a, b" in model.stderr
    assert "refuses a request of class 'coding' with 400: unknown SLO class" in refused.stderr


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_what_the_load_needs_is_asked_for_before_it(api: str, tmp_path: Path) -> None:
    with running_fake(refuses="stream_options") as fake:
        told = bench(fake, tmp_path / "1", "--api", api)
        fake.set(refuses="continuous_usage_stats", token_ms=5)
        served = bench(fake, tmp_path / "2", "--api", api, "--num-prompts", "3", "--rps", "9")
        log = fake.log()
    assert told.returncode == 2 and not (tmp_path / "1").exists()
    assert "refuses a request of class 'coding' with 400: unknown field 'stream_options'" in told.stderr
    assert served.returncode in (0, 4), served.stderr
    assert [e["body"]["stream_options"] for e in log] == [{"include_usage": True}] * 3


@pytest.mark.parametrize("api", ["completions", "chat", "generate"])
def test_a_server_counts_one_more_request_of_each_class_and_none_of_another(api: str) -> None:
    with running_fake() as fake:
        server = {"url": fake.url, "api": api}
        checked = preflight(from_mapping({"server": server, "baseline_ms": 20}))
        log = fake.state()["log"]
    assert [e["headers"].get("x-slo-class") for e in log] == list(checked.classes)
    assert checked.chars_per_token.keys() == checked.classes.keys()
    assert checked.server.continuous_usage is (api != "generate")


def test_the_key_works_and_is_written_nowhere(tmp_path: Path) -> None:
    with running_fake(token_ms=5, key="hush-hush") as fake:
        done = bench(fake, tmp_path / "r", "--api-key", "hush-hush", "--duration", "1", "--rps", "5")
        asked = fake.log()
    assert done.returncode in (0, 4), done.stderr
    assert asked and all(e["headers"]["authorization"] == "Bearer hush-hush" for e in asked)
    for path in (tmp_path / "r").iterdir():
        assert b"hush-hush" not in path.read_bytes(), path


def test_baseline_is_measured_when_nobody_knows_it(tmp_path: Path) -> None:
    with running_fake(token_ms=60) as fake:
        args = ("--url", fake.url, "--duration", "1", "--rps", "4", "--output-tokens", "5")
        done = run("bench", "serve", *args, "--out", str(tmp_path / "r"))
    assert done.returncode in (0, 4), done.stderr
    baseline = json.loads((tmp_path / "r/summary.json").read_text())["baseline_ms"]
    assert baseline == pytest.approx(60, rel=0.5)


def test_a_trace_may_need_the_baseline_though_no_class_does(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_jsonl(
        [TraceRow(0.0, 5, 5, "chat", slo_x_baseline=2.0), TraceRow(1.0, 5, 5, "own", slo_x_baseline=3.0)],
        path,
    )
    trace, classes = {"path": str(path), "slo_from": "trace"}, {"chat": {"tpot_ms": 50}}
    with running_fake(token_ms=60) as fake:
        config = from_mapping({"server": {"url": fake.url}, "trace": trace, "classes": classes})
        with pytest.raises(LoadgenError, match="measure it"):
            build_schedule(config)
        checked = preflight(config)
    assert checked.baseline_ms == pytest.approx(60, rel=0.5)
    tpots_ms = [r.tpot_ms for r in build_schedule(checked).requests]
    assert tpots_ms == pytest.approx([2 * checked.baseline_ms, 3 * checked.baseline_ms])


def endless(fake: Fake, out: Path, processes: int = 1, *more: str) -> list[str]:
    """A load test that somebody has to end."""
    fixed = ("--duration", "100", "--rps", "20", "--output-tokens", "10", "--baseline-ms", "20")
    told = ("--out", str(out), "--processes", str(processes))
    return command("bench", "serve", "--url", fake.url, *fixed, *told, *more)


def test_interrupting_keeps_what_was_measured(tmp_path: Path) -> None:
    out, processes = tmp_path / "r", 2
    with running_fake(token_ms=5) as fake:
        process = subprocess.Popen(endless(fake, out, processes), stderr=subprocess.DEVNULL)
        try:
            wait_for(lambda: finished(out) >= 30)
            children = psutil.Process(process.pid).children(recursive=True)
            assert children
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 4
        finally:
            process.terminate()
        served = len(fake.log())
    records = list(iter_records(out))
    summary = json.loads((out / "summary.json").read_text())
    assert len(records) >= 30 and served - len(records) <= 2 * processes
    assert not summary["valid"] and "interrupted" in " ".join(summary["invalid_reasons"])
    assert summary["unsent"] > 0
    assert not psutil.wait_procs(children, timeout=60)[1]


@pytest.mark.parametrize("limit", ["2s", "60s"])
def test_locust_itself_says_who_met_the_slos_and_whether_that_counts(limit: str, tmp_path: Path) -> None:
    """Its tables know nothing of SLOs, and without failures it would end with 0 whatever was cut off."""
    even = "{kind: constant, rps: 8}"
    (tmp_path / "mix.yaml").write_text(f"duration_s: 3\nbaseline_ms: 20\narrivals: {even}\n")
    locust = [
        sys.executable,
        "-m",
        "locust",
        "-f",
        str(Path(bench_module.__file__).with_name("locustfile.py")),
    ]
    told = ["--headless", "--only-summary", "--bench-config", "mix.yaml", "--results", "r", "-t", limit]
    with running_fake(token_ms=5, first_ms=5) as fake:
        line = [*locust, *told, "--host", fake.url]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    valid = json.loads((tmp_path / "r/summary.json").read_text())["valid"]
    assert done.returncode == (0 if valid else 4), done.stderr
    assert valid is False or limit == "60s"
    assert re.search(r"met all SLOs: .*, all [0-9.]+%; results: r, page: adaserve report r\n", done.stderr)


@ALONE_AND_DISTRIBUTED
def test_a_run_that_is_interrupted_while_it_is_prepared_sends_nothing(processes: int, tmp_path: Path) -> None:
    """A server that is slow to tell its metrics keeps it there."""
    out = tmp_path / "r"
    with running_fake(token_ms=5, metrics_ms=1500) as fake:
        process = subprocess.Popen(endless(fake, out, processes), stderr=subprocess.PIPE, text=True)
        try:
            wait_for((out / "env.json").exists)
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=120)[1]
        finally:
            process.kill()
        assert (process.returncode, fake.log()) == (130, []), said
    assert "Traceback" not in said
    assert not out.exists(), "the same command may be given again"


def test_an_interrupt_while_locust_is_being_started_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its own session: Ctrl-C does not reach it."""
    started, start = list[subprocess.Popen[bytes]](), subprocess.Popen

    def interrupted(*args: Any, **more: Any) -> subprocess.Popen[bytes]:
        started.append(start(*args, **more))
        os.kill(os.getpid(), signal.SIGINT)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    sleeper = [sys.executable, "-c", "import time; time.sleep(100)"]
    with open(tmp_path / "log", "w") as log, pytest.raises(KeyboardInterrupt):  # noqa: SIM117
        with bench_module._started(sleeper, log, os.environ):
            pytest.fail("it goes on")
    assert started[0].poll() is not None


def test_the_live_table_leaves_out_the_warm_up(tmp_path: Path) -> None:
    """As the summary does, which would otherwise say something else than the web UI."""
    (tmp_path / "mix.yaml").write_text("arrivals: {kind: constant, rps: 4}\nwarmup_s: 1\n")
    with running_fake(token_ms=5) as fake:
        done = bench(fake, tmp_path / "r", "--config", str(tmp_path / "mix.yaml"), "--duration", "2")
    assert done.returncode in (0, 4), done.stderr
    summary, progress = (
        json.loads((tmp_path / "r" / name).read_text()) for name in ("summary.json", "progress.json")
    )
    shown = progress["by_class"][-1]
    assert (progress["finished"], shown["name"], shown["requests"]) == (8, "all", 4)
    assert (summary["warmup_requests"], summary["requests"]) == (4, 4)


def test_guessed_tokens_are_told(tmp_path: Path) -> None:
    """Of a server that sends several tokens in a chunk and no usage, every TPOT is wrong."""
    (tmp_path / "mix.yaml").write_text("server: {continuous_usage: false}\nmax_requests: 2\n")
    with running_fake(token_ms=5, per_chunk=2, no_usage=True) as fake:
        done = bench(fake, tmp_path / "r", "--config", str(tmp_path / "mix.yaml"), "--rps", "4")
    assert done.returncode in (0, 4), done.stderr
    assert "2 answers had no usage: each chunk counts as one token" in done.stderr


def test_a_killed_generator_leaves_its_records(tmp_path: Path) -> None:
    out = tmp_path / "r"
    with running_fake(token_ms=5) as fake:
        process = subprocess.Popen(endless(fake, out), stderr=subprocess.DEVNULL)
        wait_for(lambda: finished(out) >= 20)
        for child in psutil.Process(process.pid).children():
            os.kill(child.pid, signal.SIGKILL)
        assert process.wait(120) == 4
    assert len(list(iter_records(out))) >= 20
    assert "killed" in (out / "summary.json").read_text()


@ALONE_AND_DISTRIBUTED
def test_a_full_disk_ends_the_run(processes: int, tmp_path: Path) -> None:
    """Nobody waits for requests whose records are lost. A limit on the size of files stands for the disk."""
    out, room = tmp_path / "r", 20_000
    with running_fake(token_ms=2) as fake:
        done = subprocess.run(
            endless(fake, out, processes, "--rps", "40"),
            capture_output=True,
            text=True,
            timeout=120,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room)),
            check=False,
        )
    assert done.returncode == 2 and "cannot write" in done.stderr, done.stderr
    assert "records could not be written" in (out / "summary.json").read_text()
    assert len(list(iter_records(out))) > 10


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such signal")
def test_the_load_ends_with_its_command(tmp_path: Path) -> None:
    """A terminal that closes, a host without memory: nobody would see who goes on loading the server."""
    out, processes = tmp_path / "r", 2
    with running_fake(token_ms=5) as fake:
        process = subprocess.Popen(endless(fake, out, processes), stderr=subprocess.DEVNULL)
        wait_for(lambda: finished(out) >= 20)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait(60)
        alive = psutil.wait_procs(children, timeout=60)[1]
        for child in alive:
            child.kill()
        served = len(fake.log())
    assert len(children) > processes and not alive
    assert served - len(list(iter_records(out))) <= 2 * processes
    assert "interrupted" in (out / "summary.json").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such signal")
def test_a_load_that_only_starts_ends_with_its_command_as_well(tmp_path: Path) -> None:
    """Locust takes two seconds to start."""
    with running_fake(token_ms=5) as fake:
        process = subprocess.Popen(endless(fake, tmp_path / "r"), stderr=subprocess.DEVNULL)
        found = psutil.Process(process.pid)
        wait_for(lambda: any("ctypes" in m.path for c in found.children() for m in c.memory_maps()))
        children = found.children()
        process.kill()
        process.wait(60)
        alive = psutil.wait_procs(children, timeout=20)[1]
        for child in alive:
            child.kill()
    assert children and not alive


@ALONE_AND_DISTRIBUTED
def test_a_folder_of_the_same_name_is_not_the_package(processes: int, tmp_path: Path) -> None:
    """As in a clone's root, where adaserve/ lacks the load generator. Locust looks there first."""
    (tmp_path / "adaserve").mkdir()
    (tmp_path / "adaserve/__init__.py").touch()
    env = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(Path(adaserve.__file__).parents[1])}
    loaded = "from adaserve.loadgen.bench import why_not_loaded; print(why_not_loaded())"
    with running_fake(token_ms=5) as fake:
        args = (
            "--duration",
            "1",
            "--rps",
            "16",
            "--output-tokens",
            "10",
            "--baseline-ms",
            "20",
            "--out",
            "r",
        )
        line = ("bench", "serve", "--url", fake.url, *args, "--processes", str(processes))
        done = run(*line, cwd=tmp_path, env=env)
    assert done.returncode in (0, 4), done.stderr
    assert json.loads((tmp_path / "r/summary.json").read_text())["requests"] > 5
    checked = [sys.executable, "-c", loaded]
    assert subprocess.check_output(checked, cwd=tmp_path, env=env, text=True) == "None\n"


def test_what_locust_said_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it ends before there is a record."""
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_package\n")
    monkeypatch.setattr(bench_module, "_LOCUST", (*bench_module._LOCUST[:-1], str(broken)))
    why = why_not_loaded()
    assert why is not None and why.endswith("No module named 'no_such_package'")
    config = BenchConfig(baseline_ms=20, duration_s=20)
    with pytest.raises(LoadgenError, match=r"code 1 before it sent anything:\n(?s:.*)'no_such_package'"):
        run_bench(config, tmp_path / "r", console=Console(quiet=True), checked=True)
    broken.write_text("raise SystemExit(1)\n")
    assert why_not_loaded() == "it printed nothing"
    form = "[2026-11-27 09:30:08,198] {} locust.main: {}\n"
    log = form.format("ERROR", "no") + "".join(form.format("INFO", f"- statistics {i}") for i in range(9))
    assert bench_module._tail(log) == form.format("ERROR", "no").strip()


def test_two_load_tests_that_begin_together_do_not_share_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have found that it is free: their names are those of the second in which they were started."""
    out = tmp_path / "results" / "r"

    def another_one_begins(config: BenchConfig) -> BenchConfig:
        make_results_dir(out)
        (out / "requests.jsonl").write_text("its records")
        return config

    monkeypatch.setattr(bench_module, "preflight", another_one_begins)
    with pytest.raises(LoadgenError, match=r"results/r is not empty: give another folder"):
        run_bench(BenchConfig(baseline_ms=20, duration_s=20), out, console=Console(quiet=True))
    assert (out / "requests.jsonl").read_text() == "its records"


def finished(out: Path) -> int:
    try:
        return int(json.loads((out / "progress.json").read_text())["finished"])
    except (OSError, ValueError):
        return 0


def wait_for(condition: Any, seconds: float = 180.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.1)


def test_results_hold_no_path_and_no_machine(tmp_path: Path) -> None:
    trace = tmp_path / "mine.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 5}\n')
    with running_fake(token_ms=5) as fake:
        more = ("--trace", str(trace), f"--config={config_file(tmp_path)}", "--baseline-ms", "20")
        done = run("bench", "serve", "--url", fake.url, "--out", str(tmp_path / "r"), *more)
    assert done.returncode in (0, 4), done.stderr
    summary = json.loads((tmp_path / "r/summary.json").read_text())
    assert summary["command"].startswith("adaserve bench serve --url http://")
    assert "--trace mine.jsonl" in summary["command"] and summary["prompts"].endswith("prompts.jsonl.gz")
    home, here = str(Path.home()), str(Path(__file__).parents[2])
    for path in (tmp_path / "r").iterdir():
        content = path.read_bytes().decode("utf-8", "replace")
        for secret in (str(tmp_path), home + "/", here, sys.prefix, f" {socket.gethostname()}/"):
            assert secret not in content, (path.name, secret)


def config_file(folder: Path) -> Path:
    path = folder / "mix.yaml"
    path.write_text("duration_s: 5\n")
    return path


@pytest.mark.parametrize("config", ["duration_s: 60\nwarmup_s: 5\n", "[", "5", None])
def test_a_run_without_a_summary_is_not_valid_and_has_its_warm_up(config: str | None, tmp_path: Path) -> None:
    """Everything of it was killed, or it still runs."""
    times = (0.5, 6.0)
    records = [record(id=str(k), scheduled_s=at, sent_s=at, first_token_s=at) for k, at in enumerate(times)]
    (tmp_path / "requests.jsonl").write_text("\n".join(r.to_json() for r in records) + "\n")
    if config is not None:
        (tmp_path / "config.yaml").write_text(config)
    summary = read_run(tmp_path).summary
    assert not summary["valid"] and "no summary.json" in summary["invalid_reasons"][0]
    assert summary["requests"] == (1 if "warmup_s" in (config or "") else 2)
    assert "is not valid" in write_report([read_run(tmp_path)], tmp_path, png=False).read_text()
    (tmp_path / "summary.json").write_text('{"warmup_s": 0}')
    assert read_run(tmp_path).summary["valid"]


def test_client_and_server_are_compared(tmp_path: Path) -> None:
    """The report shows both counts, and which requests may explain a difference."""
    records = [
        record(id="0", last_token_s=1.0 + 10 * 0.0299),  # 29.9 ms against 30: close
        record(id="1", last_token_s=1.0 + 10 * 0.010),
        record(id="2", error="connection closed before the end of the answer"),
        record(id="3", last_token_s=1.0 + 10 * 0.050),
    ]
    for r in records:
        r.judge()
    (tmp_path / "requests.jsonl").write_text("\n".join(r.to_json() for r in records) + "\n")
    server = {"chat": {"all": {"requests": 3, "attainment": 0.333333}}}
    learning = {"chat": {"present": 1.5, "first": 1.2}, "chat2": {"present": "x"}}
    (tmp_path / "summary.json").write_text(json.dumps({"server": server, "learning": learning}))
    (row,) = agreement_rows(read_run(tmp_path))
    assert (row["client"], row["client_n"], row["server_n"]) == (0.5, 4, 3)
    assert row["points"] == pytest.approx(16.7, abs=0.1)
    assert row["why"] == (
        "1 within 5% of their SLO; 1 failed at the client; "
        "1 never counted by the server: turned away or aborted"
    )
    page = write_report([read_run(tmp_path)], tmp_path, png=False).read_text()
    assert "Client and server" in page and "+16.7" in page and "1 within 5% of their SLO" in page
    assert page.count("Draft that learns") == 1 and "+25.0%" in page


def told(record: RequestRecord, tpot_ms: float, met: bool, **more: float) -> RequestRecord:
    """The record with the server's verdict."""
    verdict = {"tpot_ms": tpot_ms, "tpot_slo_ms": record.slo_tpot_ms, "ttft_ms": 400.0, "ttft_slo_ms": None}
    record.server_slo = {**verdict, "met": met} | more
    record.judge()
    return record


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
    for seed, name in enumerate(("chat", "coding")):
        (folder := tmp_path / f"priced-seed{seed}").mkdir()
        (folder / "requests.jsonl").write_text(
            told(record(id="1", slo_class=name), 10.0, True).to_json() + "\n"
        )
    runs = [read_run(p) for p in sorted(tmp_path.iterdir())]
    page = write_report(runs, tmp_path / "out", png=False).read_text()
    assert "priced: 2 seeds" in page and "Of priced-seed0, the first of 2 runs." in page
    alone = write_report(runs[:1], tmp_path / "alone", png=False).read_text()
    assert "the first of" not in alone and "all requests but those that their client ended" in alone


def test_seeds_are_one_sample_for_percentiles_and_no_proof_where_they_agree(tmp_path: Path) -> None:
    for seed, slow_s in enumerate((1.4, 9.0)):
        (folder := tmp_path / f"priced-seed{seed}").mkdir()
        every = [record(id=str(k), last_token_s=slow_s if k < 5 else 1.1) for k in range(50)]
        for r in every:
            r.judge()
        (folder / "requests.jsonl").write_text("".join(r.to_json() + "\n" for r in every))
    (group,) = group_runs([read_run(p) for p in sorted(tmp_path.iterdir())])
    (name,) = group.runs[0].summary["by_class"]
    tpot_ms = [1e3 * v for r in group.runs for v in r.arrays[name]["tpot"]]
    for of in (None, name):
        assert group.percentile_ms("tpot", 99, of) == pytest.approx(np.percentile(tpot_ms, 99))
    assert group.percentile_ms("tpot", 99) > 1.5 * (group.mean("p99_tpot_ms") or 0.0)
    one, other = (r.summary["mean_tpot_ms"] for r in group.runs)
    assert group.error("mean_tpot_ms") == pytest.approx(abs(one - other) / 2)
    shares = {r.summary["slo_attainment"] for r in group.runs}
    assert len(shares) == 1 and group.error("slo_attainment") == pytest.approx(0.03, abs=0.01)


def test_a_curve_ends_below_100_percent_only_where_requests_failed(tmp_path: Path) -> None:
    short = record(id="short", output_tokens=1, last_token_s=1.0)
    free = record(id="free", slo_class="free", slo_tpot_ms=None)
    records = [record(id="fast"), short, record(id="lost", error="HTTP 503"), free]
    (tmp_path / "requests.jsonl").write_text("".join(r.to_json() + "\n" for r in records))
    run = read_run(tmp_path)
    assert sorted(run.arrays["chat"]["ratio"]) == [0.0, pytest.approx(1 / 3), float("inf")]
    (chart,) = [c for c in build_charts(group_runs([run])) if c.name == "tpot-ratio"]
    curves = {line.get_label(): max(line.get_ydata()) for line in chart.figure.axes[0].lines}
    assert curves["chat"] == pytest.approx(2 / 3) and "free" not in curves


def test_the_report_lists_them(tmp_path: Path) -> None:
    records = [told(record(id="late7", last_token_s=1.303), 29.8, True), told(record(id="1"), 10.0, True)]
    records += [told(record(id=f"c{k}", slo_class="coding"), 10.0, True) for k in range(2)]
    (tmp_path / "requests.jsonl").write_text("\n".join(r.to_json() for r in records) + "\n")
    server = {name: {"all": {"requests": 2, "attainment": 1.0}} for name in ("chat", "coding")}
    (tmp_path / "summary.json").write_text(json.dumps({"server": server}))
    rows = {r["name"]: r for r in agreement_rows(read_run(tmp_path))}
    told_of = {n: (r["points"], r["flips"], r["told"]) for n, r in rows.items()}
    assert told_of == {"chat": (-50.0, 1, 2), "coding": (0.0, 0, 2), "all": (-25.0, 1, 4)}
    (group,) = group_runs([read_run(tmp_path)])
    assert (group.mean("requests"), group.mean("requests", "chat")) == (4, 2)
    assert (group.met("tpot"), group.met("tpot", "chat")) == (0.75, 0.5)
    assert group.error("mean_tpot_ms") is None, "of one run"
    page = write_report([read_run(tmp_path)], tmp_path, png=False).read_text()
    assert "judged differently" in page and "<td>late7</td>" in page
    assert "10 tokens were made in 298.0 ms and arrived in 303.0 ms" in page


@pytest.mark.parametrize(
    "odd", [None, 5, {"slo": 5}, {"slo": {"met": "yes"}}, {"slo": {"met": True, "tpot_ms": "x"}}]
)
def test_metadata_of_other_servers_is_no_verdict(odd: Any) -> None:
    event = parse_event("completions", {"choices": [], "usage": {"completion_tokens": 3}, "metadata": odd}, 0)
    assert event.server_slo is None and event.output_tokens == 3


def test_verdict_of_the_server_is_read() -> None:
    slo = {
        "class": "chat",
        "tpot_ms": 1.5,
        "tpot_slo_ms": 2,
        "ttft_ms": 9.0,
        "ttft_slo_ms": None,
        "met": True,
    }
    expected = {k: v for k, v in slo.items() if k != "class"}
    stream = {"choices": [], "usage": {"completion_tokens": 3}, "metadata": {"slo": slo}}
    assert parse_event("chat", stream, 0).server_slo == expected
    assert parse_event("generate", {"text": "x", "meta_info": {"slo": slo}}, 0).server_slo == expected
    slo["tpot_predicted_ms"] = 1.7
    assert parse_event("chat", stream, 0).server_slo == expected | {"tpot_predicted_ms": 1.7}
    slo["tpot_predicted_ms"] = "soon"
    assert parse_event("chat", stream, 0).server_slo is None


@pytest.mark.parametrize(
    ("tokens", "verifications", "length"), [(9, 4, 2.0), (1, 0, None), (9, None, None), (None, 4, None)]
)
def test_the_first_token_comes_of_no_verification(
    tokens: int | None, verifications: int | None, length: float | None
) -> None:
    meta = {"completion_tokens": tokens, "spec_verify_ct": verifications}
    assert parse_event("generate", {"text": "x", "meta_info": meta}, 0).accept_length == length


@pytest.mark.parametrize("count", [-1, MAX_COUNT + 1, 2.5, "3"])
@pytest.mark.parametrize("name", ["completion_tokens", "prompt_tokens"])
def test_a_number_of_tokens_that_cannot_be_is_refused(name: str, count: Any) -> None:
    with pytest.raises(NOT_UNDERSTOOD):
        parse_event("completions", {"choices": [], "usage": {name: count}}, 0)
    with pytest.raises(NOT_UNDERSTOOD):
        parse_event("generate", {"text": "x", "meta_info": {name: count}}, 0)


STREAMED = {
    "model": "m", "max_tokens": 4, "temperature": 0.5, "stream": True, "ignore_eos": True, "priority": 2,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "custom_params": {"answer_tokens": 3},
}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "completions": STREAMED | {"prompt": "before hi"},
    "chat": STREAMED | {"messages": [{"role": "user", "content": "before hi"}]},
    "generate": {
        "text": "before hi", "stream": True, "priority": 2,
        "sampling_params": {"max_new_tokens": 4, "temperature": 0.5, "ignore_eos": True,
                            "custom_params": {"answer_tokens": 3}},
    },
}  # fmt: skip


@pytest.mark.parametrize("api", BODIES)
def test_each_api_is_asked_the_same_in_its_own_words(api: str) -> None:
    server = Endpoint(model="m", api=api, ignore_eos=True, continuous_usage=True)
    planned = PlannedRequest(
        0, 0.0, "chat", None, None, "hi", 1, 4, temperature=0.5, priority=2, answer_tokens=3
    )
    assert body(server, planned, "before ") == BODIES[api]
    plain = Endpoint(model="m", api=api, ignore_eos=False, continuous_usage=False)
    bare = body(plain, replace(planned, priority=None), "")
    assert not {"priority", "ignore_eos"} & bare.keys() and "continuous_usage_stats" not in str(bare)


def record(**values: Any) -> RequestRecord:
    defaults: dict[str, Any] = {
        "slo_class": "chat", "slo_ttft_ms": None, "slo_tpot_ms": 30.0, "scheduled_s": 0.5, "sent_s": 0.5,
        "first_token_s": 1.0, "last_token_s": 1.1, "output_tokens": 11,
    }  # fmt: skip
    return RequestRecord(**(defaults | values))


def test_slos_are_sent_in_two_spellings_that_agree() -> None:
    """Routers that drop x-slo headers forward tracestate."""
    planned = PlannedRequest(0, 0.0, "chat", 50.1234567, 2000.0, "hi", 1, 4)
    sent = slo_headers(Endpoint(), planned)
    assert sent["tracestate"] == "adaserve=tpot-ms:50.1235;ttft-ms:2000;class:chat"
    alone = {"tracestate": sent.pop("tracestate"), "user-agent": "x"}
    assert resolve(alone, None, SLOConfig()) == resolve(sent | alone, None, SLOConfig())
    assert "tpot" not in str(slo_headers(Endpoint(slo_headers="class"), planned))
    assert "class" not in str(slo_headers(Endpoint(slo_headers="ms"), planned))
    assert "tracestate" not in slo_headers(Endpoint(slo_headers="none"), planned)
    assert "tracestate" not in slo_headers(Endpoint(headers={"Tracestate": "a=1"}), planned)
    assert "tracestate" not in slo_headers(Endpoint(), replace(planned, slo_class="a,b")), "not of that form"


def test_help_names_the_defaults() -> None:
    """Options are None where they are not given: a file may say it, or else the configuration's default."""
    config = BenchConfig()
    bench: Any = get_command(app)
    serve = bench.commands["bench"].commands["serve"]
    told = {p.name: p.show_default for p in serve.params}
    mix = ", ".join(f"{c.share:.0%} {name}" for name, c in config.classes.items())
    expected = {
        "url": config.server.url, "api": config.server.api, "slo_headers": config.server.slo_headers,
        "rps": f"{config.arrivals.rps:g}", "burstiness": f"{config.arrivals.cv**-2:g}", "mix": mix,
        "duration": f"{config.duration_s:g}", "seed": f"{config.seed}", "warmup": f"{config.warmup_s:g}",
    }  # fmt: skip
    assert {name: told[name] for name in expected} == expected
