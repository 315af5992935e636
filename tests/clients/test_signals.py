"""What a real server says to routers about its SLOs, and whom it turns away when it is asked to."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from adaserve.loadgen.server_metrics import parse_metrics
from adaserve.server import ServerProcess
from tests.clients.conftest import MODEL, SLOTS


def complete(
    url: str, tokens: int = 24, path: str = "/v1/completions", stream: bool = False, **headers: str
) -> httpx.Response:
    body: dict[str, Any] = {"model": MODEL, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body["prompt"] = "import os\n"
    if path == "/generate":
        body = {"text": "import os\n", "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}
    if path == "/v1/responses":
        body = {"model": MODEL, "input": "import os\n", "max_output_tokens": tokens, "temperature": 0}
    body["stream"] = stream
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(url + path, json=body, headers=named, timeout=120)


def said(url: str) -> dict[str, Any]:
    """The section of ``/v1/loads``."""
    (load,) = httpx.get(f"{url}/v1/loads?include=slo", timeout=30).json()["loads"]
    section: dict[str, Any] = load["slo"]
    return section


def gauges(url: str) -> dict[tuple[str, str], float]:
    """``adaserve:*`` by name and class, as they are scraped."""
    samples = parse_metrics(httpx.get(url + "/metrics", timeout=30).text)
    found: dict[tuple[str, str], float] = {}
    for (name, labels), value in samples.items():
        if name.startswith("adaserve:"):
            key = name.removeprefix("adaserve:"), dict(labels).get("slo_class", "")
            found[key] = found.get(key, 0.0) + value
    return found


class Background:
    """Requests that run for seconds, until the block ends: ``classes`` of those that run together."""

    def __init__(self, url: str, *classes: str) -> None:
        self._url, self._classes = url, classes

    def __enter__(self) -> None:
        self._pool = ThreadPoolExecutor(len(self._classes))
        slow = {"x_adaserve_speculation": "off"}
        for name in self._classes:
            self._pool.submit(complete, self._url, 6000, x_slo_class=name, **slow)
        self._until(lambda running: running == len(self._classes))
        time.sleep(1.2)  # a forecast is kept for a second

    def _until(self, reached: Callable[[int], bool]) -> None:
        end = time.monotonic() + 60
        while True:
            load = httpx.get(f"{self._url}/v1/loads?include=core", timeout=30).json()["loads"][0]
            if reached(load["num_running_reqs"]):
                return
            assert time.monotonic() < end, f"{load} with {self._classes}"
            time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        httpx.post(self._url + "/abort_request", json={"rid": "", "abort_all": True}, timeout=30)
        self._pool.shutdown()
        self._until(lambda running: running == 0)


def test_a_loaded_server_says_so_and_an_idle_one_too(small: ServerProcess) -> None:
    for _ in range(3):
        complete(small.url, x_slo_class="chat")
    idle = said(small.url)
    assert idle["classes"].keys() == {"tight", "chat", "bulk", "default", "custom"}
    assert idle["admission_open"] == 1.0 and idle["classes"]["chat"]["wait_ms"] == 0.0
    assert idle["classes"]["default"]["headroom"] is None
    chat = idle["classes"]["chat"]
    assert chat["headroom"] == pytest.approx(60_000 / chat["tpot_ms"])
    assert idle["classes"]["tight"]["headroom"] == pytest.approx(0.2 / idle["classes"]["tight"]["tpot_ms"])
    with Background(small.url, *["chat"] * SLOTS):
        busy = said(small.url)
        assert busy["classes"]["chat"]["wait_ms"] > 0, "all slots are taken"
        chat = busy["classes"]["chat"]
        assert chat["headroom"] == pytest.approx(60_000 / chat["tpot_ms"])
        scraped = gauges(small.url)
        assert scraped["predicted_wait_seconds", "chat"] > 0
        assert scraped["predicted_tpot_seconds", "chat"] * scraped["predicted_headroom", "chat"] == (
            pytest.approx(60.0)
        )
        assert ("predicted_headroom", "default") not in scraped
    after = said(small.url)
    assert after["classes"]["chat"]["wait_ms"] == 0.0, "an idle server still speaks of its load"
    assert gauges(small.url)["predicted_wait_seconds", "chat"] == 0.0
    assert gauges(small.url)["admission_open", ""] == 1.0


def test_predictions_are_compared_with_what_was_delivered(small: ServerProcess) -> None:
    before = gauges(small.url)["predicted_tpot_error_count", "chat"]
    report = complete(small.url, 60, x_slo_class="chat").json()["metadata"]["slo"]
    assert report["tpot_predicted_ms"] > 0 and report["tpot_ms"] > 0
    assert gauges(small.url)["predicted_tpot_error_count", "chat"] == before + 1


def test_a_lost_ttft_slo_is_answered_with_429(small: ServerProcess) -> None:
    paths = ("/v1/completions", "/v1/responses", "/generate")
    routes = [(path, stream) for path in paths for stream in (False, True)]
    with Background(small.url, *["chat"] * SLOTS):
        for path, stream in routes:
            answer = complete(small.url, 4, path, stream, x_slo_ttft_ms="300")
            assert answer.status_code == 429, (path, stream, answer.text)
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            assert answer.headers["x-llm-d-request-dropped-reason"].startswith("rejected-")
            assert "TTFT SLO of 300 ms" in answer.text
    assert gauges(small.url)["shed_requests_total", "custom"] == len(routes)
    for path, stream in routes:
        assert complete(small.url, 4, path, stream, x_slo_ttft_ms="60000").status_code == 200


def test_a_class_over_its_share_is_answered_with_429(small: ServerProcess) -> None:
    with Background(small.url, "bulk", "bulk", "chat", "chat"):
        answer = complete(small.url, 4, x_slo_class="bulk")
        assert answer.status_code == 429 and "its share is 2" in answer.text
        assert answer.headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
    assert complete(small.url, 4, x_slo_class="bulk").status_code == 200


def test_orca_header_when_it_is_asked_for(small: ServerProcess, server: ServerProcess) -> None:
    text = complete(small.url, 4).headers["endpoint-load-metrics"]
    assert re.match(r"TEXT rps_fractional=\d+(\.\d+)?,", text) and "application_utilization=" in text
    assert "named_metrics.headroom_chat=" in text
    json_ = complete(small.url, 4, endpoint_load_metrics_format="JSON").headers["endpoint-load-metrics"]
    assert json.loads(json_.removeprefix("JSON "))["rps_fractional"] > 0
    assert "endpoint-load-metrics" not in complete(server.url, 4).headers, "it is off by default"


def test_nobody_is_shed_by_default(server: ServerProcess) -> None:
    with Background(server.url, "chat", "chat", "chat"):
        assert complete(server.url, 2, x_slo_ttft_ms="1").status_code == 200


def test_headers_of_routers_are_understood(server: ServerProcess, tmp_path: Path) -> None:
    report = complete(server.url, 4, x_sgl_tps_slo="40", x_sgl_ttft_slo_ms="9000").json()["metadata"]["slo"]
    assert (report["tpot_slo_ms"], report["ttft_slo_ms"]) == (25.0, 9000.0)
    answer = complete(server.url, 4, x_slo_tpot="40")
    assert answer.status_code == 400 and "did you mean x-slo-tpot-ms?" in answer.text
    for bad in ({"x_sgl_tps_slo": "fast"}, {"x_dynamo_request_priority": "high"}):
        assert complete(server.url, 4, **bad).status_code == 400
