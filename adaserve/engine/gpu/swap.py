"""Other weights for a model that is served on a GPU, whose graphs read parameters where they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from adaserve.engine.learning.swap import exchanged, is_kept

Weights = Mapping[str, Tensor]
"""By SGLang's names, on the host or on the GPU."""


class GpuSwap:
    """``Swap`` on a GPU: new values are copied over the old ones.

    A candidate is brought to the GPU beside the iterations, on a stream of its own, and takes memory there
    until it serves. All other weights wait on the host.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._device = next(model.parameters()).device
        self._stream = torch.cuda.Stream(self._device)

    def served(self) -> Weights:
        """A copy on the host."""
        return {n: p.data.cpu() for n, p in self.model.named_parameters() if not is_kept(self.model, n)}

    def prepared(self, tensors: Mapping[str, Tensor]) -> Weights:
        with torch.cuda.stream(self._stream):
            weights = dict(exchanged(self.model, tensors))
        self._stream.synchronize()
        return weights

    @torch.no_grad()
    def exchange(self, weights: Weights) -> None:
        """Waits for the GPU before and after: forwards run on several streams."""
        torch.cuda.synchronize(self._device)
        for name, p in self.model.named_parameters():
            if name in weights:
                p.copy_(weights[name])
        torch.cuda.synchronize(self._device)
