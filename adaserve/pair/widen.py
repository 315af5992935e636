"""Makes the shipped target as expensive as a model of a chosen size without changing what it says.

New MLP columns get small random input weights and zero output weights; new layers get zero output weights in
attention and MLP alike. Both add exactly nothing to the residual stream, yet every weight is read and
multiplied like any other, so the cost of a forward is that of a model of the requested size.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from safetensors.torch import save_file
from torch import Tensor

from adaserve.pair.packed import PLAIN_NAME, copy_companions, has_weights, read_weights, unpack
from adaserve.pair.shape import Shape, hf_config, shape_of

DEFAULT_PARAMETERS = 100_000_000
WEIGHTS_VARIABLE = "ADASERVE_PAIR_WEIGHTS"
_FORMAT = 1  # part of the cache key: raise it when the files below change
_WIDTH_STEP = 256  # widths that divide evenly over SIMD lanes and tensor-parallel ranks
_NEW_WEIGHT_STD = 0.02
_SHARD_BYTES = 2_000_000_000
_UNITS = {"K": 1_000, "M": 1_000_000, "B": 1_000_000_000}


class PairError(Exception):
    """The embedded pair cannot be provided; the message says what to do."""


@dataclass(frozen=True)
class Width:
    """What to widen to: total parameters, and layers beyond the shipped ones."""

    parameters: int = DEFAULT_PARAMETERS
    extra_layers: int = 0

    def __post_init__(self) -> None:
        if self.parameters < 1 or self.extra_layers < 0:
            raise PairError(
                f"cannot widen to {self.parameters} parameters and {self.extra_layers} extra layers"
            )


def parse_size(size: int | str) -> int:
    """Parameters from a number or a text like 100M or 1.5B."""
    text = str(size).strip().upper().replace("_", "")
    unit = _UNITS.get(text[-1:], 1)
    try:
        return int(float(text.rstrip("KMB")) * unit)
    except (ValueError, OverflowError):
        raise PairError(
            f"{size!r} is no model size; write a number of parameters, such as 100M or 1.5B"
        ) from None


def widened_shape(shape: Shape, width: Width) -> Shape:
    """The nearest shape with at least the shipped MLP width."""
    deeper = replace(shape, layers=shape.layers + width.extra_layers)
    per_column = 3 * shape.hidden * deeper.layers
    missing = width.parameters - replace(deeper, mlp=0).parameters
    columns = round(missing / per_column / _WIDTH_STEP) * _WIDTH_STEP
    return replace(deeper, mlp=max(columns, shape.mlp))


def _padded(weight: Tensor, rows: int, columns: int, random: torch.Generator | None) -> Tensor:
    """The weight in the upper left corner of a larger one, which is zero or (with `random`) small noise."""
    out = torch.zeros(rows, columns, dtype=torch.float16)
    if random is not None:
        out.copy_(torch.randn(rows, columns, generator=random).mul_(_NEW_WEIGHT_STD))
    out[: weight.shape[0], : weight.shape[1]] = weight
    return out


def _layer(old: dict[str, Tensor] | None, shape: Shape, seed: int) -> dict[str, Tensor]:
    """One widened layer by short names; `old` is None for a layer that adds nothing."""
    random = torch.Generator().manual_seed(seed)
    heads, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "self_attn.q_proj.weight": (heads, shape.hidden),
        "self_attn.k_proj.weight": (kv, shape.hidden),
        "self_attn.v_proj.weight": (kv, shape.hidden),
        "self_attn.o_proj.weight": (shape.hidden, heads),
        "mlp.gate_proj.weight": (shape.mlp, shape.hidden),
        "mlp.up_proj.weight": (shape.mlp, shape.hidden),
        "mlp.down_proj.weight": (shape.hidden, shape.mlp),
    }
    writes_residual = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
    layer = {}
    for name, (rows, columns) in sizes.items():
        base = torch.zeros(0, 0, dtype=torch.float16) if old is None else old[name]
        layer[name] = _padded(base, rows, columns, None if name in writes_residual else random)
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        layer[name] = torch.ones(shape.hidden, dtype=torch.float16) if old is None else old[name]
    return layer


def _tensors(source: dict[str, Tensor], old: Shape, new: Shape) -> Iterator[dict[str, Tensor]]:
    """The widened model in portions of one layer."""
    yield {name: tensor for name, tensor in source.items() if not name.startswith("model.layers.")}
    for index in track(range(new.layers), description="Widening the target"):
        prefix = f"model.layers.{index}."
        present = {n.removeprefix(prefix): t for n, t in source.items() if n.startswith(prefix)}
        layer = _layer(present if index < old.layers else None, new, seed=index)
        yield {prefix + name: tensor for name, tensor in layer.items()}


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
        _save(_tensors(read_weights(source), old, new), folder)
        (folder / "config.json").write_text(json.dumps({**config, **hf_config(new)}, indent=2) + "\n")
    return new


@contextmanager
def _published(out: Path) -> Iterator[Path]:
    """A folder to fill that takes the name `out` at the end, as a whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".writing-", dir=out.parent))
    try:
        yield partial
        partial.chmod(0o755)  # mkdtemp makes it private
        try:
            partial.rename(out)
        except OSError:
            if not (out / "config.json").exists():  # otherwise another process was faster, same content
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _require_disk(folder: Path, needed: int) -> None:
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < needed * 1.1:
        raise PairError(
            f"the widened target needs {needed / 1e9:.1f} GB below {folder}, {free / 1e9:.1f} GB are free; "
            "free some, choose a smaller size or set XDG_CACHE_HOME to a folder on another disk"
        )


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
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "adaserve" / "pair"


def _digest(folder: Path) -> str:
    digest = hashlib.sha256(str(_FORMAT).encode())
    for file in sorted(p for p in folder.iterdir() if p.is_file()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def ensure_embedded_pair(size: int | str = DEFAULT_PARAMETERS, *, extra_layers: int = 0) -> tuple[Path, Path]:
    """Folders of the widened target and of the draft for the server, made in the cache at first use.

    `size` is the target's parameter count, as a number or like "100M"; sizes below the shipped one give the
    shipped target itself.
    """
    weights = weights_folder()
    width = Width(parse_size(size), extra_layers)
    deeper = f"-{extra_layers}-extra-layers" if extra_layers else ""
    target = cache_folder() / f"target-{width.parameters}{deeper}-{_digest(weights / 'target')}"
    if not (target / "config.json").exists():
        widen(weights / "target", target, width)
    draft = cache_folder() / f"draft-{_digest(weights / 'draft')}"
    if not (draft / "config.json").exists():
        with _published(draft) as folder:
            unpack(weights / "draft", folder)
    return target, draft
