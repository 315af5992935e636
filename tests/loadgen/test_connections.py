"""How the load generator reaches a server, and what it says of one that answers nothing."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from fake_server import running_fake
from rich.console import Console
from test_commands import bench

from adaserve.loadgen import cli, preflight, stream
from adaserve.loadgen.config import BenchConfig, Endpoint, secret_headers


def found(*addresses: tuple[str, int]) -> list[Any]:
    """As getaddrinfo says it."""
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in addresses]


def test_every_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """localhost is ::1 first on many machines, and servers listen on 127.0.0.1."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # a port on which nobody listens
        addresses = found(closed.getsockname(), server.getsockname())
        monkeypatch.setattr(stream.socket, "getaddrinfo", lambda *_: addresses)
        target = stream.Target(Endpoint(url="http://localhost:1"))
        for _ in range(2):
            with target.connect() as sock:
                assert sock.getpeername() == server.getsockname()
        assert target._addresses[0][1] == server.getsockname(), "the one that answered is tried first"


def test_a_name_without_a_server_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(stream.socket, "getaddrinfo", lambda *_: found(closed.getsockname()))
        with pytest.raises(ConnectionRefusedError):
            stream.Target(Endpoint(url="http://localhost:1")).connect()


@pytest.mark.parametrize("name", ["http_proxy", "ALL_PROXY"])
def test_a_proxy_of_the_environment_is_not_asked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load goes straight to the server, so that nothing else is measured; so must what precedes it."""
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with running_fake() as fake:
        assert preflight.get_json(Endpoint(url=fake.url), "/v1/models")["data"] == [{"id": "fake"}]


def test_a_run_whose_requests_all_failed_is_not_valid(tmp_path: Path) -> None:
    with running_fake(token_ms=1, error_after=1) as fake:
        done = bench(fake, tmp_path / "r", "--duration", "1", "--rps", "5")
    summary = json.loads((tmp_path / "r/summary.json").read_text())
    n = summary["requests"]
    assert n and not summary["valid"] and f"all {n} requests failed" in summary["invalid_reasons"]
    assert done.returncode == 4
    assert f"all {n} requests failed" in done.stderr and f"{n} x the fake broke" in done.stderr


def test_what_a_server_says_is_not_markup(tmp_path: Path) -> None:
    console, summary = Console(record=True, width=200), {"by_class": {}, **dict.fromkeys(ALL)}
    said = {"invalid_reasons": ["at [/x] it ended"], "errors": {"HTTP 400: no [/foo] in [bar]": 3}}
    counts = {"requests": 3, "failed": 3, "tokens_guessed": 0}
    cli._print_outcome(summary | counts | said, tmp_path, console)
    text = console.export_text()
    assert "3 x HTTP 400: no [/foo] in [bar]" in text and "at [/x] it ended" in text


ALL = ("slo_tpot_ms", "mean_tpot_ms", "p99_tpot_ms", "median_ttft_ms", "slo_attainment", "token_goodput",
       "accept_length")  # fmt: skip


@pytest.mark.parametrize(
    "name", ["X-Auth-Token", "X-Secret", "Cookie", "X-Api-Key", "Authorization", "X-Amz-Signature"]
)
def test_headers_with_secrets_are_written_nowhere(name: str, tmp_path: Path) -> None:
    server = Endpoint(headers={name: "hush-hush", "x-tenant": "lab"})
    BenchConfig(server=server).save(tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    assert "hush-hush" not in text and "x-tenant: lab" in text
    assert secret_headers(server) == {name: "hush-hush"}, "they still reach the server"


def test_a_trace_brings_its_own_lengths(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"timestamp": 0, "input_length": 5, "output_length": 5}\n')
    with running_fake() as fake:
        done = bench(fake, tmp_path / "r", "--trace", str(tmp_path / "t.jsonl"))
    assert done.returncode == 2 and "leave --output-tokens out" in done.stderr
