"""Input that cannot work: one sentence that says what is wrong, exit code 2, no traceback."""

from __future__ import annotations

import gzip
import itertools
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from fake_server import running_fake
from typer.testing import CliRunner

from adaserve.cli import app
from adaserve.host.ports import free_port
from adaserve.loadgen.results import iter_records
from adaserve.slo.run_summary import RequestRecord

LOCUSTFILE = Path(__file__).parents[2] / "loadgen" / "locustfile.py"


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
    "empty": ("", "this is not a known trace format"),
    "infinite": (jsonl(float("inf")), "expected a finite number"),
    "unsorted": (jsonl(10) + jsonl(5), "timestamps go back"),
    "list": ("[1, 2]\n", "expected a JSON object"),
    "odd class": (jsonl(0, slo_class=5), "slo_class must be text"),
    "class of two lines": (jsonl(0, slo_class="a\nb", slo_tpot_ms=9), "slo_class must be text in one line"),
    "unknown class": (
        jsonl(0, slo_class="vip"),
        "unknown class 'vip' (known are coding, chat, summarization)",
    ),
    "brackets": ("[" * 100_000 + "\n", "recursion"),
    "digits": ('{"timestamp": 0, "input_length": 1' + "0" * 5000 + ', "output_length": 5}\n', "digits"),
    "other key": ('{"ts": 0, "input_length": 5, "output_length": 5}\n', "(found: 'ts', 'input_length'"),
}


@pytest.mark.parametrize("case", TRACES)
def test_traces(case: str, tmp_path: Path) -> None:
    text, says = TRACES[case]
    (tmp_path / "t.jsonl").write_text(text)
    line = refused("bench", "serve", "--plan-only", "--trace", str(tmp_path / "t.jsonl"))
    assert says in line and "t.jsonl" in line


AZURE, BURSTGPT = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n",
    "Timestamp,Model,Request tokens,Response tokens\n",
)
TABLES = {
    "azure, wrong column": ("TIMESTAMP,ContextTokens,Out\n2023-11-16 18:15:46.68,9,5\n", "'out'"),
    "azure, no header": ("2023-11-16 18:15:46.68,9,5\n", "this is not a known trace format"),
    "azure, unsorted": (
        AZURE + "2023-11-16 18:15:46.68,9,5\n2023-11-16 18:15:40.68,9,5\n",
        "timestamps go back by 6 s: sort the file, or ask for sorting (sort: true under trace:",
    ),
    "burstgpt, wrong column": ("Timestamp,Model,Request tokens,Answer\n1,m,3,4\n", "'answer'"),
    "burstgpt, negative": (BURSTGPT + "-5,m,3,4\n", "the timestamp is -5 s"),
    "burstgpt, failures only": (BURSTGPT + "5,m,3,0\n", "holds no requests"),
    "csv, a column twice": (
        "arrival_s,prompt_tokens,prompt_tokens,output_tokens\n0,5,7,5\n",
        "the header names 'prompt_tokens' twice",
    ),
    "csv, no end of a quote": (
        'arrival_s,prompt_tokens,output_tokens\n0,"' + "5\n" * 99_999,
        "not a table",
    ),
}


@pytest.mark.parametrize("case", TABLES)
def test_tables(case: str, tmp_path: Path) -> None:
    text, says = TABLES[case]
    (tmp_path / "t.csv").write_text(text)
    line = refused("bench", "serve", "--plan-only", "--trace", str(tmp_path / "t.csv"))
    assert says in line and "t.csv" in line


@pytest.mark.parametrize("option", ["--trace", "--prompts", "--config"])
def test_files_that_are_no_text(option: str, tmp_path: Path) -> None:
    plain, packed = tmp_path / "x", tmp_path / "x.gz"
    plain.write_bytes(b"\xff\xfe\x00\x01")
    assert "it is not UTF-8 text" in refused("bench", "serve", "--plan-only", option, str(plain))
    packed.write_bytes(gzip.compress(b'{"a": 1}\n' * 99)[:40])
    refused("bench", "serve", "--plan-only", option, str(packed))
    assert "No such file" in refused("bench", "serve", "--plan-only", option, str(tmp_path / "none"))


CONFIGS = {
    "typo": ("duration: 3\n", "unknown key 'duration': known are server, classes, arrivals"),
    "syntax": ("a: [1\nb: 2", "is not valid YAML"),
    "list": ("- 1\n", "expected keys such as server"),
    "rate": ("arrivals: {rps: fast}\n", "rps must be a rate of 0 or more"),
    "no rate": ("arrivals: {rps: .nan}\n", "rps must be a rate"),
    "arrivals": (
        "arrivals: {kind: poison}\n",
        "arrivals: kind must be poisson, gamma, constant, ramp or peak, not 'poison'",
    ),
    "typo of a class": ("classes: {chat: {shares: 1}}\n", "unknown key 'shares'"),
    "tokens": ("classes: {chat: {output_tokens: many}}\n", "expected a number of tokens"),
    "api": ("server: {api: grpc}\n", "server: api must be completions, chat or generate, not 'grpc'"),
    "source": ("trace: {path: x, slo_from: moon}\n", "trace: slo_from must be classes or trace, not 'moon'"),
    "duration": ("duration_s: long\n", "duration_s must be a number above 0, not 'long'"),
    "no classes": ("classes: {}\n", "at least one class is needed"),
    "share": ("classes: {a: {share: x, tpot_ms: 3}}\n", "share must be a number of 0 or more"),
    "slo": ("classes: {a: {tpot_ms: fast}}\n", "tpot_ms is 'fast': it should be a valid number"),
    "negative slo": ("classes: {chat: {tpot_ms: -5}}\n", "tpot_ms is -5"),
    "seed": ("seed: abc\n", "seed must be a whole number of 0 or more"),
    "server": ("server: http://x\n", "expected keys and values"),
    "headers": ("server: {headers: {a: 1}}\n", "header 'a' must be one line of text in ASCII"),
    "smuggled header": (
        'server: {headers: {a: "1\\r\\nb: 2"}}\n',
        "header 'a' must be one line of text in ASCII",
    ),
    "timeout": ("server: {timeout_s: x}\n", "timeout_s must be a number above 0"),
    "trace path": ("trace: {path: 5}\n", "path must be text"),
    "trace limit": ("trace: {path: x, max_prompt_tokens: x}\n", "max_prompt_tokens must be a whole number"),
    "tokenizer": ("tokenizer: 5\n", "tokenizer must be text"),
    "key twice": ("duration_s: 3\nduration_s: 5\n", "the key 'duration_s' is given twice"),
    "class twice": ("classes:\n  a: {tpot_ms: 3}\n  a: {tpot_ms: 5}\n", "the key 'a' is given twice"),
    "deep": ("a: " + "[" * 3000 + "\n", "is not valid YAML"),
    "header not Latin": ('server: {headers: {a: "\u043a"}}\n', "must be one line of text in ASCII"),
    "header name": ('server: {headers: {"a b": c}}\n', "must be one line of text in ASCII"),
    "text for a flag": ('server: {insecure: "false"}\n', "insecure must be true or false, not 'false'"),
    "sort": ("trace: {path: x, sort: 5}\n", "sort must be true or false"),
    "format": ("trace: {path: x, format: [5]}\n", "format must be text"),
    "path with a zero": ('prompts: "a\\0"\n', "prompts must be text in one line"),
    "category": ("classes: {a: {tpot_ms: 3, category: [x]}}\n", "category must be text"),
    "digits": ("arrivals: {rps: 1" + "0" * 400 + "}\n", "rps must be a rate"),
    "median above high": ("classes: {a: {tpot_ms: 3, output_tokens: 200000}}\n", "low <= median <= high"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configurations(case: str, tmp_path: Path) -> None:
    text, says = CONFIGS[case]
    (tmp_path / "c.yaml").write_text(text)
    line = refused("bench", "serve", "--plan-only", "--config", str(tmp_path / "c.yaml"))
    assert says in line and "c.yaml" in line


OPTIONS = {
    "--url=127.0.0.1:30000": "must start with http://",
    "--mix=codng=1": "unknown class 'codng'",
    "--slo=coding=fast": "is not a number",
    "--slo=chat=50,": "is not a number",
    "--slo=chat=itl:50": "'itl' is not an objective: known are tpot and ttft",
    "--slo=chat=1.2x,50": "'1.2x,50' states TPOT twice",
    "--slo=chat=ttft:2x": "a TTFT is in milliseconds, not in baselines",
    "--slo=chat=ttft:0": "ttft_ms is 0",
    "--num-prompts=0": "max_requests must be a whole number of 1 or more",
    "--num-prompts=-5": "max_requests must be a whole number of 1 or more",
    "--num-prompts=99999999": "more than one run can plan",
    "--rps=-2": "rps must be a rate",
    "--rps=0": "the schedule is empty",
    "--duration=0": "duration_s must be a number above 0",
    "--seed=-1": "seed must be a whole number",
    "--max-requests=0": "max_requests must be a whole number of 1 or more",
    "--warmup=60": "nothing is left to measure",
    "--warmup=-1": "warmup_s must be a number of 0 or more",
    "--baseline-ms=0": "baseline_ms must be a number above 0",
    "--duration=nan": "--duration=nan is not a finite number",
    "--rps=1e9": "more than one run can plan",
    "--burstiness=1e-300": "--burstiness must lie between 0.0001 and 10000",
    "--burstiness=-1": "--burstiness must lie between 0.0001 and 10000",
    "--baseline-ms=1e300": "baseline_ms must be less than 1e+15",
    "--baseline-ms=99999": "baseline_ms must be at most 60000",
    "--temperature=1e308": "temperature must be less than 1e+15",
    "--output-tokens=999999999": "low <= median <= high",
    "--mix=coding=1,coding=2": "a class is named twice",
    "--url=http://h/a b": "without spaces",
    "--url=http://h\u00f6st": "needs a host",
    "--api-key=\u043a": "header 'Authorization' must be one line of text in ASCII, not what was given",
    "--output-tokens=0": "a length needs whole numbers",
    "--rps=-inf": "--rps=-inf is not a finite number",
    "--processes=0": "--processes must be 1 or more",
    "--fail-under-attainment=7": "a share from 0 to 1",
    "--url=http://h:abc": "needs a host and a port",
    "--url=http://": "needs a host and a port",
    "--url=http://me:secret@h:1": "must end with its path and name no user",
    "--url=https://h/openai?api-version=1": "must end with its path and name no user",
    "--trace=.": "Is a directory",
    "--config=.": "Is a directory",
    "--prompts=.": "Is a directory",
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options(option: str) -> None:
    assert OPTIONS[option] in refused("bench", "serve", "--plan-only", option)


def test_a_run_that_ends_in_its_warm_up_is_refused_before_anything_is_sent() -> None:
    few = ("--num-prompts", "10", "--rps", "5", "--warmup", "6")
    why = "nothing is left to measure: all 10 requests are sent within the warm-up of 6 s"
    assert why in refused("bench", "serve", "--plan-only", *few)


def test_a_trace_brings_its_own_rate() -> None:
    assert "use --target-rps" in refused("bench", "serve", "--plan-only", "--rps", "2", "--trace", "x")


@pytest.mark.parametrize("other", ["--duration=5", "--max-requests=5", "--trace=x"])
def test_a_number_of_prompts_is_the_only_limit(other: str) -> None:
    assert "cannot be given with a trace, --duration" in refused(
        "bench", "serve", "--plan-only", "--num-prompts", "3", other
    )


@pytest.mark.parametrize("length", [["--duration", "50"], ["--num-prompts", "9"]])
def test_a_shorter_run_may_have_a_shorter_warm_up(length: list[str], tmp_path: Path) -> None:
    """Both are options over a file's settings: the first alone would leave nothing to measure."""
    config = tmp_path / "c.yaml"
    config.write_text("{duration_s: 300, warmup_s: 100, arrivals: {kind: constant, rps: 5}}\n")
    serve = ["bench", "serve", "--plan-only", "--config", str(config), *length]
    assert "nothing is left to measure" in refused(*serve)
    done = CliRunner().invoke(app, [*serve, "--warmup", "0.5"])
    assert done.exit_code == 0, done.output


def test_a_number_of_prompts_has_no_shape(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("arrivals: {kind: ramp, rps: 1, to_rps: 9}\n")
    line = refused("bench", "serve", "--plan-only", "--num-prompts", "3", "--config", str(config))
    assert "ramp and peak depend on the duration" in line


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
    "odd verdict": (
        GOOD.replace('"server_slo": null', '"server_slo": 5') + "\n" + GOOD + "\n",
        "has server_slo '5'",
    ),
    "verdict without times": (
        GOOD.replace('"server_slo": null', '"server_slo": {"met": true}'),
        "has server_slo",
    ),
    "negative tokens": (GOOD.replace('"output_tokens": 11', '"output_tokens": -7'), "has output_tokens '-7'"),
    "no time": (GOOD.replace('"sent_s": 0.5', '"sent_s": NaN'), "has sent_s 'nan'"),
    "before the start": (GOOD.replace('"scheduled_s": 0.5', '"scheduled_s": -5'), "has scheduled_s '-5'"),
    "text for a verdict": (GOOD.replace('"met_tpot": false', '"met_tpot": "no"'), "has met_tpot 'no'"),
    "class": (GOOD.replace('"slo_class": "chat"', '"slo_class": ["chat"]'), "has slo_class"),
    "gaps": (GOOD.replace('"itl_ms": []', '"itl_ms": [NaN]'), "has itl_ms"),
    "deep": ("[" * 100_000 + "\n" + GOOD, "is damaged"),
    "text for a time": (GOOD.replace('"sent_s": 0.5', '"sent_s": "x"') + "\n", "has sent_s 'x'"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_results(case: str, tmp_path: Path) -> None:
    text, says = DAMAGED[case]
    (tmp_path / "requests.jsonl").write_text(text)
    assert says in refused("report", str(tmp_path), "--no-png")


def test_no_results(tmp_path: Path) -> None:
    assert "holds no requests.jsonl" in refused("report", str(tmp_path))
    assert (
        refused("report", str(nowhere := tmp_path / "nowhere")) == f"error: {nowhere} is not a results folder"
    )
    assert "cannot read" in refused("report", "x" * 5000)


@pytest.mark.parametrize("where", ["file", "file/below", "page"])
def test_report_that_cannot_be_written(where: str, tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text(GOOD + "\n")
    (tmp_path / "file").write_text("x")
    (tmp_path / "page" / "report.html").mkdir(parents=True)
    assert "give another --out" in refused(
        "report", str(tmp_path), "--out", str(tmp_path / where), "--no-png"
    )


def test_all_warm_up(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text(GOOD + "\n")
    (tmp_path / "summary.json").write_text('{"warmup_s": 100}')
    assert "lie in the warm-up" in refused("report", str(tmp_path))


SUMMARIES = [
    "{",
    "[" * 100_000,
    '{"warmup_s": "x", "invalid_reasons": 5, "server": 3}',
    '{"warmup_s": NaN, "class_targets": {"chat": "x"}, "server": {"chat": {"all": {"attainment": "x"}}}}',
    '{"class_targets": {"chat": 1e400}, "server": {"chat": [5]}, "model": "\\ud800", "seed": [5]}',
]


@pytest.mark.parametrize("summary", SUMMARIES)
def test_a_run_that_was_cut_off_still_has_a_report(summary: str, tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text(GOOD + "\n" + GOOD[:50])
    (tmp_path / "summary.json").write_text(summary)
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--no-png"])
    assert done.exit_code == 0, done.output
    assert "<svg" in (tmp_path / "report.html").read_text()


def locust_refuses(*args: str) -> str:
    """What ``locust -f loadgen/locustfile.py`` writes before it ends with code 2, soon: a run that waits for
    its streams takes 40 s more."""
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--only-summary", *args]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as locust:
        assert locust.stderr is not None
        try:
            said = []
            for line in locust.stderr:
                said.append(line.rstrip())
                if line.startswith("error: "):
                    break
            locust.wait(35)
            said += locust.stderr.read().splitlines()
        finally:
            locust.kill()
    assert locust.returncode == 2, said
    assert not [line for line in said if "Traceback" in line]
    (line,) = [line for line in said if line.startswith("error: ")]
    return line


def test_locust_ends_at_once_when_a_run_cannot_start(tmp_path: Path) -> None:
    """The error is found after Locust's test has begun; nobody waits for streams that never were."""
    (tmp_path / "t.jsonl").write_text(jsonl(10) + jsonl(5))
    (tmp_path / "trace.yaml").write_text(f"trace: {{path: {tmp_path / 't.jsonl'}}}\n")
    (tmp_path / "model.yaml").write_text("baseline_ms: 20\nserver: {model: nobody}\n")
    (tmp_path / "file").write_text("x")
    dead = ("--headless", "--host", "http://127.0.0.1:9", "--results", str(tmp_path / "out"))
    assert "no OpenAI-compatible server answers" in locust_refuses(*dead)
    assert "timestamps go back" in locust_refuses(*dead, "--bench-config", str(tmp_path / "trace.yaml"))
    with running_fake() as fake:
        to = ("--headless", "--host", fake.url, "--bench-config", str(tmp_path / "model.yaml"), "--results")
        assert "the server has no model 'nobody'" in locust_refuses(*to, str(tmp_path / "out"))
        assert "is a file" in locust_refuses(*to, str(tmp_path / "file"))
        assert "results are not overwritten" in locust_refuses(*to, str(tmp_path))
    assert not (tmp_path / "out").exists()


def test_the_web_ui_shows_why_a_run_cannot_start() -> None:
    """In its tab of logs: nobody looks at the terminal behind it."""
    port = free_port()
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--web-host", "127.0.0.1"]
    ask = partial(urllib.request.urlopen, timeout=30)
    address = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([*command, "--web-port", str(port)], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: ask(f"{address}/logs").status == 200)
        ask(f"{address}/swarm", b"user_count=1&spawn_rate=1&host=http://127.0.0.1:9").close()
        why = b"no OpenAI-compatible server answers at http://127.0.0.1:9"
        wait_until(lambda: why in ask(f"{address}/logs").read())
    finally:
        process.kill()
        process.wait()


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end_s = time.monotonic() + seconds
    while True:
        with suppress(OSError):
            if condition():
                return
        assert time.monotonic() < end_s, "waited too long"
        time.sleep(0.1)


def test_locust_refuses_options() -> None:
    assert "must start with http://" in locust_refuses("--headless", "--host", "127.0.0.1:30000")
    assert "No such file" in locust_refuses("--headless", "--bench-config", "nofile.yaml")
    assert "ports end at 65535" in locust_refuses("--host", "http://h", "--web-port", "99999")


@contextmanager
def odd_server(answers: Mapping[str, str | None], streams: Iterator[str] | None = None) -> Iterator[str]:
    """Answers paths as told (None: closes), requests for streams with the next of ``streams``, everything
    else as it should be."""
    lock = threading.Lock()
    usual = {
        "/v1/models": '{"data": [{"id": "m"}]}',
        "/v1/completions": '{"choices": [{"text": "x"}], "usage": {"prompt_tokens": 5}}',
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(answers.get(self.path, usual.get(self.path)))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if body.get("stream") and streams is not None:
                with lock:
                    answer: str | None = next(streams)
            else:
                answer = answers.get(self.path, usual.get(self.path))
            self.reply(answer)

        def reply(self, text: str | None) -> None:
            if text is None:
                return
            if "raw" not in answers:
                kind = "text/html" if text.startswith("<") else "text/event-stream"
                self.wfile.write(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n\r\n".encode())
            self.wfile.write(text.encode() + b"\r\n")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_class_of_the_trace_that_the_server_refuses(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(jsonl(0, slo_class="vip", slo_tpot_ms=30))
    with running_fake(known_classes=["coding", "chat", "summarization"]) as fake:
        bench = ("bench", "serve", "--url", fake.url, "--baseline-ms", "20", "--out", str(tmp_path / "o"))
        assert "unknown SLO class 'vip'" in refused(*bench, "--trace", str(tmp_path / "t.jsonl"))
        (tmp_path / "t.jsonl").write_text(jsonl(0, slo_class="聊天", slo_tpot_ms=30))
        said = refused(*bench, "--trace", str(tmp_path / "t.jsonl"))
        assert "the class '聊天' does not fit into a header: rename it, or give --slo-headers ms" in said


def test_port_of_the_web_ui_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", "http://127.0.0.1:1"]
        command += ["--web-host", "127.0.0.1", "--web-port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "give another --web-port" in done.stderr and "Traceback" not in done.stderr


ODD_SERVERS = {
    "answers HTML": ({"/v1/models": "<html>"}, "its answer is not JSON"),
    "lists no models": ({"/v1/models": "[1]"}, "its answer to /v1/models is not a list of models"),
    "says nothing": ({"/v1/models": None}, "Remote end closed connection"),
    "speaks no HTTP": ({"/v1/models": "SSH-2.0-x", "raw": "1"}, "SSH-2.0-x"),
    "closes later": ({"/v1/completions": None}, "a first request to"),
    "answers requests with HTML": ({"/v1/completions": "<html>"}, "its answer is not JSON"),
    "usage without sense": ({"/v1/completions": '{"usage": [5]}'}, "give it with --baseline-ms"),
}


@pytest.mark.parametrize("case", ODD_SERVERS)
def test_what_answers_is_no_such_server(case: str, tmp_path: Path) -> None:
    answers, says = ODD_SERVERS[case]
    with odd_server(answers) as url:
        assert says in refused("bench", "serve", "--url", url, "--out", str(tmp_path / "o"))


NO_ANSWERS = {
    "<html>": "its answer is not a stream of events",
    '{"choices": []}': "its answer is not a stream of events",
    'data: {"error": {"message": "too long"}}': "the server refuses a request of class 'coding': too long",
}


@pytest.mark.parametrize("answer", NO_ANSWERS)
def test_what_answers_sends_no_stream(answer: str, tmp_path: Path) -> None:
    with odd_server({}, itertools.repeat(answer)) as url:
        given = ("--baseline-ms", "20", "--out", str(tmp_path / "o"))
        assert NO_ANSWERS[answer] in refused("bench", "serve", "--url", url, *given)


STREAMS = {
    '{"choices": [{"text": 5}]}': "not understood",
    '{"choices": {"a": 1}}': "not understood",
    '{"choices": [{"text": "a", "finish_reason": 5}]}': "not understood",
    '{"choices": [{"text": "a"}], "usage": {"completion_tokens": "x"}}': "not understood",
    '{"choices": [{"text": "a"}], "usage": {"completion_tokens": -7}}': "not understood",
    '{"choices": [{"text": "a"}], "usage": {"completion_tokens": NaN}}': "not understood",
    '{"choices": [{"text": "a"}], "usage": {"completion_tokens": 1%s}}' % ("0" * 400): "not understood",
    '{"choices": [{"text": "a"}], "usage": [3]}': "not understood",
    "[" * 9000: "not understood",
    "": "not a stream of events but text/html",
}


def test_a_stream_that_makes_no_sense_is_a_failed_request(tmp_path: Path) -> None:
    """No record is lost: each says what was not understood."""
    sent: list[str] = []

    def streams() -> Iterator[str]:
        for event in itertools.cycle(STREAMS):
            sent.append(event)
            yield f"data: {event}\n\ndata: [DONE]\n\n" if event else "<html>"

    with odd_server({}, streams()) as url:
        bench = ["bench", "serve", "--url", url, "--baseline-ms", "20", "--out", str(tmp_path / "o")]
        done = CliRunner().invoke(app, [*bench, "--duration", "2", "--rps", "20"])
    assert done.exit_code in (0, 4), done.output
    records = list(iter_records(tmp_path / "o"))
    assert len(records) == json.loads((tmp_path / "o" / "summary.json").read_text())["failed"]
    answers = sent[-len(records) :]  # behind that of a request that is not measured
    assert set(answers) == set(STREAMS), "too few requests to send each"
    reasons = Counter(STREAMS[event] for event in answers)
    assert reasons == Counter(next(r for r in reasons if r in str(record.error)) for record in records)
