"""Makes the shipped target as expensive as a model of a chosen size without changing what it says.

New MLP columns and attention heads get small random input weights and zero output weights; new layers get
zero output weights in attention and MLP alike. All add exactly nothing to the residual stream, yet every
weight is read and multiplied like any other, so the cost of a forward is that of a model of the requested
size.

A residual stream of more dimensions is the old one and zeros. That makes the mean square under each RMSNorm
smaller, so the norms' weights shrink with it (exactly, in float16, when the size grows by a power of four),
and so does their epsilon. New rows of the vocabulary must never win: one new dimension holds a small constant
in every token, which the layers ignore, and the last norm lifts it until those rows' logits are far below all
others.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from adaserve.draft_kind import medusa_folder
from adaserve.pair.folders import (
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

DEFAULT_PARAMETERS = 100_000_000
_FORMAT = 2  # part of the cache key: raise it when the files below change
_WIDTH_STEP = 256  # widths that divide evenly over SIMD lanes and tensor-parallel ranks
_NEW_WEIGHT_STD = 0.02
_NOISE_WEIGHTS = (1 << 22) - 3  # made once and repeated: billions of random numbers would take minutes
_CONSTANT, _LIFT = 2.0**-9, 2.0**15
"""What every token holds in the new dimension, and by how much the last norm lifts that: the constant adds
less to the mean square than float16 resolves, and logits of new tokens end up below -20."""
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
    per_column = 3 * deeper.hidden * deeper.layers
    missing = width.parameters - replace(deeper, mlp=0).parameters
    columns = round(missing / per_column / _WIDTH_STEP) * _WIDTH_STEP
    return replace(deeper, mlp=max(columns, shape.mlp))


class _Noise:
    """Small random weights of any number, out of one store."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._store = torch.randn(_NOISE_WEIGHTS, generator=generator).mul_(_NEW_WEIGHT_STD).half()
        self._next = 0

    def fill(self, out: Tensor) -> None:
        flat, done = out.view(-1), 0
        while done < flat.numel():
            count = min(flat.numel() - done, _NOISE_WEIGHTS - self._next)
            flat[done : done + count] = self._store[self._next : self._next + count]
            done, self._next = done + count, (self._next + count) % _NOISE_WEIGHTS


def _padded(weight: Tensor, rows: int, columns: int, noise: _Noise | None = None) -> Tensor:
    """The weight in the upper left corner of a larger one, which is zero or (with `noise`) random."""
    if noise is None:
        out = torch.zeros(rows, columns, dtype=torch.float16)
    else:
        noise.fill(out := torch.empty(rows, columns, dtype=torch.float16))
    out[: weight.shape[0], : weight.shape[1]] = weight
    return out


def _norm(weight: Tensor, shape: Shape) -> Tensor:
    """A norm's weights for the wider stream, whose first new dimension (the constant's) it blocks."""
    old = weight.shape[0]
    if old == shape.hidden:
        return weight
    out = torch.ones(shape.hidden)
    out[:old] = weight.float() * sqrt(old / shape.hidden)
    out[old] = 0.0
    return out.half()


def _layer(old: dict[str, Tensor] | None, hidden: int, shape: Shape, noise: _Noise) -> dict[str, Tensor]:
    """One widened layer by short names; `old` (of size `hidden`) is None for a layer that adds nothing."""
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
        layer[name] = _padded(base, rows, columns, None if name in writes_residual else noise)
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        weight = torch.ones(hidden, dtype=torch.float16) if old is None else old[name]
        layer[name] = _norm(weight, shape)
    return layer


def _outside_layers(source: dict[str, Tensor], old: Shape, new: Shape) -> dict[str, Tensor]:
    """Embedding, last norm, and the output layer where new tokens need one of their own."""
    tensors = {name: tensor for name, tensor in source.items() if not name.startswith("model.layers.")}
    if new.hidden == old.hidden:
        return tensors
    table, norm = "model.embed_tokens.weight", "model.norm.weight"
    small = tensors[table]
    tensors[table] = _padded(small, new.vocab, new.hidden)
    tensors[norm] = _norm(tensors[norm], new)
    if not new.tied:
        tensors["lm_head.weight"] = _padded(small, new.vocab, new.hidden)
        tensors["lm_head.weight"][old.vocab :, old.hidden] = -1.0
        tensors[table][:, old.hidden] = _CONSTANT
        tensors[norm][old.hidden] = _LIFT
    return tensors


def _tensors(source: dict[str, Tensor], old: Shape, new: Shape) -> Iterator[dict[str, Tensor]]:
    """The widened model in portions of one layer."""
    noise = _Noise()
    yield _outside_layers(source, old, new)
    for index in track(range(new.layers), description="Widening the model"):
        prefix = f"model.layers.{index}."
        present = {n.removeprefix(prefix): t for n, t in source.items() if n.startswith(prefix)}
        layer = _layer(present if index < old.layers else None, old.hidden, new, noise)
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
        more = {"rms_norm_eps": config["rms_norm_eps"] * old.hidden / new.hidden}
        (folder / "config.json").write_text(json.dumps({**config, **hf_config(new), **more}, indent=2) + "\n")
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
    existing = next(p for p in (folder, *folder.parents) if p.exists())
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
