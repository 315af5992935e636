"""A server that is stopped finishes what runs, and takes nothing more."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from adaserve.host.ports import free_port
from adaserve.server import ServerProcess, ServerSpec

pytestmark = pytest.mark.slow  # servers of their own

TOKENS = 6000
"""Takes longer than the five seconds after which SGLang looks whether it was told to stop."""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_server_that_is_stopped_finishes_what_runs(workers: int, tmp_path: Path) -> None:
    """Of several HTTP workers, those without requests end first."""
    extra = ("--tokenizer-worker-num", str(workers))
    spec = ServerSpec(size="12M", port=free_port(), extra=extra)
    params = {"max_new_tokens": TOKENS, "ignore_eos": True}
    body = {"text": "import os\n", "sampling_params": params, "stream": True}
    with ServerProcess(spec, tmp_path / "server.log") as server:
        with httpx.stream("POST", server.url + "/generate", json=body, timeout=120) as answer:
            events = (line.removeprefix("data: ") for line in answer.iter_lines() if "{" in line)
            next(events)
            os.kill(server.pid, signal.SIGTERM)
            if workers == 1:
                while httpx.get(server.url + "/health", timeout=30).status_code != 503:
                    time.sleep(0.01)
                refused = httpx.post(server.url + "/generate", json=body, timeout=30)
                assert refused.status_code == 503 and "stopping" in refused.text
            *_, last = events
        meta = json.loads(last)["meta_info"]
        assert (meta["completion_tokens"], meta["finish_reason"]["type"]) == (TOKENS, "length")
        assert server._process is not None and server._process.wait(timeout=60) == 0


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_server_at_once(workers: int, first: int, tmp_path: Path) -> None:
    spec = ServerSpec(size="12M", port=free_port(), extra=("--tokenizer-worker-num", str(workers)))
    params = {"max_new_tokens": TOKENS, "ignore_eos": True}
    body = {"text": "import os\n", "sampling_params": params, "stream": True}
    with ServerProcess(spec, tmp_path / "server.log") as server:
        with httpx.stream("POST", server.url + "/generate", json=body, timeout=120) as answer:
            events = (json.loads(line[6:]) for line in answer.iter_lines() if "{" in line)
            next(events)
            os.kill(server.pid, first)
            for _ in range(20):
                next(events)  # it goes on
            os.kill(server.pid, signal.SIGINT)
            with pytest.raises(httpx.RemoteProtocolError):
                list(events)
        assert server._process is not None and server._process.wait(timeout=60) == 130
        assert "stopped by SIGINT" in server.log.read_text()
