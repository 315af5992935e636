"""How the measuring commands start a server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from adaserve.server import ServerProcess, ServerSpec, free_port


@contextmanager
def running(
    spec: ServerSpec, log: Path, console: Console | None = None, env: Mapping[str, str] | None = None
) -> Iterator[ServerProcess]:
    """A server on a free port, stopped at the end; the console shows that it starts and stops.

    Raises ServerError."""
    console = console or Console(quiet=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    server = ServerProcess(replace(spec, port=free_port()), log, env)
    with console.status("starting the server") as status:
        server.start(lambda seconds: status.update(f"starting the server ({seconds:.0f} s)"))
    try:
        yield server
    finally:
        with console.status("stopping the server"):
            server.stop()
