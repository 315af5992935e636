"""Where the embedded pair lies, and what a model's folder holds. Reads no weights, so it needs no PyTorch."""

from __future__ import annotations

import json
import os
import shutil
from importlib.resources import files
from pathlib import Path

from safetensors import SafetensorError, safe_open

from adaserve.checkpoints.draft_kind import medusa_folder
from adaserve.errors import UserError
from adaserve.host import cache

WEIGHTS_VARIABLE = "ADASERVE_PAIR_WEIGHTS"
HEAD = "eagle3"
"""The folder of the embedded EAGLE-3 head, beside those of target and draft."""
MEDUSA = "medusa"
"""The folder of the embedded Medusa heads, in the form in which they are served."""
PACKED_NAME = "weights-int8.safetensors"
PLAIN_NAME = "model.safetensors"


class PairError(UserError):
    """The embedded pair cannot be provided; the message says what to do."""


def weights_folder() -> Path:
    """Where the shipped (or, through the environment, one's own) target and draft lie."""
    override = os.environ.get(WEIGHTS_VARIABLE)
    folder = Path(override) if override else Path(str(files("adaserve.pair").joinpath("weights")))
    for name in ("target", "draft"):
        if not has_weights(folder / name):
            raise PairError(
                f"no {name} model in {folder}; reinstall adaserve, train a pair with `adaserve pair train` "
                f"or set {WEIGHTS_VARIABLE} to a folder with target/ and draft/"
            )
    return folder


def cache_folder() -> Path:
    """Where widened models are kept."""
    return cache.cache_folder() / "pair"


def drafts_of(pair: Path) -> list[str]:
    """Folders of the draft model and of the heads that ``pair`` has."""
    plain = [name for name in ("draft", HEAD) if has_weights(pair / name)]
    return [*plain, *([MEDUSA] if medusa_folder(str(pair / MEDUSA), "auto") else [])]


def copy_companions(source: Path, out: Path) -> None:
    """Configuration, tokenizer and measurements of a model folder: its small JSON and template files."""
    out.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix in {".json", ".jinja"} and not file.name.endswith(".safetensors.index.json"):
            shutil.copy(file, out)


def has_weights(folder: Path) -> bool:
    """Whether a model is there: packed, or plain in one file or several. Medusa heads do not count."""
    return any((folder / name).exists() for name in (PACKED_NAME, PLAIN_NAME, f"{PLAIN_NAME}.index.json"))


def is_whole(folder: Path) -> bool:
    """Whether a model's folder is there and all of its files can be read: a machine that lost its power may
    have kept the names of files and not what was in them."""
    try:
        there = (folder / "config.json").exists() and any(folder.glob("*.safetensors"))
        return there and all(map(_is_readable, folder.iterdir()))
    except (OSError, ValueError, SafetensorError):
        return False


def _is_readable(file: Path) -> bool:
    """Whether a file holds anything. Raises ValueError for damaged JSON, SafetensorError for weights that are
    not as long as their header says."""
    if file.suffix == ".json":
        json.loads(file.read_bytes())
    elif file.suffix == ".safetensors":
        with safe_open(file, "np"):
            pass
    return file.stat().st_size > 0
