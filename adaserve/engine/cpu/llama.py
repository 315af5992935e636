"""Our own forward of Llama-family models on the CPU, over SGLang's paged KV pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from adaserve.engine.cpu import build
from adaserve.engine.cpu.linear import Storage
from adaserve.engine.cpu.native import NativeBackend
from adaserve.engine.cpu.params import Capture, Inputs, ModelConfig, ModelWeights
from adaserve.engine.cpu.torch_forward import TorchBackend
from adaserve.engine.logits.logit_transform import LogitTransform

Backend = NativeBackend | TorchBackend
"""Packed weights and the forward over them: by the C kernels, or by torch's operators without them."""


class Sink(Protocol):
    """Keeps hidden states."""

    @property
    def layers(self) -> torch.Tensor:
        """int32 [k]: numbers of the layers whose inputs it needs, each below the number of layers."""
        ...

    def write(self, slots: torch.Tensor, states: torch.Tensor, last: torch.Tensor) -> None:
        """For the tokens whose KV is at ``slots``, int64 [T]: the inputs of its layers, fp32 [T, k, H], and
        the output of the final norm, fp32 [T, H]."""
        ...


class LlamaModel:
    """Target or draft: prefill, decode, beam steps and tree verification are the same call.

    Activations and sums are fp32 whatever the weights are stored in. Not safe for concurrent calls.
    """

    def __init__(self, weights: ModelWeights, config: ModelConfig, storage: Storage = "auto") -> None:
        self.config = config
        self.store(weights, storage)
        self.sink: Sink | None = None
        """Who is given hidden states of every forward, for heads that read them."""
        self.read: torch.Tensor | None = None
        """fp32 [T, H]: hidden states of the prompts that SGLang calls the model for next, if those were read
        in a verification's forward."""

    def take_read(self, tokens: int) -> torch.Tensor | None:
        """``read``, once, if there is any. Raises RuntimeError if it is not of so many tokens."""
        states, self.read = self.read, None
        if states is not None and len(states) != tokens:
            raise RuntimeError(f"{len(states)} tokens of prompts were read, and SGLang asks for {tokens}")
        return states

    def store(self, weights: ModelWeights, storage: Storage) -> None:
        """From now on these weights, stored like this."""
        self.storage = storage
        self.held = self.packed(weights)

    def packed(self, weights: ModelWeights) -> Backend:
        """Other weights of the same shape, to be `held` between two forwards."""
        kernels = build.load_kernels()
        if kernels is None:
            return TorchBackend(weights, self.config, self.storage)
        return NativeBackend(kernels, weights, self.config, self.storage)

    def forward(
        self, inputs: Inputs, k_buffers: Sequence[torch.Tensor], v_buffers: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Hidden states of T tokens after the final norm, fp32 [T, H]; with `raw_states`, before it.

        `k_buffers`, `v_buffers`: the KV pool, per layer [slots, kv_heads, head_dim].
        """
        sink = self.sink
        if sink is None:
            return self.held.forward(inputs, k_buffers, v_buffers)
        shape = (inputs.tokens.numel(), sink.layers.numel(), self.config.hidden_size)
        capture = Capture(sink.layers, torch.empty(shape))
        hidden = self.held.forward(inputs, k_buffers, v_buffers, capture)
        sink.write(inputs.slots, capture.states, hidden)
        return hidden

    @property
    def native(self) -> NativeBackend | None:
        """The C kernels, which alone search beams; None without them."""
        return self.held if isinstance(self.held, NativeBackend) else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 [T, H] -> fp32 [T, vocab]."""
        return self.held.logits(hidden)

    def argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        """The greedy token of each row, int64 [T]."""
        return self.held.argmax(hidden)

    def topk_logprobs(
        self, hidden: torch.Tensor, transform: LogitTransform, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Per row the `width` likeliest tokens of softmax(logits as `transform` says), best first.

        Returns log-probabilities fp32 [T, width] and tokens int64 [T, width].
        """
        return self.held.topk_logprobs(hidden, transform, width)
