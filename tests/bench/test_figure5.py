"""The picture of Figure 5."""

from __future__ import annotations

from pathlib import Path

from adaserve.bench import figure5


def test_picture_is_drawn(tmp_path: Path) -> None:
    figure5.draw(tmp_path / "figure5.png")
    assert (tmp_path / "figure5.png").read_bytes()[:4] == b"\x89PNG"
