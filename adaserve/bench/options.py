"""Options that several commands have: comma-separated lists."""

from __future__ import annotations

from collections.abc import Collection

import typer


def words(text: str) -> tuple[str, ...]:
    """``a,b`` -> (a, b), each once."""
    return tuple(dict.fromkeys(w.strip() for w in text.split(",") if w.strip()))


def floats(text: str) -> tuple[float, ...]:
    """``0.5,1`` -> (0.5, 1.0)."""
    try:
        return tuple(map(float, words(text)))
    except ValueError:
        raise typer.BadParameter(f"expected comma-separated numbers, not {text!r}") from None


def counts(text: str) -> tuple[int, ...]:
    """``1,8`` -> (1, 8); whole numbers from 1 on."""
    try:
        found = tuple(map(int, words(text)))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise typer.BadParameter(f"expected comma-separated whole numbers of at least 1, not {text!r}")
    return found


def known(option: str, given: Collection[str], accepted: Collection[str]) -> None:
    """Raises BadParameter where a list has words that the option does not know."""
    if wrong := set(given) - set(accepted):
        raise typer.BadParameter(f"{option} accepts {', '.join(accepted)}, not {', '.join(sorted(wrong))}")


def seeds(text: str) -> tuple[int, ...]:
    """``0,1`` -> (0, 1); ``x3`` -> (0, 1, 2)."""
    try:
        found = tuple(range(int(text[1:]))) if text.startswith("x") else tuple(map(int, words(text)))
    except ValueError:
        found = ()
    if not found or min(found) < 0:
        raise typer.BadParameter(f"expected whole numbers such as 0,1,2, or x3, not {text!r}")
    return found
