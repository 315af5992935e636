"""Other weights for a model that is served on a CPU: prepared on any thread, exchanged between iterations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from adaserve.checkpoints.draft_kind import EAGLE3
from adaserve.engine.cpu.extract import read_head, read_weights
from adaserve.engine.cpu.install import lean_of
from adaserve.engine.cpu.lean import Backend
from adaserve.engine.cpu.params import ModelWeights

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""What SGLang keeps in one matrix -> the checkpoint's names, row by row."""


EMBEDDING = "model.embed_tokens.weight"
"""A head's is the target's, which must stay as it is."""

OUTPUT = "lm_head.weight"
"""A model whose checkpoint has none makes logits with its embedding."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Both copies of a model's weights: SGLang's, by its own names, and the packed one of our kernels."""

    params: dict[str, Tensor]
    packed: Backend | None  # None where SGLang's own forward runs


def served(model: Any) -> Weights:
    """What a model that SGLang has loaded has now; no copies."""
    lean = lean_of(model)
    params = {name: p.data for name, p in model.named_parameters()}
    return Weights(params, None if lean is None else lean.held)


@torch.no_grad()
def require_fit(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ValueError where ``prepared`` would for such tensors, of which there are only the shapes yet."""
    tensors = _by_sglang(model, {name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
    for name, p in model.named_parameters():
        _fitted(name, p.data.to("meta"), tensors)


@torch.no_grad()
def prepared(model: Any, tensors: Mapping[str, Tensor]) -> Weights:
    """Weights for ``exchange`` from tensors by the checkpoint's names; the model is only read.

    Raises ValueError when they do not fit the model.
    """
    tensors = _by_sglang(model, tensors)
    kept = {EMBEDDING} if _is_head(model) else set()
    params = {
        name: p.data if name in kept else _fitted(name, p.data, tensors)
        for name, p in model.named_parameters()
    }
    lean = lean_of(model)
    if lean is None:
        return Weights(params, None)
    at = {p.data_ptr(): params[name] for name, p in model.named_parameters()}
    read = read_head if _is_head(model) else read_weights
    return Weights(params, lean.packed(_with(read(model)[0], at)))


def exchange(model: Any, weights: Weights) -> None:
    """The model has ``weights`` from the next forward on. Pointers change and nothing else, so it cannot fail
    halfway. KV that the old weights have made is still good: a draft only guesses."""
    for name, p in model.named_parameters():
        p.data = weights.params[name]
    if (lean := lean_of(model)) is not None:
        assert weights.packed is not None
        lean.held = weights.packed


def _is_head(model: Any) -> bool:
    return type(model).__name__ == EAGLE3


def _by_sglang(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's tensors by SGLang's names; of the output matrix, the rows that the draft keeps."""
    named = {_in_sglang(name): t for name, t in tensors.items()}
    ids = getattr(model, "hot_token_id", None)
    if ids is not None and not _is_head(model):  # a head's own checkpoint has no others
        every = named.get(OUTPUT, named.get(EMBEDDING))
        if every is not None:
            named[OUTPUT] = every[ids.to(every.device)]
    return named


def _in_sglang(name: str) -> str:
    """A tensor of a checkpoint by the name that SGLang's model has for it: heads come with shorter ones."""
    if name.startswith(("model.", "lm_head.")):
        return name
    return "model." + name.replace("midlayer.", "layers.0.")


def _fitted(name: str, like: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """The tensor for one of SGLang's parameters, which may be fused, or padded with rows at its end."""
    try:
        new = _found(name, tensors)
    except KeyError as error:
        raise ValueError(f"there is no {error.args[0]}, which {name} is made of") from error
    missing = len(like) - len(new)
    padded = "embed" in name or "lm_head" in name
    if new.shape[1:] != like.shape[1:] or missing < 0 or (missing and not padded):
        raise ValueError(f"{name} is {tuple(like.shape)}, its new values are {tuple(new.shape)}")
    fitted = torch.zeros_like(like)
    fitted[: len(new)] = new
    return fitted


def _found(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    for fused, parts in _FUSED.items():
        if fused in name and name not in tensors:  # some checkpoints are fused already
            return torch.cat([tensors[name.replace(fused, part)] for part in parts])
    return tensors[name]


def _with(weights: ModelWeights, at: Mapping[int, Tensor]) -> ModelWeights:
    """``weights`` with other tensors in place of those that lie ``at`` some addresses."""

    def changed(record: Any) -> dict[str, Any]:
        every = {f.name: getattr(record, f.name) for f in fields(record)}
        tensors = {name: t for name, t in every.items() if isinstance(t, Tensor) and t.data_ptr() in at}
        return {name: at[t.data_ptr()][: len(t)] for name, t in tensors.items()}

    layers = tuple(replace(layer, **changed(layer)) for layer in weights.layers)
    return replace(weights, layers=layers, **changed(weights))
