"""What a real server says to routers about its SLOs, and whom it turns away when it is asked to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from adaserve.config import AdaServeConfig
from adaserve.loadgen.server_metrics import parse_metrics
from adaserve.server import ServerProcess, ServerSpec, free_port
from tests.clients.conftest import MODEL

SLOS = """
classes:
  tight: {tpot_ms: 0.2}
  chat: {tpot_ms: 60000}
  bulk: {tpot_ms: 60000, share: 0.5}
"""
SLOTS = 4


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Four requests at a time; sheds, and sends ORCA's header."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "slo.yaml").write_text(SLOS)
    config = AdaServeConfig(shed=True, orca=True, slo_config=str(folder / "slo.yaml"))
    spec = ServerSpec(
        size="12M", port=free_port(), config=config, extra=("--max-running-requests", str(SLOTS))
    )
    with ServerProcess(spec, log=folder / "server.log") as running:
        yield running


def complete(
    url: str, tokens: int = 24, path: str = "/v1/completions", stream: bool = False, **headers: str
) -> httpx.Response:
    body: dict[str, Any] = {"model": MODEL, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body["prompt"] = "import os\n"
    if path == "/generate":
        body = {"text": "import os\n", "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}
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
            found[name.removeprefix("adaserve:"), dict(labels).get("slo_class", "")] = value
    return found


class Background:
    """Requests that run for long, until the block ends."""

    def __init__(self, url: str, count: int, tokens: int = 1200, **headers: str) -> None:
        self._url, self._count, self._tokens, self._headers = url, count, tokens, headers

    def __enter__(self) -> None:
        self._pool = ThreadPoolExecutor(self._count)
        for _ in range(self._count):
            self._pool.submit(complete, self._url, self._tokens, **self._headers)
        end = time.monotonic() + 60
        while self._load()["num_running_reqs"] < self._count:
            assert time.monotonic() < end, f"{self._count} requests never ran together"
            time.sleep(0.1)
        time.sleep(1.5)  # a forecast is kept for a second

    def _load(self) -> dict[str, Any]:
        load: dict[str, Any] = httpx.get(f"{self._url}/v1/loads?include=core", timeout=30).json()["loads"][0]
        return load

    def __exit__(self, *_: object) -> None:
        body = {"rid": "", "abort_all": True}
        httpx.post(self._url + "/abort_request", json=body, timeout=30)
        self._pool.shutdown()
        end = time.monotonic() + 60
        while self._load()["num_running_reqs"]:
            assert time.monotonic() < end, "the server never became idle again"
            time.sleep(0.1)


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
    with Background(small.url, SLOTS, x_slo_class="chat"):
        busy = said(small.url)
        assert busy["classes"]["chat"]["wait_ms"] > 0, "all slots are taken"
        assert busy["classes"]["chat"]["headroom"] < chat["headroom"]
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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_a_lost_ttft_slo_is_answered_with_429(small: ServerProcess, path: str, stream: bool) -> None:
    assert complete(small.url, 4, path, stream, x_slo_ttft_ms="20000").status_code == 200
    with Background(small.url, SLOTS, x_slo_class="chat"):
        started = time.monotonic()
        answer = complete(small.url, 4, path, stream, x_slo_ttft_ms="300")
        assert answer.status_code == 429, answer.text
        assert time.monotonic() - started < 20
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert answer.headers["x-llm-d-request-dropped-reason"].startswith("rejected-")
        assert "TTFT SLO of 300 ms" in answer.text
        assert sum(v for (name, _), v in gauges(small.url).items() if name == "shed_requests_total") >= 1
    assert complete(small.url, 4, path, stream, x_slo_ttft_ms="20000").status_code == 200


def test_a_class_over_its_share_is_answered_with_429(small: ServerProcess) -> None:
    with Background(small.url, SLOTS, x_slo_class="bulk"):
        answer = complete(small.url, 4, x_slo_class="bulk")
        assert answer.status_code == 429 and "its share is 2" in answer.text
        assert answer.headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"


def test_orca_header_when_it_is_asked_for(small: ServerProcess, server: ServerProcess) -> None:
    text = complete(small.url, 4).headers["endpoint-load-metrics"]
    assert text.startswith("TEXT named_metrics.kv_cache_usage=") and "named_metrics.headroom_chat=" in text
    json_ = complete(small.url, 4, endpoint_load_metrics_format="JSON").headers["endpoint-load-metrics"]
    assert json_.startswith('JSON {"named_metrics": {')
    assert "endpoint-load-metrics" not in complete(server.url, 4).headers, "it is off by default"


def test_nobody_is_shed_by_default(server: ServerProcess) -> None:
    with Background(server.url, 8, tokens=200, x_slo_class="chat"):
        assert complete(server.url, 2, x_slo_ttft_ms="1").status_code == 200


def test_headers_of_routers_are_understood(server: ServerProcess, tmp_path: Path) -> None:
    report = complete(server.url, 4, x_sgl_tps_slo="40", x_sgl_ttft_slo_ms="9000").json()["metadata"]["slo"]
    assert (report["tpot_slo_ms"], report["ttft_slo_ms"]) == (25.0, 9000.0)
    answer = complete(server.url, 4, x_slo_tpot="40")
    assert answer.status_code == 400 and "did you mean x-slo-tpot-ms?" in answer.text
    for bad in ({"x_sgl_tps_slo": "fast"}, {"x_dynamo_request_priority": "high"}):
        assert complete(server.url, 4, **bad).status_code == 400
