"""Counting with several HTTP processes: each of them has its own copy of SGLang's app."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from adaserve.server import Server, ServerSpec, free_port
from tests.clients.conftest import MODEL

pytestmark = pytest.mark.slow  # a server of its own


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    spec = ServerSpec(size="12M", port=free_port(), extra=("--tokenizer-worker-num", "2"))
    with Server(spec, log=tmp_path_factory.mktemp("workers") / "server.log") as running:
        yield running


def complete(url: str, slo_class: str) -> httpx.Response:
    body = {"model": MODEL, "prompt": "import os\n", "max_tokens": 6}
    # A connection of its own each time: the kernel hands it to either process.
    return httpx.post(f"{url}/v1/completions", json=body, headers={"x-slo-class": slo_class}, timeout=120)


def test_every_worker_reads_slos_and_counts_once(workers: Server) -> None:
    for _ in range(12):
        answer = complete(workers.url, "chat")
        assert answer.status_code == 200 and answer.json()["metadata"]["slo"]["class"] == "chat"
        assert complete(workers.url, "nobody").status_code == 400
    for _ in range(8):
        snapshot = httpx.get(workers.url + "/slo/snapshot.json", timeout=60).json()
        counts = {c["name"]: c["total_requests"] for c in snapshot["classes"]}
        assert counts["chat"] == 12 and snapshot["ranks"] == 1
        assert httpx.get(workers.url + "/slo", timeout=60).status_code == 200
