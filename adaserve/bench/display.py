"""The progress bars and tables of the measuring commands."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


def progress(console: Console) -> Progress:
    """A progress bar with steps done, steps in total and the time left.

    Descriptions are shown as they are: the trace synthetic:100:2.5 holds the name of an emoji."""
    what = TextColumn("{task.description}", markup=False)
    return Progress(what, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console)


def table(title: str, heads: Sequence[str], left: Sequence[str] = ()) -> Table:
    """An empty table; columns named in ``left`` hold words, the others figures."""
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title)
    for head in heads:
        made.add_column(head, justify="left" if head in left else "right", no_wrap=True)
    return made
