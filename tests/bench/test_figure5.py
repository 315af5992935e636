"""The picture of Figure 5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adaserve.bench import figure5


def test_picture_is_drawn(tmp_path: Path) -> None:
    figure5.draw(tmp_path / "figure5.png")
    assert (tmp_path / "figure5.png").read_bytes()[:4] == b"\x89PNG"


def test_numbers_in_coloured_nodes_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grey of all other figures is as dark as the blue of a node."""
    drawn: list[Any] = []
    monkeypatch.setattr(figure5, "save", lambda figure, _: drawn.append(figure))
    figure5.draw(Path("unused"))
    labels = [text for figure in drawn for ax in figure.axes for text in ax.texts]
    assert len(labels) == 2 * 10 and {text.get_color() for text in labels} == {"black"}
