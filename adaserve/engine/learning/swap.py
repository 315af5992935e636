"""Other weights for a draft that is served: by a checkpoint's names, fitted to SGLang's parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from adaserve.checkpoints.draft_kind import EAGLE3

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""What SGLang keeps in one matrix -> the checkpoint's names, row by row."""


EMBEDDING = "model.embed_tokens.weight"
"""A head's is the target's, which must stay as it is."""

OUTPUT = "lm_head.weight"
"""A model whose checkpoint has none makes logits with its embedding."""


class Swap(Protocol):
    """Exchanges the weights of one served model. What they are depends on the device."""

    model: Any
    """As SGLang has loaded it."""

    def served(self) -> Any:
        """What the model has now."""
        ...

    def prepared(self, tensors: Mapping[str, Tensor]) -> Any:
        """Weights for ``exchange`` from tensors by the checkpoint's names. The model is only read, so that
        this may run beside iterations. Raises ValueError when they do not fit the model."""
        ...

    def exchange(self, weights: Any) -> None:
        """The model has ``weights`` from the next forward on. KV that the old ones have made is still good: a
        draft only guesses."""
        ...


@torch.no_grad()
def require_fit(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ValueError where ``prepared`` would for such tensors, of which there are only the shapes yet."""
    tensors = _by_sglang(model, {name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
    for name, p in model.named_parameters():
        _fitted(name, p.data.to("meta"), tensors)


@torch.no_grad()
def exchanged(model: Any, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """New values of all parameters that are exchanged, by SGLang's names, on their devices. Raises ValueError
    when they do not fit the model."""
    tensors = _by_sglang(model, tensors)
    for name, p in model.named_parameters():
        if not is_kept(model, name):
            yield name, _fitted(name, p.data, tensors)


def is_kept(model: Any, name: str) -> bool:
    """Whether a parameter is not the draft's own."""
    return is_head(model) and name == EMBEDDING


def is_head(model: Any) -> bool:
    return type(model).__name__ == EAGLE3


def _by_sglang(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's tensors by SGLang's names; of the output matrix, the rows that the draft keeps."""
    named = {_in_sglang(name): t for name, t in tensors.items()}
    ids = getattr(model, "hot_token_id", None)
    if ids is not None and not is_head(model):  # a head's own checkpoint has no others
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
