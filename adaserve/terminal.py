"""Prints sentences for people to read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape


def say(console: Console, text: str) -> None:
    """Prints sentences as they are: paths and messages may hold brackets, and must not be cut in two."""
    console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)


@contextmanager
def progress(console: Console, first: str) -> Iterator[Callable[[str], None]]:
    """Shows what is going on, in a terminal in one line that changes. In a log each step is a line, without
    the seconds in parentheses that it has taken."""
    if console.is_terminal:
        with console.status(first) as status:
            yield lambda text: status.update(escape(text))
        return
    last = ""

    def show(text: str) -> None:
        nonlocal last
        if (step := text.partition(" (")[0]) != last:
            say(console, step)
            last = step

    yield show
