"""Which weights a model has, whatever its folder is called."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
_DIGITS = 16


def weight_files(folder: Path) -> list[Path]:
    """Of a model, in whatever format; in a fixed order."""
    return sorted(file for pattern in _WEIGHTS for file in folder.glob(pattern))


def fingerprint(folder: Path) -> str:
    """Of the weights in a model's folder, every byte of them; "" where there are none."""
    files = weight_files(folder)
    if not files:
        return ""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0")
        with file.open("rb") as f:
            digest.update(hashlib.file_digest(f, "sha256").digest())
    return digest.hexdigest()[:_DIGITS]


def local_folder(model: str, revision: str | None = None) -> str:
    """Where the weights of a model lie on this host, wherever it is asked from: of one on a hub, those of the
    ``revision`` that is served. The name itself where they are not here."""
    from transformers.utils import cached_file

    if Path(model).is_dir():
        return os.path.abspath(model)
    try:
        folder = Path(cached_file(model, "config.json", revision=revision, local_files_only=True)).parent
    except (OSError, ValueError):
        return model
    return str(folder) if weight_files(folder) else model
