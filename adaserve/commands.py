"""What commands have in common: groups of options, and how they end.

If its user, the host or a server is the cause, a command ends with one sentence and exit code 2. An error of
this program itself has a traceback and Python's exit code 1, so no command gives that code a meaning.
"""

from __future__ import annotations

import errno
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from adaserve.errors import UserError, why_no_answer, why_not_new, why_unwritable

COULD_NOT = 2
"""Exit code: it could not be done."""

NO = 3
"""Exit code: it was done, and the answer is no: something is missing, a target was missed."""

DOES_NOT_COUNT = 4
"""Exit code: it was done, but the result is not valid, or part of it is left."""

_NO_NUMBERS = ("nan", "inf", "infinity")


class Commands(TyperGroup):
    """Commands, and groups of them, below one name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """No number that a command takes may be NaN or infinite, and Python reads both."""
        for word in args:
            if word.rpartition("=")[2].strip("+-").lower() in _NO_NUMBERS:
                fail(f"{word} is not a finite number")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            if (why := in_one_line(error)) is None:
                raise
            fail(why)


def fail(why: str) -> NoReturn:
    """Ends the command with this sentence."""
    console = Console(stderr=True, emoji=False)  # a trace may be called synthetic:100:2
    console.print(f"[red]error:[/] {escape(why)}", highlight=False, soft_wrap=True)
    raise typer.Exit(COULD_NOT)


def in_one_line(error: Exception) -> str | None:
    """What to tell the user; None for an error of this program, which needs its traceback."""
    import httpx

    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, httpx.HTTPError):
        return f"a server did not answer: {why_no_answer(error)}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, FileNotFoundError) and "temporary" in str(error):  # of the module tempfile
        return f"{error.strerror}: set TMPDIR to a folder that can be written to"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.strerror}: make room for what this command writes or prints"
    return None


def panel(title: str) -> Callable[..., Any]:
    """Makes options that ``--help`` shows under one title."""

    def option(text: str, *flags: str, **settings: Any) -> Any:
        if "parser" in settings:  # typer would show the name of a type
            settings["metavar"] = "A,B"
        return typer.Option(*flags, help=text, rich_help_panel=title, **settings)

    return option


def given(context: typer.Context) -> set[str]:
    """The command's options that somebody gave, by their names as parameters."""
    asked = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in asked.items() if source is not None and source.name != "DEFAULT"}


def flags(text: str, option: str) -> tuple[str, ...]:
    """The words of an option that holds flags for another program. Raises BadParameter."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise typer.BadParameter(f"{option} cannot be read as flags ({error}): {text}") from None


def new_file(path: Path | None) -> Path | None:
    """Callback of an option for a file that is written at the end: refused now where that cannot be."""
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"{path} is a folder: give a file")
    return _makeable(path)


def new_folder(path: Path | None) -> Path | None:
    """The same for a folder."""
    if path is not None and path.exists() and not path.is_dir():
        raise typer.BadParameter(f"{path} is a file: give a folder")
    return _makeable(path)


def empty_folder(path: Path) -> Path:
    """The same for a folder that must hold nothing yet."""
    if (why := why_not_new(path)) is not None:
        raise typer.BadParameter(why)
    new_folder(path)
    return path


def _makeable(path: Path | None) -> Path | None:
    if path is not None and (why := why_unwritable(path)) is not None:
        raise typer.BadParameter(why)
    return path
