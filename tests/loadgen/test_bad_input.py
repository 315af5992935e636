"""Input that cannot work: one sentence that says what is wrong, exit code 2, no traceback."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from adaserve.loadgen.cli import bench_app, report
from adaserve.scheduler.metrics import RequestRecord

LOCUSTFILE = Path(__file__).parents[2] / "loadgen" / "locustfile.py"

app = typer.Typer()
app.add_typer(bench_app, name="bench")
app.command()(report)


def refused(*args: str) -> str:
    """The sentence that the command ends with."""
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 2, (done.output, done.exception)
    assert isinstance(done.exception, SystemExit)
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    return line


def jsonl(timestamp: object, prompt: object = 5, output: object = 5, **more: object) -> str:
    return (
        json.dumps({"timestamp": timestamp, "input_length": prompt, "output_length": output, **more}) + "\n"
    )


TRACES = {
    "empty": ("", "this is no trace that is known here"),
    "nan": (jsonl(float("nan")), "expected a finite number"),
    "infinite": (jsonl(float("inf")), "expected a finite number"),
    "negative": (jsonl(-5), "a trace starts at 0"),
    "unsorted": (jsonl(10) + jsonl(5), "timestamps go back"),
    "no tokens": (jsonl(0, 0), "expected a whole number of tokens from 1 on"),
    "text for a number": (jsonl(0, "x"), "expected a finite number"),
    "list": ("[1, 2]\n", "expected a JSON object"),
    "odd class": (jsonl(0, slo_class=5), "slo_class must be text"),
}


@pytest.mark.parametrize("case", TRACES)
def test_traces(case: str, tmp_path: Path) -> None:
    text, says = TRACES[case]
    (tmp_path / "t.jsonl").write_text(text)
    line = refused("bench", "serve", "--plan-only", "--trace", str(tmp_path / "t.jsonl"))
    assert says in line and "t.jsonl" in line


CONFIGS = {
    "typo": ("duration: 3\n", "unknown key 'duration': known are server, classes, arrivals"),
    "syntax": ("a: [1\nb: 2", "is not valid YAML"),
    "list": ("- 1\n", "expected keys such as server"),
    "rate": ("arrivals: {rps: fast}\n", "rps must be a rate of 0 or more"),
    "duration": ("duration_s: long\n", "duration_s must be a number above 0, not 'long'"),
    "no classes": ("classes: {}\n", "at least one class is needed"),
    "share": ("classes: {a: {share: x, tpot_ms: 3}}\n", "share must be a number of 0 or more"),
    "slo": ("classes: {a: {tpot_ms: fast}}\n", "accepted is a number from 0.1 to 60000 ms"),
    "seed": ("seed: abc\n", "seed must be a whole number of 0 or more"),
    "server": ("server: http://x\n", "expected keys and values"),
    "headers": ("server: {headers: {a: 1}}\n", "header 'a' must be one line of text"),
    "smuggled header": ('server: {headers: {a: "1\\r\\nb: 2"}}\n', "header 'a' must be one line of text"),
    "timeout": ("server: {timeout_s: x}\n", "timeout_s must be a number above 0"),
    "trace path": ("trace: {path: 5}\n", "path must be text"),
    "trace limit": ("trace: {path: x, max_prompt_tokens: x}\n", "max_prompt_tokens must be a whole number"),
    "tokenizer": ("tokenizer: 5\n", "tokenizer must be text"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configurations(case: str, tmp_path: Path) -> None:
    text, says = CONFIGS[case]
    (tmp_path / "c.yaml").write_text(text)
    line = refused("bench", "serve", "--plan-only", "--config", str(tmp_path / "c.yaml"))
    assert says in line and "c.yaml" in line


OPTIONS = {
    "--seed=-1": "seed must be a whole number",
    "--max-requests=0": "max_requests must be a whole number of 1 or more",
    "--warmup=60": "nothing is left to measure",
    "--warmup=-1": "warmup_s must be a number of 0 or more",
    "--baseline-ms=0": "baseline_ms must be a number above 0",
    "--duration=nan": "duration_s must be a number above 0",
    "--rps=1e9": "more than one run can plan",
    "--output-tokens=0": "a length needs whole numbers",
    "--temperature=nan": "temperature must be a number of 0 or more",
    "--processes=0": "--processes must be 1 or more",
    "--fail-under-attainment=7": "a share from 0 to 1",
    "--url=http://h:abc": "needs a host and a port",
    "--url=http://": "needs a host and a port",
    "--trace=.": "Is a directory",
    "--config=.": "Is a directory",
    "--prompts=.": "Is a directory",
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options(option: str) -> None:
    assert OPTIONS[option] in refused("bench", "serve", "--plan-only", option)


def test_results_folder_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    assert "is a file" in refused("bench", "serve", "--out", str(tmp_path / "f"))


GOOD = RequestRecord(
    "0", "chat", None, 30.0, 0.5, 0.5, first_token_s=1.0, last_token_s=1.1, output_tokens=11
).to_json()
DAMAGED = {
    "empty": ("", "holds no requests"),
    "cut in the middle": (GOOD[:40] + "\n" + GOOD + "\n", "is damaged"),
    "another file": ("[1]\n" + GOOD + "\n", "is damaged"),
    "missing keys": ('{"id": "3"}\n' + GOOD + "\n", "missing 5 required"),
    "text for a time": (GOOD.replace('"sent_s": 0.5', '"sent_s": "x"') + "\n", "has sent_s 'x'"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_results(case: str, tmp_path: Path) -> None:
    text, says = DAMAGED[case]
    (tmp_path / "requests.jsonl").write_text(text)
    assert says in refused("report", str(tmp_path), "--no-png")


def test_no_results(tmp_path: Path) -> None:
    assert "holds no requests.jsonl" in refused("report", str(tmp_path))
    assert "is no folder of results" in refused("report", str(tmp_path / "nowhere"))


def test_all_warm_up(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text(GOOD + "\n")
    (tmp_path / "summary.json").write_text('{"warmup_s": 100}')
    assert "lie in the warm-up" in refused("report", str(tmp_path))


@pytest.mark.parametrize("summary", ["{", '{"warmup_s": "x", "invalid_reasons": 5, "server": 3}'])
def test_a_run_that_was_cut_off_still_has_a_report(summary: str, tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text(GOOD + "\n" + GOOD[:50])
    (tmp_path / "summary.json").write_text(summary)
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--no-png"])
    assert done.exit_code == 0, done.output
    assert "<svg" in (tmp_path / "report.html").read_text()


def test_port_of_the_web_ui_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", "http://127.0.0.1:1"]
        command += ["--web-host", "127.0.0.1", "--web-port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "give another --web-port" in done.stderr and "Traceback" not in done.stderr
