"""``adaserve draft``: versions of a draft that learns, as a server with ``--learn-folder`` keeps them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from adaserve.commands import empty_folder
from adaserve.terminal import say

app = typer.Typer(help="List, choose and export versions of a draft that learns.", no_args_is_help=True)
console = Console()

Folder = Annotated[Path, typer.Argument(help="The server's --learn-folder.", exists=True, file_okay=False)]
Number = Annotated[int, typer.Argument(help="Number of the version, from `adaserve draft history`.")]


@app.command()
def history(folder: Folder) -> None:
    """List the versions and their scores: expected accepted tokens of a chain of 4."""
    from adaserve.trainer.versions import Versions

    versions = Versions(folder)
    if not (known := versions.history()):
        say(console, f"{folder} holds no versions yet")
        return
    names = ("version", "when", "accepted", "before it", "first draft", "tokens", "weights")
    table = Table(*(Column(name, no_wrap=" " not in name) for name in names))
    for v in known:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(v.at))
        scores = (f"{s:.3f}" for s in (v.score, v.replaced, v.first))
        kept = "kept" if versions.has_weights(v) else "gone"
        table.add_row(str(v.number), when, *scores, f"{v.tokens:,}", kept)
    console.print(table)


@app.command()
def load(folder: Folder, number: Number) -> None:
    """Choose the version with which the server starts next time; 0 is the original draft."""
    from adaserve.trainer.versions import Versions

    Versions(folder).choose(number)


@app.command()
def save(
    folder: Folder,
    number: Number,
    out: Annotated[Path, typer.Argument(help="New folder for the checkpoint.", callback=empty_folder)],
) -> None:
    """Write a version as a checkpoint, for --draft-model-path of `adaserve serve`."""
    from adaserve.trainer.versions import Versions

    Versions(folder).export(number, out)
