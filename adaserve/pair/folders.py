"""Where the embedded pair lies, and what a model's folder holds. Reads no weights, so it needs no PyTorch."""

from __future__ import annotations

import json
import os
import shutil
from importlib.resources import files
from pathlib import Path

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
    """Whether a model is there: packed, or plain in one file or several. Medusa heads are none."""
    return any((folder / name).exists() for name in (PACKED_NAME, PLAIN_NAME, f"{PLAIN_NAME}.index.json"))


def is_whole(folder: Path) -> bool:
    """Whether a model's folder is there, its weights are as long as they say, and the rest can be read: a
    machine that lost its power may have kept the names of files and not what was in them."""
    try:
        json.loads((folder / "config.json").read_text())
        weights = list(folder.glob("*.safetensors"))
        return (
            bool(weights) and all(map(_is_long_enough, weights)) and all(map(_is_readable, folder.iterdir()))
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # what damaged JSON may hold
        return False


def _is_readable(file: Path) -> bool:
    """Of a model's companion. Raises ValueError for one in JSON that is not."""
    if file.suffix == ".json":
        json.loads(file.read_bytes())
    return file.stat().st_size > 0


def _is_long_enough(file: Path) -> bool:
    """Of a safetensors file: 8 bytes with the length of its header, the header, the tensors."""
    size = file.stat().st_size
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if 8 + length > size:
            return False
        header = json.loads(f.read(length))
    ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    return size == 8 + length + max(ends, default=0)
