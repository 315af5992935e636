"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], right: bool | Sequence[bool] = False) -> str:
    """``right``: whether columns, all or each, are aligned to the right as figures are."""
    aligned = [right] * len(heads) if isinstance(right, bool) else right
    rule = "|" + "".join("--:|" if figures else "---|" for figures in aligned)
    head, *lines = ("| " + " | ".join(cells) + " |" for cells in (heads, *rows))
    return "\n".join((head, rule, *lines))
