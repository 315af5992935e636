"""Makes the shipped models as expensive as models of a chosen size without changing what they say.

``widened_tensors`` says how; here are their sizes, and the folders that they are written to.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from adaserve.checkpoints.draft_kind import medusa_folder
from adaserve.pair.eagle import HeadShape, head_config, head_shape_of
from adaserve.pair.folders import (
    HEAD,
    PLAIN_NAME,
    PairError,
    cache_folder,
    copy_companions,
    has_weights,
    is_whole,
    weights_folder,
)
from adaserve.pair.packed import read_weights, unpack
from adaserve.pair.shape import Shape, hf_config, parse_size, shape_of
from adaserve.pair.widened_tensors import head_tensors, model_tensors

DEFAULT_PARAMETERS = 100_000_000
_FORMAT = 2  # part of the cache key: raise it when the files below change
_WIDTH_STEP = 256  # widths that divide evenly over SIMD lanes and tensor-parallel ranks
_SHARD_BYTES = 2_000_000_000


@dataclass(frozen=True)
class Width:
    """What to widen to: total parameters, and layers beyond the shipped ones. ``hidden`` and ``vocabulary``
    0: as shipped; a larger hidden size brings heads along, half as many per dimension."""

    parameters: int = DEFAULT_PARAMETERS
    extra_layers: int = 0
    hidden: int = 0
    vocabulary: int = 0

    def __post_init__(self) -> None:
        if self.parameters < 1 or self.extra_layers < 0:
            raise PairError(
                f"cannot widen to {self.parameters} parameters and {self.extra_layers} extra layers"
            )
        if self.vocabulary and not self.hidden:
            raise PairError("a larger vocabulary needs a larger hidden size: new tokens take a dimension")

    @property
    def name(self) -> str:
        """Part of a folder's name."""
        parts = [str(self.parameters)]
        parts += [f"{self.extra_layers}-extra-layers"] if self.extra_layers else []
        parts += [f"{self.hidden}-hidden"] if self.hidden else []
        parts += [f"{self.vocabulary}-tokens"] if self.vocabulary else []
        return "-".join(parts)


@dataclass(frozen=True)
class HeadSize:
    """What to widen an EAGLE-3 head to, over a widened target: total parameters, and tokens that it knows."""

    parameters: int
    vocabulary: int


def widened_shape(shape: Shape, width: Width) -> Shape:
    """The nearest shape with at least the shipped MLP width. Raises PairError."""
    deeper = replace(shape, layers=shape.layers + width.extra_layers)
    if width.hidden:
        times, rest = divmod(width.hidden, shape.hidden)
        if times < 2 or rest or 0 < width.vocabulary <= shape.vocab:
            raise PairError(
                f"cannot widen a hidden size of {shape.hidden} to {width.hidden} and {shape.vocab} tokens to "
                f"{width.vocabulary}: give a multiple of the size, and more tokens or none"
            )
        deeper = replace(
            deeper,
            hidden=width.hidden,
            heads=shape.heads * (times // 2),
            kv_heads=shape.kv_heads * (times // 2),
            head_width=shape.head_dim,
            vocab=width.vocabulary or shape.vocab,
            tied=not width.vocabulary,
        )
    missing = width.parameters - replace(deeper, mlp=0).parameters
    return replace(deeper, mlp=max(_columns(missing, deeper), shape.mlp))


def _columns(parameters: int, shape: Shape) -> int:
    """MLP width at which the MLPs of all layers have about so many parameters together."""
    return round(parameters / (3 * shape.hidden * shape.layers) / _WIDTH_STEP) * _WIDTH_STEP


def _save(portions: Iterator[dict[str, Tensor]], folder: Path) -> None:
    """Shards of about two gigabytes, so that a large target never stands in memory as a whole."""
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        save_file(pending, folder / f"part-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for portion in portions:
        pending.update(portion)
        total += sum(t.nbytes for t in portion.values())
        if sum(t.nbytes for t in pending.values()) > _SHARD_BYTES:
            flush()
    if pending:
        flush()
    _name_shards(folder, shards, total)


def _name_shards(folder: Path, shards: list[list[str]], total: int) -> None:
    if len(shards) == 1:
        (folder / "part-0").rename(folder / PLAIN_NAME)
        return
    where: dict[str, str] = {}
    for index, names in enumerate(shards):
        file = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"part-{index}").rename(folder / file)
        where.update(dict.fromkeys(names, file))
    index_json = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=1))


def widen(source: Path, out: Path, width: Width) -> Shape:
    """Writes the widened copy of the model in `source` to the new folder `out`, tokenizer included."""
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    old = shape_of(config)
    new = widened_shape(old, width)
    _require_disk(out.parent, 2 * new.parameters)
    with _published(out) as folder:
        copy_companions(source, folder)
        _save(model_tensors(read_weights(source), old, new), folder)
        more = {"rms_norm_eps": config["rms_norm_eps"] * old.hidden / new.hidden}
        (folder / "config.json").write_text(json.dumps({**config, **hf_config(new), **more}, indent=2) + "\n")
    return new


def widen_head(source: Path, target: Path, out: Path, size: HeadSize) -> HeadShape:
    """Writes the head in `source` for a widened `target` to the new folder `out`. Raises PairError."""
    config, wide = (json.loads((folder / "config.json").read_text()) for folder in (source, target))
    old, small, over = head_shape_of(config), shape_of(config), shape_of(wide)
    most = old.vocab + over.vocab - small.vocab
    if not old.vocab <= size.vocabulary <= most:
        raise PairError(
            f"the head cannot know {size.vocabulary} tokens of this target: give {old.vocab} to {most}"
        )
    new = HeadShape(old.layers, size.vocabulary, 0, over.kv_heads)
    new = replace(new, mlp=max(_columns(size.parameters - new.parameters(over), new.over(over)), old.mlp))
    _require_disk(out.parent, 2 * new.parameters(over))
    with _published(out) as folder:
        copy_companions(source, folder)
        _save(iter((head_tensors(read_weights(source), old, new, small, over),)), folder)
        eps = config["rms_norm_eps"] * small.hidden / over.hidden
        made = {**config, **head_config(new, over), "rms_norm_eps": eps}
        (folder / "config.json").write_text(json.dumps(made, indent=2) + "\n")
    return new


LEFT_S = 24 * 3600.0
"""Nobody writes a folder for so long: its process has ended."""


def _remove_leftovers(folder: Path) -> None:
    """What processes that were killed had written so far, which may be gigabytes each."""
    for left in folder.glob(".writing-*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > LEFT_S:
                shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _published(out: Path) -> Iterator[Path]:
    """A folder to fill that takes the name `out` at the end, as a whole or not at all. Raises PairError."""
    try:
        with _made(out) as partial:
            yield partial
    except (OSError, SafetensorError) as error:
        raise PairError(
            f"{out.parent} cannot be written ({error}): free some space there, or set XDG_CACHE_HOME to a "
            "folder on another disk"
        ) from error


@contextmanager
def _made(out: Path) -> Iterator[Path]:
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(out.parent)
    partial = Path(tempfile.mkdtemp(prefix=".writing-", dir=out.parent))
    try:
        yield partial
        partial.chmod(0o755)  # mkdtemp makes it private
        try:
            partial.rename(out)
        except OSError:
            if not out.exists():
                raise
            if not is_whole(out):  # otherwise another process was faster, same content
                shutil.rmtree(out)
                partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _require_disk(folder: Path, needed: int) -> None:
    # `Path.exists` raises if a folder above may not be entered.
    existing = next(p for p in (folder, *folder.parents) if os.path.exists(p))
    free = shutil.disk_usage(existing).free
    if free < needed * 1.1:
        raise PairError(
            f"the widened target needs {needed / 1e6:,.0f} MB below {folder}, {free / 1e6:,.0f} MB are free: "
            "free some, choose a smaller size or set XDG_CACHE_HOME to a folder on another disk"
        )


def _digest(folder: Path) -> str:
    digest = hashlib.sha256(str(_FORMAT).encode())
    for file in sorted(p for p in folder.iterdir() if p.is_file()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def ensure_embedded_pair(
    size: int | str = DEFAULT_PARAMETERS, *, extra_layers: int = 0, draft: str = "draft"
) -> tuple[Path, Path]:
    """Folders of the widened target and of the draft for the server, made in the cache at first use.

    A head needs no widening: the residual stream that it reads is that of the shipped target, layer by layer.
    `size` is the target's parameter count, as a number or like "100M"; sizes below the shipped one give the
    shipped target itself.
    """
    return ensure_widened("target", Width(parse_size(size), extra_layers)), shipped_draft(draft)


def shipped_draft(name: str = "draft") -> Path:
    """The folder of the draft model or of heads (``HEAD``, ``MEDUSA``) as it is, for the server. Raises
    PairError."""
    source = weights_folder() / name
    if medusa_folder(str(source), "auto") is not None:
        return source  # that is how they are served
    if not has_weights(source):
        raise PairError(f"no {name} in {source.parent}: train one with `adaserve pair train-head`")
    draft = cache_folder() / f"{name}-{_digest(source)}"
    if not is_whole(draft):
        with _published(draft) as folder:
            unpack(source, folder)
    return draft


def ensure_widened(model: str, width: Width) -> Path:
    """The folder of the shipped ``target`` or ``draft``, widened, made in the cache at first use."""
    weights = weights_folder()
    folder = cache_folder() / f"{model}-{width.name}-{_digest(weights / model)}"
    if not is_whole(folder):
        widen(weights / model, folder, width)
    return folder


def ensure_widened_head(target: Path, size: HeadSize) -> Path:
    """The folder of the shipped EAGLE-3 head for a widened ``target``, made in the cache at first use. Raises
    PairError."""
    source = shipped_draft(HEAD)
    name = f"{HEAD}-{size.parameters}-{size.vocabulary}-tokens-{_digest(source)}-of-{target.name}"
    folder = cache_folder() / name
    if not is_whole(folder):
        widen_head(source, target, folder, size)
    return folder
