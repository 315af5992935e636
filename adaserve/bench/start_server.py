"""How the measuring commands start a server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
from rich.console import Console

from adaserve.errors import why_no_answer
from adaserve.host.ports import free_port
from adaserve.server import (
    START_TIMEOUT_S,
    ServerError,
    ServerProcess,
    ServerSpec,
    require_models,
)


@contextmanager
def running_server(
    spec: ServerSpec,
    log: Path,
    console: Console | None = None,
    env: Mapping[str, str] | None = None,
    limit_s: float = START_TIMEOUT_S,
) -> Iterator[ServerProcess]:
    """A server on a free port, stopped at the end; the console shows that it starts and stops.
    ``limit_s``: of the start.

    Raises ServerError, also if the server stops answering meanwhile: only here is it known where its log
    is."""
    console = console or Console(quiet=True)
    require_models(spec)
    log.parent.mkdir(parents=True, exist_ok=True)
    server = ServerProcess(replace(spec, port=free_port()), log, env)
    with console.status("starting the server") as status:
        server.start(lambda seconds: status.update(f"starting the server ({seconds:.0f} s)"), limit_s)
    try:
        yield server
    except httpx.HTTPError as error:
        if not asked(server, error):
            raise
        why = why_no_answer(error) if server.alive else f"it {server.how}:\n{server.why()}\n"
        raise ServerError(f"the server does not answer: {why} (full log: {log})") from error
    finally:
        with console.status("stopping the server"):
            server.stop()


def asked(server: ServerProcess, error: httpx.HTTPError) -> bool:
    """Whether it was this server that failed to answer, and not another one."""
    try:
        return str(error.request.url).startswith(server.url + "/")
    except RuntimeError:  # nothing was asked
        return False
