"""The picture of Figure 5."""

from __future__ import annotations

from pathlib import Path

from adaserve.bench import example


def test_picture_is_drawn(tmp_path: Path) -> None:
    example.draw(tmp_path / "figure5.png")
    assert (tmp_path / "figure5.png").read_bytes()[:4] == b"\x89PNG"
