"""Weights are written whole, whoever makes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from adaserve.host.files import write_atomically


def save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Replaces a safetensors file; others may read it as they may read any new file, unlike what safetensors
    writes itself. Raises OSError with a name."""
    write_atomically(file, save(dict(tensors), {"format": "pt"}))
