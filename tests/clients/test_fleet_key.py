"""A real router before replicas that want a key, as `adaserve fleet up --api-key` starts it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from adaserve.fleet.local import Fleet
from adaserve.host.ports import free_port

pytestmark = pytest.mark.skipif(
    find_spec("sglang_router") is None, reason="needs sglang-router: pip install 'adaserve[fleet]'"
)
KEY = {"Authorization": "Bearer K"}


class Replica(BaseHTTPRequestHandler):
    """As SGLang with --api-key: health checks need no key, everything else does."""

    def do_GET(self) -> None:
        allowed = self.path.startswith("/health") or self.headers["Authorization"] == KEY["Authorization"]
        body = json.dumps({"model_path": "m", "served_model_name": "m", "is_generation": True, "text": "hi"})
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    """Of a router that is yet to come; the replica listens on the one behind it."""
    wanted = free_port(3)
    with ThreadingHTTPServer(("127.0.0.1", wanted + 1), Replica) as replica:
        threading.Thread(target=replica.serve_forever, daemon=True).start()
        yield wanted
        replica.shutdown()


def test_the_router_has_the_key_of_its_replicas(port: int, tmp_path: Path) -> None:
    fleet = Fleet.of(1, ("--api-key", "K"), tmp_path, port=port)
    with fleet.router:
        end_s = time.monotonic() + 60
        while fleet.healthy() < 1:
            assert time.monotonic() < end_s, fleet.router.why()
            time.sleep(0.2)
        ask = {"text": "x", "sampling_params": {"max_new_tokens": 1}}
        answered = httpx.post(fleet.url + "/generate", json=ask, headers=KEY, timeout=30)
        assert answered.status_code == 200 and answered.json()["text"] == "hi"
        assert httpx.post(fleet.url + "/generate", json=ask, timeout=30).status_code == 401
        asked = httpx.get(fleet.url + "/workers", timeout=30)
        assert asked.status_code == 401, "nobody else may take replicas out"
