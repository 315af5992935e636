"""Counting with several HTTP processes, each with its own copy of SGLang's app, and with several ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from adaserve.host.ports import free_port
from adaserve.loadgen.server_metrics import REQUESTS, parse_metrics
from adaserve.server import ServerProcess, ServerSpec
from tests.clients.conftest import MODEL

pytestmark = pytest.mark.slow  # a server of its own


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    spec = ServerSpec(size="12M", port=free_port(), extra=("--tokenizer-worker-num", "2"))
    with ServerProcess(spec, log=tmp_path_factory.mktemp("workers") / "server.log") as running:
        yield running


def complete(url: str, slo_class: str) -> httpx.Response:
    body = {"model": MODEL, "prompt": "import os\n", "max_tokens": 6}
    # A connection of its own each time: the kernel hands it to either process.
    return httpx.post(f"{url}/v1/completions", json=body, headers={"x-slo-class": slo_class}, timeout=120)


def test_every_worker_reads_slos_and_counts_once(workers: ServerProcess) -> None:
    for _ in range(12):
        answer = complete(workers.url, "chat")
        assert answer.status_code == 200 and answer.json()["metadata"]["slo"]["class"] == "chat"
        assert complete(workers.url, "nobody").status_code == 400
    for _ in range(8):
        snapshot = httpx.get(workers.url + "/slo/snapshot.json", timeout=60).json()
        counts = {c["name"]: c["total_requests"] for c in snapshot["classes"]}
        assert counts["chat"] == 12 and snapshot["ranks"] == 1
        assert httpx.get(workers.url + "/slo", timeout=60).status_code == 200


def test_an_id_that_is_live_at_another_worker_is_refused(workers: ServerProcess) -> None:
    """Neither worker knows the other's ids; the scheduler does, and two in a batch would end it."""
    body = {
        "text": "import os\n",
        "rid": "the same everywhere",
        "sampling_params": {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True},
    }

    def generate(_: int) -> httpx.Response:
        return httpx.post(workers.url + "/generate", json=body, timeout=120)

    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(generate, range(12)))
    served = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 400]
    assert len(served) + len(refused) == 12 and served and refused
    assert any("still runs" in answer.text for answer in refused), "no request met one at the other worker"
    assert len({answer.json()["text"] for answer in served}) == 1
    assert complete(workers.url, "chat").status_code == 200


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Two data-parallel ranks; on a machine with one NUMA node SGLang wants to be told their cores."""
    spec = ServerSpec(size="12M", port=free_port(), extra=("--dp-size", "2", "--max-total-tokens", "16384"))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
        with ServerProcess(spec, log=tmp_path_factory.mktemp("ranks") / "server.log") as running:
            yield running


def test_ranks_are_added_up(ranks: ServerProcess) -> None:
    for _ in range(12):
        assert complete(ranks.url, "chat").status_code == 200
    snapshot = httpx.get(ranks.url + "/slo/snapshot.json", timeout=60).json()
    counts = {c["name"]: c["total_requests"] for c in snapshot["classes"]}
    assert counts["chat"] == 12 and snapshot["ranks"] == 2
    samples = parse_metrics(httpx.get(ranks.url + "/metrics", timeout=60).text)
    labels = {"slo_class": "chat", "objective": "all"}.items()
    counted = [v for (name, at), v in samples.items() if name == REQUESTS and labels <= dict(at).items()]
    assert sum(counted) == 12


def test_a_server_ends_with_its_scheduler(tmp_path: Path) -> None:
    """Whoever supervises it starts it again; a server that stays and answers nothing would never be."""
    spec = ServerSpec(size="12M", port=free_port(), extra=("--tokenizer-worker-num", "2"))
    with ServerProcess(spec, log=tmp_path / "server.log") as running:
        assert complete(running.url, "chat").status_code == 200
        (scheduler,) = (p for p in psutil.Process(running.pid).children(True) if "scheduler" in p.name())
        scheduler.kill()
        end = time.monotonic() + 30
        while running.alive and time.monotonic() < end:
            time.sleep(0.1)
        assert not running.alive
