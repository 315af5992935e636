"""Other weights for a model that is served on a CPU: prepared on any thread, exchanged between iterations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from adaserve.engine.cpu.extract import read_head, read_weights
from adaserve.engine.cpu.install import llama_of
from adaserve.engine.cpu.llama import Backend
from adaserve.engine.cpu.params import ModelWeights
from adaserve.engine.learning.swap import exchanged, is_head


@dataclass(frozen=True, slots=True)
class Weights:
    """Both copies of a model's weights: SGLang's, by its own names, and the packed one of our kernels."""

    params: dict[str, Tensor]
    packed: Backend | None  # None where SGLang's own forward runs


class CpuSwap:
    """``Swap`` on a CPU: pointers change and nothing else, so it cannot fail halfway."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def served(self) -> Weights:
        """No copies."""
        llama = llama_of(self.model)
        params = {name: p.data for name, p in self.model.named_parameters()}
        return Weights(params, None if llama is None else llama.held)

    @torch.no_grad()
    def prepared(self, tensors: Mapping[str, Tensor]) -> Weights:
        model, llama = self.model, llama_of(self.model)
        params = {name: p.data for name, p in model.named_parameters()} | dict(exchanged(model, tensors))
        if llama is None:
            return Weights(params, None)
        at = {p.data_ptr(): params[name] for name, p in model.named_parameters()}
        read = read_head if is_head(model) else read_weights
        return Weights(params, llama.packed(_with(read(model)[0], at)))

    def exchange(self, weights: Weights) -> None:
        for name, p in self.model.named_parameters():
            p.data = weights.params[name]
        if (llama := llama_of(self.model)) is not None:
            assert weights.packed is not None
            llama.held = weights.packed


def _with(weights: ModelWeights, at: Mapping[int, Tensor]) -> ModelWeights:
    """``weights`` with other tensors in place of those that lie ``at`` some addresses."""

    def changed(record: Any) -> dict[str, Any]:
        every = {f.name: getattr(record, f.name) for f in fields(record)}
        tensors = {name: t for name, t in every.items() if isinstance(t, Tensor) and t.data_ptr() in at}
        return {name: at[t.data_ptr()][: len(t)] for name, t in tensors.items()}

    layers = tuple(replace(layer, **changed(layer)) for layer in weights.layers)
    return replace(weights, layers=layers, **changed(weights))
