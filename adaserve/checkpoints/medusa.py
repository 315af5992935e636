"""Medusa heads in the format in which they are published (Medusa, section 2.1.1; FasterDecoding/Medusa).

A folder has ``config.json`` with ``medusa_num_heads`` and ``medusa_num_layers``, and the weights in
``medusa_lm_head.pt`` or ``medusa_lm_head.safetensors``. Head i is made of residual blocks
``x + SiLU(W x + b)``, named ``{i}.{j}.linear.weight`` and ``{i}.{j}.linear.bias``, and of an LM head after
its n blocks, ``{i}.{n}.weight``. Where ``original_lm_head`` is true (vLLM's word for it), heads have no LM
head of their own and use the target's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from adaserve.checkpoints.draft_kind import MEDUSA_HEADS, medusa_heads, read_config
from adaserve.checkpoints.tensors import save_tensors
from adaserve.errors import UnsupportedError

LAYERS, TIED = "medusa_num_layers", "original_lm_head"
_PICKLED, _PLAIN = "medusa_lm_head.pt", "medusa_lm_head.safetensors"


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    """Heads that each say what comes after the next token: head 0 one place after it, head 1 two."""

    weight: Tensor  # [heads, layers, H, H]: of the residual blocks
    bias: Tensor  # [heads, layers, H]
    lm_heads: tuple[Tensor, ...] | None  # each [vocab, H]; None = all use the target's

    def __len__(self) -> int:
        return len(self.weight)


def load_medusa(folder: Path) -> MedusaHeads:
    """Raises UnsupportedError with the remedy where the folder holds something else."""
    config, tensors = read_config(folder), _read(folder)
    heads, layers = medusa_heads(folder), int(config.get(LAYERS, 1))

    def part(name: str) -> Tensor:
        if name not in tensors:
            raise UnsupportedError(
                f"the Medusa heads in {folder} have no {name}: their config.json says {heads} heads of "
                f"{layers} layers. Download the folder again, or correct its config.json"
            )
        return tensors[name]

    blocks = [[f"{i}.{j}.linear." for j in range(layers)] for i in range(heads)]
    tied = config.get(TIED, False)
    return MedusaHeads(
        weight=torch.stack([torch.stack([part(name + "weight") for name in head]) for head in blocks]),
        bias=torch.stack([torch.stack([part(name + "bias") for name in head]) for head in blocks]),
        lm_heads=None if tied else tuple(part(f"{i}.{layers}.weight") for i in range(heads)),
    )


def require_target(heads: MedusaHeads, folder: Path, hidden_size: int, vocab_size: int) -> None:
    """Raises UnsupportedError where a target of these sizes is not the one that the heads were made for."""
    size, vocabularies = heads.bias.shape[-1], {len(m) for m in heads.lm_heads or ()}
    if size != hidden_size or vocabularies - {vocab_size}:
        raise UnsupportedError(
            f"the Medusa heads in {folder} were made for a target with a hidden size of {size}"
            + "".join(f" and {tokens} tokens" for tokens in sorted(vocabularies))
            + f", and this one has {hidden_size} and {vocab_size}: serve the target that they were "
            "trained for"
        )


def save_medusa(heads: MedusaHeads, folder: Path, **more: Any) -> None:
    """Writes an existing ``folder``. ``more``: further values for its ``config.json``."""
    count, layers = heads.bias.shape[:2]
    tensors = {}
    for i in range(count):
        for j in range(layers):
            tensors[f"{i}.{j}.linear.weight"] = heads.weight[i, j].contiguous()
            tensors[f"{i}.{j}.linear.bias"] = heads.bias[i, j].contiguous()
        if heads.lm_heads is not None:
            tensors[f"{i}.{layers}.weight"] = heads.lm_heads[i].contiguous()
    save_tensors(tensors, folder / _PLAIN)
    config = {MEDUSA_HEADS: count, LAYERS: layers, TIED: heads.lm_heads is None, **more}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def weights_file(folder: Path) -> Path:
    """Raises UnsupportedError where there is none."""
    for name in (_PLAIN, _PICKLED):
        if (folder / name).exists():
            return folder / name
    raise UnsupportedError(f"there is neither {_PLAIN} nor {_PICKLED} in {folder}: download the whole folder")


def _read(folder: Path) -> dict[str, Tensor]:
    path = weights_file(folder)
    try:
        if path.name == _PLAIN:
            return load_file(path)
        tensors: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged file leads to
        why = str(error).partition("\n")[0]
        raise UnsupportedError(f"{path} cannot be read ({why}): download the folder again") from error
    return tensors
