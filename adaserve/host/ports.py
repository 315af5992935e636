"""TCP ports of this host: which are free, and one for each server that tools start."""

from __future__ import annotations

import errno
import secrets
import socket
from contextlib import ExitStack, suppress

from adaserve.errors import UserError

_PORTS = range(10_000, 22_000)
"""Below those that SGLang takes for itself, and that Linux, macOS and Windows give to connections."""
_claims = list[ExitStack]()
"""Sockets of all ports that ``free_port`` gave away, which stay open as long as this process."""


def why_not_free(host: str, port: int) -> str | None:
    """Why a server cannot listen there now; None where it can."""
    try:
        for family, *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family) as s:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections don't count
                s.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"port {port} is in use: choose another with --port"
        return f"cannot listen on {host}:{port} ({error.strerror}): choose another --host or --port"
    return None


def free_port(in_a_row: int = 1) -> int:
    """The first of ``in_a_row`` TCP ports of the loopback interface that nobody uses now, and nobody else is
    given. Raises UserError.

    A server binds it half a minute after it was chosen. Meanwhile it opens dozens of connections, each at a
    port that the kernel chooses, and SGLang takes free ports for itself. Processes that choose at the same
    time see from each other's UDP sockets which ports are taken."""
    for _ in range(100):
        first = secrets.choice(_PORTS[: len(_PORTS) - in_a_row + 1])
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + in_a_row):
                claim = stack.enter_context(socket.socket(type=socket.SOCK_DGRAM))
                claim.bind(("127.0.0.1", port))
                with socket.socket() as s:
                    s.bind(("127.0.0.1", port))
            _claims.append(stack.pop_all())
            return first
    raise UserError(f"no port between {_PORTS.start} and {_PORTS.stop} is free: choose one with --port")
