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
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_server import Fake, running_fake
from rich.console import Console
from typer.main import get_command

import adaserve
from adaserve.cli import app
from adaserve.loadgen import bench as bench_module
from adaserve.loadgen.bench import run_bench, why_not_loaded
from adaserve.loadgen.config import BenchConfig, from_mapping
from adaserve.loadgen.errors import LoadgenError
from adaserve.loadgen.preflight import preflight
from adaserve.loadgen.results import iter_records, make_results_dir
from adaserve.loadgen.schedule import build_schedule
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

    for limit, code in {"0.0": 0, "1.01": 3}.items():
        args = ("report", str(out), "--no-png", "--fail-under-attainment", limit)
        assert run(*args).returncode == (done.returncode or code)


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
    shares = ".*, all [0-9.]+%" if limit == "60s" else ".*"  # in 2 s, on a busy machine, no answer may end
    assert re.search(rf"met all SLOs: {shares}; results: r, page: adaserve report r\n", done.stderr)


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
