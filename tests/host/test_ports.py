"""Ports of this host: free ones, and who gets them."""

from __future__ import annotations

import socket
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest

from adaserve.errors import UserError
from adaserve.host import ports
from adaserve.host.ports import free_port


def test_free_ports_are_none_that_connections_or_sglang_get() -> None:
    from sglang.srt.utils.network import get_free_port_below_ephemeral

    given_away = {free_port() for _ in range(50)}
    assert len(given_away) == 50, "two servers that are started together would get the same"
    lowest: int = signature(get_free_port_below_ephemeral).parameters["low"].default
    assert max(given_away) < lowest, "a server would listen on its own port for something else"
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if first < ports._PORTS.stop:
        pytest.skip(f"connections of this host get ports from {first} on, below the usual 32768")
    with socket.create_server(("127.0.0.1", 0)) as given:
        assert max(given_away) < given.getsockname()[1]


def test_a_port_in_use_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as used:
        port = used.getsockname()[1]
        monkeypatch.setattr(ports, "_PORTS", range(port, port + 1))
        with pytest.raises(UserError, match="choose one with --port"):
            free_port()


def test_ports_in_a_row_are_all_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet takes those that follow the router's, too."""
    first = free_port(2)
    monkeypatch.setattr(ports, "_PORTS", range(first, first + 2))
    with pytest.raises(UserError, match="is free"):
        free_port()
    ports._claims.pop().close()
    with socket.create_server(("127.0.0.1", first + 1)):
        with pytest.raises(UserError, match="is free"):
            free_port(2)
        assert free_port() == first, "what was tried in vain is let go"


def test_two_processes_never_get_the_same_port() -> None:
    """Nobody listens there yet."""
    port = free_port()
    code = f"from adaserve.host import ports; ports._PORTS = range({port}, {port + 1}); ports.free_port()"
    other = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert other.returncode == 1 and f"no port between {port} and" in other.stderr, other.stderr
