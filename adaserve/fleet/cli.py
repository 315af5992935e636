"""``adaserve fleet``: replicas behind a router, on one machine."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from adaserve.commands import flags, new_folder
from adaserve.options import TakesConfig
from adaserve.terminal import progress

if TYPE_CHECKING:
    from adaserve.fleet.local import Fleet

app = typer.Typer(help="Serve with several replicas behind a router.", no_args_is_help=True)
console = Console(stderr=True)


@app.callback()
def _fleet() -> None:
    """So that `up` stays a command of its own while it is the only one."""


@app.command(cls=TakesConfig, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def up(
    context: typer.Context,
    *,
    replicas: Annotated[
        int, typer.Option(min=1, help="Servers to start; they share this machine's cores.")
    ] = 2,
    router: Annotated[str, typer.Option(help="Router: sglang-router or smg.")] = "sglang-router",
    router_flags: Annotated[
        str, typer.Option(help="Flags for the router in one string, such as '--policy power_of_two'.")
    ] = "",
    host: Annotated[str, typer.Option(help="Address that the router listens on.")] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(min=1, max=65535, help="Port of the router; the replicas get the next ones."),
    ] = 30000,
    logs: Annotated[
        Path | None, typer.Option(help="Folder for logs.", show_default="a new one", callback=new_folder)
    ] = None,
) -> None:
    """Start replicas and a router in front of them, and watch over them until Ctrl-C.

    Flags of `adaserve serve` are accepted too, `--config FILE` included, and passed to each replica.
    Processes that die are started again. Ctrl-C waits for requests in flight; a second Ctrl-C does not.
    """
    from adaserve.fleet.local import Fleet

    of_router = flags(router_flags, "--router-flags")
    folder = Path(tempfile.mkdtemp(prefix="adaserve-fleet-")) if logs is None else logs
    try:
        fleet = Fleet.of(replicas, tuple(context.args), folder, router, of_router, host, port)
        folder.mkdir(parents=True, exist_ok=True)
        with progress(console, "starting") as show:
            fleet.up(show)
    except BaseException:
        if logs is None:
            with suppress(OSError):  # that it isn't empty: its logs say why
                folder.rmdir()
        raise
    _introduce(fleet)
    _serve(fleet)


def _introduce(fleet: Fleet) -> None:
    _say(f"router    {fleet.url}")
    for i, replica in enumerate(fleet.replicas):
        _say(f"replica {i + 1} {replica.url}   (live page: {replica.url}/slo)")
    for line in (f"logs      {fleet.router.log.parent}", *fleet.notes):
        _say(line)


def _say(text: str) -> None:
    """Prints, and ignores failures: Ctrl-C ends `| tee` as well, and a disk may be full. Requests go on."""
    with suppress(OSError):
        print(text, flush=True)


def _serve(fleet: Fleet) -> None:
    """Until Ctrl-C or SIGTERM, or until a replica or the router cannot be kept alive."""
    from adaserve.fleet.local import GRACE_S
    from adaserve.server import ServerError

    grace_s = float(GRACE_S)
    try:
        fleet.watch(_say)
    except ServerError:
        grace_s = 0.0
        raise
    finally:
        try:
            if grace_s:
                _say("waiting for the requests in flight; Ctrl-C stops now")
            fleet.down(grace_s)
        except BaseException:
            fleet.down(0.0)
            raise
