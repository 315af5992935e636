"""Kinds of options that several commands have: comma-separated lists, and where results go."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

import typer

from adaserve.commands import empty_folder, new_file

Number = TypeVar("Number", int, float)


def listed(parser: Callable[[str], Any], text: str, *flags: str, **settings: Any) -> Any:
    """An option that takes a comma-separated list, which ``parser`` reads; ``text`` is its help."""
    return typer.Option(*flags, parser=parser, metavar="A,B", help=text, **settings)


def results_folder(tag: str, callback: Callable[[Path], Any] = empty_folder) -> Any:
    """An option for the folder of a command whose results are called ``tag``; by default a new one. Unless
    ``callback`` says otherwise, one that holds anything is refused: results are not overwritten."""
    return typer.Option(
        help="Results folder.",
        show_default=f"results/<UTC>-{tag}",
        default_factory=lambda: _new_folder(tag),
        callback=callback,
    )


def results_file(tag: str) -> Any:
    """The same for a command that writes one file."""
    return typer.Option(
        help="JSON file to write.",
        show_default=f"in results/<UTC>-{tag}",
        default_factory=lambda: _new_folder(tag) / f"{tag}.json",
        callback=new_file,
    )


def _new_folder(tag: str) -> Path:
    from adaserve.loadgen.results import new_results_dir

    return new_results_dir(Path("results"), tag)


def words(text: str) -> tuple[str, ...]:
    """``a,b`` -> (a, b), each once."""
    return tuple(dict.fromkeys(w.strip() for w in text.split(",") if w.strip()))


def _each_once(values: Iterable[Number]) -> tuple[Number, ...]:
    """``1,1.0`` is one number."""
    return tuple(dict.fromkeys(values))


def floats(text: str) -> tuple[float, ...]:
    """``0.5,1`` -> (0.5, 1.0)."""
    try:
        found = _each_once(map(float, words(text)))
    except ValueError:
        found = (math.nan,)
    if not found or not all(map(math.isfinite, found)):
        raise typer.BadParameter(f"expected comma-separated numbers, not {text!r}")
    return found


def counts(text: str) -> tuple[int, ...]:
    """``1,8`` -> (1, 8); whole numbers from 1 on."""
    try:
        found = _each_once(map(int, words(text)))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise typer.BadParameter(f"expected comma-separated whole numbers of at least 1, not {text!r}")
    return found


def known(option: str, given: Collection[str], accepted: Collection[str]) -> None:
    """Raises BadParameter if a list has words that the option does not know."""
    if wrong := set(given) - set(accepted):
        raise typer.BadParameter(f"{option} accepts {', '.join(accepted)}, not {', '.join(sorted(wrong))}")


def seed_list(text: str) -> tuple[int, ...]:
    """``0,1`` -> (0, 1); ``x3`` -> (0, 1, 2)."""
    try:
        found = tuple(range(int(text[1:]))) if text.startswith("x") else _each_once(map(int, words(text)))
    except ValueError:
        found = ()
    if not found or min(found) < 0:
        raise typer.BadParameter(f"expected whole numbers such as 0,1,2, or x3, not {text!r}")
    return found
