"""Errors that a person sees as one sentence, without a traceback."""

from __future__ import annotations

import os
from pathlib import Path


class UserError(Exception):
    """The request, the host or a server is at fault; the message says what to do."""


class UnsupportedError(UserError, ValueError):
    """These models cannot be served with these flags on this host."""


def why_no_answer(error: Exception) -> str:
    """What went wrong, in one line: some of httpx's errors have several, some only their name."""
    return (str(error).splitlines() or [""])[0].strip() or type(error).__name__


def why_not_new(path: Path) -> str | None:
    """Why results cannot go to the folder ``path``, which must hold nothing yet; None where they can."""
    try:
        if path.exists() and not path.is_dir():
            return f"{path} is a file: give a folder for the results"
        if path.exists() and any(path.iterdir()):
            return f"{path} is not empty: give another folder, results are not overwritten"
    except OSError as error:
        return f"cannot read the folder {path} ({error.strerror}): give another one"
    return None


def why_unwritable(path: Path) -> str | None:
    """Why a file or folder cannot be made at ``path``, with all folders above it; None where it can."""
    nearest = next(p for p in (path, *path.absolute().parents) if p.exists())
    if nearest != path and not nearest.is_dir():
        return f"{nearest} is a file: give another path"
    return None if os.access(nearest, os.W_OK) else f"{nearest} cannot be written to: give another path"
