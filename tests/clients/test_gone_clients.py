"""A request whose client hangs up gives its place back at once, and the others go on."""

from __future__ import annotations

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from adaserve.server import ServerProcess
from tests.clients.conftest import MODEL, SLOTS, counter

PROMPT, LONG = "import os\n", 6000
GENERATE = {"text": PROMPT, "sampling_params": {"max_new_tokens": LONG, "ignore_eos": True}}
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": ("/generate", GENERATE),
    "batch": ("/generate", {**GENERATE, "text": [PROMPT, "import re\n"]}),
    "samples": ("/v1/completions", {"prompt": PROMPT, "max_tokens": LONG, "ignore_eos": True, "n": 2}),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": LONG, "ignore_eos": True},
    ),
}
AT_ONCE_S = 60.0
"""Less than SGLang takes to look for a client in this server. An answer may have come to its end by then,
but the server counts those."""


def ask(server: ServerProcess, route: str, stream: bool) -> http.client.HTTPConnection:
    """Sends a request and reads nothing."""
    path, body = ROUTES[route]
    connection = http.client.HTTPConnection("127.0.0.1", server.spec.port, timeout=60)
    headers = {"content-type": "application/json", "x-adaserve-speculation": "off"}
    connection.request("POST", path, json.dumps({"model": MODEL, "stream": stream, **body}), headers)
    return connection


def until(server: ServerProcess, running: int, waiting: int, patience_s: float = 60.0) -> None:
    end = time.monotonic() + patience_s
    while True:
        (load,) = httpx.get(f"{server.url}/v1/loads?include=core", timeout=30).json()["loads"]
        if (load["num_running_reqs"], load["num_waiting_reqs"]) == (running, waiting):
            return
        assert time.monotonic() < end, load
        time.sleep(0.02)


@pytest.mark.parametrize(("route", "running"), [("generate", 1), ("batch", 2), ("samples", 2), ("chat", 1)])
def test_an_answer_that_is_sent_whole(small: ServerProcess, route: str, running: int) -> None:
    counted = counter(small)
    connection = ask(small, route, stream=False)
    until(small, running, 0)
    connection.close()
    until(small, 0, 0, AT_ONCE_S)
    assert counted() == {}, "it was answered to the end"


def text(server: ServerProcess, prompt: str, tokens: int) -> str:
    params = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
    body = {"text": prompt, "sampling_params": params}
    headers = {"x-adaserve-speculation": "off"}
    answer = httpx.post(f"{server.url}/generate", json=body, headers=headers, timeout=300)
    said: str = answer.json()["text"]
    return said


def test_requests_that_wait(small: ServerProcess) -> None:
    """Two that run meanwhile say what they say alone."""
    prompts = (PROMPT, "def main(")
    alone = [text(small, prompt, 200) for prompt in prompts]
    counted = counter(small)
    with ThreadPoolExecutor(2) as threads:
        others = ask(small, "batch", stream=False)
        until(small, SLOTS - 2, 0)
        both = [threads.submit(text, small, prompt, 1200) for prompt in prompts]
        until(small, SLOTS, 0)
        waiting = [ask(small, *one) for one in (("generate", False), ("generate", True), ("chat", True))]
        until(small, SLOTS, 3)
        for connection in waiting:
            connection.close()
        until(small, SLOTS, 0, AT_ONCE_S)
        for one, beginning in zip(both, alone, strict=True):
            assert one.result().startswith(beginning)
    others.close()
    until(small, 0, 0)
    assert sum(counted().values()) == len(prompts), "the others were ended, and did not end"
