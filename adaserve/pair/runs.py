"""Notes in a folder which training run it holds, so that only the same run goes on there.

A run notes its settings before it does anything else, and at its end that it is finished. So a checkpoint,
and the text that a target has written, only ever serve the run that they were made for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from adaserve.host.files import write_json
from adaserve.pair.folders import PairError

NAME = "run.json"
Settings = Mapping[str, str | int | float | None]


def begin(folder: Path, settings: Settings) -> None:
    """Begins a run in ``folder``, or goes on with it. Raises PairError if the folder holds another run, or
    one that is finished."""
    note = folder / NAME
    if note.exists():
        found = json.loads(note.read_text())
        if found["finished"]:
            raise PairError(
                f"{folder} holds a run that is finished: delete that folder to train afresh, or give another "
                "--work folder"
            )
        if differences := _differences(found["settings"], settings):
            raise PairError(
                f"{folder} holds an unfinished run with other settings ({', '.join(differences)}): give the "
                "earlier ones to go on with it, delete that folder to start afresh, or give another --work "
                "folder"
            )
    elif folder.exists() and any(folder.iterdir()):
        raise PairError(
            f"{folder} holds a run whose settings are not known: delete that folder to start afresh, or give "
            "another --work folder"
        )
    _write(folder, settings, finished=False)


def finish(folder: Path, settings: Settings) -> None:
    """Notes that the run is finished."""
    _write(folder, settings, finished=True)


def _differences(earlier: Settings, now: Settings) -> list[str]:
    names = [n for n in {**earlier, **now} if earlier.get(n) != now.get(n)]
    return [f"{n} was {earlier.get(n)}, is {now.get(n)}" for n in names]


def _write(folder: Path, settings: Settings, *, finished: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / NAME, {"finished": finished, "settings": settings})
