"""Speedups of several ways to draft, by requests and context: table, figure, and where they rise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adaserve.bench import markdown
from adaserve.bench.context.speedup import SINKS, Speedup, rises
from adaserve.host.files import write_json
from adaserve.loadgen.figures import color, legend, panels, save


@dataclass(frozen=True)
class Mode:
    """A way to draft: with a model, or the target itself, that reads all or the sinks and a window."""

    is_self: bool
    window: int  # 0 = all

    @property
    def name(self) -> str:
        who = "self" if self.is_self else "draft"
        return f"{who} {self.window}" if self.window else f"{who} full"

    def reads(self, context: int) -> int:
        """Cached tokens of one request that a step reads."""
        return min(context, self.window + SINKS) if self.window else context


@dataclass(frozen=True)
class Cell:
    """The best tree of one mode for ``requests`` requests with ``context`` cached tokens each."""

    requests: int
    context: int
    mode: str
    acceptance: float
    best: Speedup

    @property
    def tokens_per_s(self) -> float:
        """Of all requests together, with this mode's best tree."""
        return self.requests / self.best.plain_s * self.best.ratio

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "speedup": self.best.ratio, "tokens_per_s": self.tokens_per_s}


def winner(cells: Sequence[Cell]) -> str:
    """The mode with the largest speedup; "plain" if none is above 1."""
    best = max(cells, key=lambda c: c.best.ratio)
    return best.mode if best.best.ratio > 1 else "plain"


def rising_from(cells: Sequence[Cell], mode: str) -> int | None:
    """The shortest measured context from which on the mode's speedup grows with every step in requests. One
    with a single number of requests, because more do not fit, says nothing about that."""
    found = None
    mine = [c for c in cells if c.mode == mode]
    for context in sorted({c.context for c in mine}, reverse=True):
        row = sorted((c for c in mine if c.context == context), key=lambda c: c.requests)
        if len(row) < 2:
            continue
        if not rises([c.best.ratio for c in row]):
            break
        found = context
    return found


def table(cells: Sequence[Cell]) -> str:
    """Markdown: one row per requests, context and mode, and where speedups rise with the requests."""
    heads = ("context", "requests", "plain ms", "mode", "acceptance", "tree", "T_D/T", "T_V/T", "tokens",
             "tokens/s", "speedup", "")  # fmt: skip
    rows = []
    for context, requests in sorted({(c.context, c.requests) for c in cells}):
        here = [c for c in cells if (c.context, c.requests) == (context, requests)]
        first = winner(here)
        for c in here:
            b = c.best
            rows.append([
                str(context), str(requests), f"{1e3 * b.plain_s:.1f}", c.mode,
                f"{c.acceptance:.2f}", f"{b.depth} x {b.width}", f"{b.draft_step_s / b.plain_s:.2f}",
                f"{b.verify_s / b.plain_s:.2f}", f"{b.tokens:.2f}", f"{c.tokens_per_s:.0f}", f"{b.ratio:.2f}",
                "*" if c.mode == first else "",
            ])  # fmt: skip
    figures = [head not in ("mode", "") for head in heads]
    lines = [markdown.table(heads, rows, figures), "", "Speedup grows with every step in requests:", ""]
    for mode in dict.fromkeys(c.mode for c in cells):
        length = rising_from(cells, mode)
        lines.append(f"- {mode}: {'at no context' if length is None else f'from {length} tokens on'}")
    return "\n".join(lines)


def figure(cells: Sequence[Cell], title: str) -> Any:
    """Speedup against requests, one panel per context, one line per mode (as MagicDec's figures)."""
    contexts = sorted({c.context for c in cells})
    made, axes = panels(len(contexts), width=3.4, height=3.2)
    for ax, context in zip(axes, contexts, strict=True):
        for number, mode in enumerate(dict.fromkeys(c.mode for c in cells)):
            line = sorted((c.requests, c.best.ratio) for c in cells if (c.context, c.mode) == (context, mode))
            ax.plot(*zip(*line, strict=True), marker="o", label=mode, color=color(number))
        ax.axhline(1.0, color="#8c8c8c", linewidth=0.8)
        ax.set_xscale("log", base=2)
        ax.set_xlabel("requests")
        ax.set_title(f"{context} cached tokens each")
    axes[0].set_ylabel("tokens/s over plain decoding")
    made.suptitle(title)
    legend(made, axes[0])
    return made


def write(
    folder: Path, name: str, title: str, text: str, cells: Sequence[Cell], more: Mapping[str, Any]
) -> None:
    """``NAME.json`` with the cells and ``more``, ``NAME.md`` with ``text``, and ``NAME.png``."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{name}.json", {**more, "cells": [cell.record() for cell in cells]})
    (folder / f"{name}.md").write_text(text + "\n", encoding="utf-8")
    save(figure(cells, title), folder / f"{name}.png")
