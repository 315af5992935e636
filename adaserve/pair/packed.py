"""The shipped form of the weights: int8 with one float16 scale per row, half the size of float16.

The pair *is* the dequantized numbers: the draft is distilled towards them and everything that is measured
uses them, so nothing is lost between the repository and the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from adaserve.checkpoints.tensors import save_tensors
from adaserve.pair.folders import PACKED_NAME, PLAIN_NAME, PairError, copy_companions, has_weights

_SCALE = ".scale"


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [rows, columns] and float16 scales [rows]."""
    largest = weight.float().abs().amax(dim=1).clamp(min=1e-6)
    scale = (largest / 127).to(torch.float16)
    values = (weight.float() / scale.float()[:, None]).round().clamp(-127, 127)
    return values.to(torch.int8), scale


def dequantized(values: Tensor, scale: Tensor) -> Tensor:
    return (values.float() * scale.float()[:, None]).to(torch.float16)


def pack(source: Path, out: Path) -> None:
    """Writes a plain model folder (its config, tokenizer and so on included) in the shipped form."""
    _pack(read_weights(source), source, out)


def _pack(weights: Mapping[str, Tensor], companions: Path, out: Path) -> None:
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.ndim == 2:
            tensors[name], tensors[name + _SCALE] = quantized(weight)
        else:
            tensors[name] = weight.to(torch.float16) if weight.is_floating_point() else weight
    copy_companions(companions, out)
    save_tensors(tensors, out / PACKED_NAME)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Weights by Hugging Face's names, from the packed form (float16) or the plain one, in one file or
    several. Raises PairError for a file that is damaged."""
    if not (folder / PACKED_NAME).exists():
        files = sorted(folder.glob("*.safetensors")) or [folder / PLAIN_NAME]
        return {name: weight for file in files for name, weight in _load(file).items()}
    stored = _load(folder / PACKED_NAME)
    return {
        name: dequantized(weight, stored[name + _SCALE]) if name + _SCALE in stored else weight
        for name, weight in stored.items()
        if not name.endswith(_SCALE)
    }


def _load(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise PairError(f"{file} cannot be read ({error}): copy that model's folder once more") from error


def unpack(source: Path, out: Path) -> None:
    """Writes a folder that Hugging Face's and SGLang's loaders read."""
    weights = read_weights(source)
    copy_companions(source, out)
    save_tensors(weights, out / PLAIN_NAME)


def average(first: Path, second: Path, share: float, out: Path) -> None:
    """Writes ``first`` with a ``share`` of the weights of ``second``, the model that it was trained from.

    What training made the model forget comes back at a small loss of what it learned (Wortsman et al. 2022,
    "Robust fine-tuning of zero-shot models"). Everything but the weights is ``first``'s. Raises PairError for
    folders without a model, or with models of different shapes or vocabularies.
    """
    for folder in (first, second):
        if not has_weights(folder):
            raise PairError(f"{folder} holds no model: give the folder of a draft")
    weights, others = read_weights(first), read_weights(second)
    if {n: w.shape for n, w in weights.items()} != {n: w.shape for n, w in others.items()}:
        raise PairError(f"{first} and {second} hold models of different shapes, which have no average")
    if not all(w.is_floating_point() or w.equal(others[n]) for n, w in weights.items()):
        raise PairError(f"{first} and {second} hold heads that know different tokens, which have no average")
    mixed = {n: w.float().lerp(others[n].float(), share).to(w.dtype) for n, w in weights.items()}
    _pack(mixed, first, out)
