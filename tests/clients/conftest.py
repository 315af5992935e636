"""One real server with the embedded pair, which clients that nobody here wrote talk to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from adaserve.config import AdaServeConfig
from adaserve.host.ports import free_port
from adaserve.server import ServerProcess, ServerSpec

MODEL = "adaserve-embedded"
SLOTS = 4
"""Requests that the small server runs at once."""
SLOS = """
classes:
  tight: {tpot_ms: 0.2}
  chat: {tpot_ms: 60000}
  bulk: {tpot_ms: 60000, running_share: 0.5}
"""


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The smallest widened target: what is tested here are the interfaces."""
    # A model that knows no JSON would fill it with blanks for ever.
    extra = ("--tool-call-parser", "qwen25", "--constrained-json-disable-any-whitespace")
    spec = ServerSpec(size="12M", port=free_port(), extra=extra)
    with ServerProcess(spec, log=tmp_path_factory.mktemp("server") / "server.log") as running:
        yield running


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Few requests at a time; sheds, and sends ORCA's header. SGLang itself does not look for clients that
    are gone, so that only our watch sees them."""
    folder = tmp_path_factory.mktemp("small")
    (folder / "slo.yaml").write_text(SLOS)
    config = AdaServeConfig(shed=True, orca=True, slo_config=str(folder / "slo.yaml"))
    spec = ServerSpec(
        size="12M", port=free_port(), config=config, extra=("--max-running-requests", str(SLOTS))
    )
    env = {"SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "600"}
    with ServerProcess(spec, log=folder / "server.log", env=env) as running:
        yield running


Counts = Callable[[], dict[str, int]]


def counter(server: ServerProcess) -> Counts:
    """Requests per SLO class that the server counts from now on."""

    def totals() -> dict[str, int]:
        time.sleep(1.1)  # a snapshot is shown for a second
        snapshot: dict[str, Any] = httpx.get(server.url + "/slo/snapshot.json", timeout=30).json()
        return {c["name"]: c["total_requests"] for c in snapshot["classes"]}

    before = totals()
    return lambda: {n: k - before.get(n, 0) for n, k in totals().items() if k > before.get(n, 0)}


@pytest.fixture
def counted(server: ServerProcess) -> Counts:
    """Requests per SLO class that the server has counted since the start of the test."""
    return counter(server)
