"""Load generators of other projects, with the commands of docs/load-testing.md."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from adaserve.server import ServerProcess
from tests.clients.conftest import MODEL, Counts

REQUESTS = 12


def tool(name: str) -> str:
    """The program: $NAME, or what stands in the path; the test is skipped without it."""
    found = os.environ.get(name.upper()) or shutil.which(name)
    if not found:
        pytest.skip(f"{name} is not installed: pip install {name} into an environment of its own")
    return found


def run(command: Sequence[str], folder: Path, **environment: str) -> None:
    env = {**os.environ, **environment}
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.slow
def test_sglang_benchmark(server: ServerProcess, counted: Counts, tmp_path: Path) -> None:
    tokenizer, _ = server.spec.models()
    command = [sys.executable, "-m", "sglang.benchmark.serving", "--backend", "sglang-oai"]
    command += ["--base-url", server.url, "--tokenizer", tokenizer, "--dataset-name", "random-ids"]
    command += ["--random-input-len", "60", "--random-output-len", "24", "--random-range-ratio", "1"]
    command += ["--num-prompts", str(REQUESTS), "--request-rate", "4", "--warmup-requests", "0"]
    command += ["--header", "x-slo-tpot-ms=5000", "--goodput", "tpot:5000"]
    run([*command, "--output-file", str(tmp_path / "out.jsonl")], tmp_path)
    result: dict[str, Any] = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[-1])
    assert result["completed"] == REQUESTS
    assert result["total_output_tokens"] == REQUESTS * 24
    assert result["mean_tpot_ms"] > 0
    # Everybody was fast enough for five seconds per token: its goodput is its throughput.
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert counted() == {"custom": REQUESTS}


def test_guidellm(server: ServerProcess, counted: Counts, tmp_path: Path) -> None:
    tokenizer, _ = server.spec.models()
    backend = {
        "kind": "openai_http",
        "target": server.url,
        "model": MODEL,
        "request_format": "/v1/completions",
        "extras": {"headers": {"x-slo-tpot-ms": "5000"}},
    }
    command = [tool("guidellm"), "run", "--backend", json.dumps(backend)]
    command += ["--tokenizer", f"kind=hf_auto,model={tokenizer}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=60,output_tokens=24"]
    command += ["--profile", "kind=constant,rate=4"]
    command += ["--constraint", f"kind=max_requests,count={REQUESTS}", "--disable-progress"]
    run([*command, "--output", f"kind=json,path={tmp_path / 'out.json'}"], tmp_path)
    (benchmark,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)
    assert counted() == {"custom": REQUESTS}


def test_aiperf(server: ServerProcess, counted: Counts, tmp_path: Path) -> None:
    tokenizer, _ = server.spec.models()
    command = [tool("aiperf"), "profile", "--model", MODEL, "--url", server.url, "--tokenizer", tokenizer]
    command += ["--endpoint-type", "completions", "--streaming", "--request-rate", "4"]
    command += ["--request-count", str(REQUESTS), "--synthetic-input-tokens-mean", "60"]
    command += ["--output-tokens-mean", "24", "--ui", "none", "--artifact-dir", str(tmp_path / "out")]
    # It reads the value of a header as a number and then refuses numbers: the SLO goes into the body.
    body = {"ignore_eos": True, "custom_params": {"slo_tpot_ms": 5000}}
    command += ["--extra-inputs", json.dumps(body), "--use-server-token-count"]
    command += ["--goodput", "inter_token_latency:5000"]
    run(command, tmp_path, HF_HUB_OFFLINE="")  # offline it does not look at local folders
    (path,) = (tmp_path / "out").rglob("profile_export_aiperf.json")
    result = json.loads(path.read_text())
    assert result["request_count"]["avg"] == REQUESTS
    assert result["goodput"]["avg"] == pytest.approx(result["request_throughput"]["avg"])
    assert counted() == {"custom": REQUESTS}
