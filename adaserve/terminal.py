"""How sentences are printed where people read them."""

from __future__ import annotations

from rich.console import Console


def say(console: Console, text: str) -> None:
    """Prints sentences as they are: paths and messages may hold brackets, and must not be cut in two."""
    console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)
