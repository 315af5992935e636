"""The forward in plain torch operators: the reference, and what is used without a C compiler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from adaserve.engine.cpu.linear import Linear, Storage, torch_linear
from adaserve.engine.cpu.noise import best_of
from adaserve.engine.cpu.params import Capture, Inputs, LayerWeights, ModelConfig, ModelWeights
from adaserve.engine.logits.logit_transform import LogitTransform
from adaserve.engine.trees.attention import Scores, attend


@dataclass(frozen=True)
class _Layer:
    input_norm: torch.Tensor
    hidden_norm: torch.Tensor | None
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class TorchBackend:
    """Computes in fp32 whatever the weights are stored in."""

    def __init__(self, weights: ModelWeights, config: ModelConfig, storage: Storage) -> None:
        self._config, self.stored = config, storage
        self._embed = weights.embed
        self._layers = [_build_layer(layer, storage) for layer in weights.layers]
        self._final_norm = weights.final_norm.float()
        self._lm_head = torch_linear(weights.lm_head, None, storage)
        self._cos_sin = weights.cos_sin.float()
        self._raw_states, self._token_ids = weights.raw_states, weights.token_ids
        self._stage = weights.stage
        self._project = None if self._stage is None else torch_linear(self._stage.project, None, storage)

    @torch.no_grad()
    def forward(
        self,
        inputs: Inputs,
        k_buffers: Sequence[torch.Tensor],
        v_buffers: Sequence[torch.Tensor],
        capture: Capture | None = None,
    ) -> torch.Tensor:
        eps, slots, before = self._config.norm_eps, inputs.slots, inputs.before
        cos, sin = self._cos_sin[inputs.positions].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, rotary_dim / 2]
        embedded = self._embed[inputs.tokens].float()
        if not len(embedded):  # not every operator below takes an empty batch
            return embedded
        residual, scores = embedded, Scores(self._config.head_dim**-0.5)
        if before is not None:
            residual = self._taken_in(embedded, before.gathered(), inputs.positions)
        for i, (layer, k_buffer, v_buffer) in enumerate(zip(self._layers, k_buffers, v_buffers, strict=True)):
            if capture is not None:
                capture.states[:, capture.layers == i] = residual[:, None]
            normed = _rms_norm(embedded if layer.hidden_norm is not None else residual, layer.input_norm, eps)
            if layer.hidden_norm is not None:
                normed = torch.cat((normed, _rms_norm(residual, layer.hidden_norm, eps)), dim=-1)
            q, k, v = self._heads(layer, normed, cos, sin)
            k_buffer[slots], v_buffer[slots] = k.to(k_buffer.dtype), v.to(v_buffer.dtype)
            residual = residual + layer.o(attend(q, k_buffer, v_buffer, inputs.plan, scores))
            gate, up = layer.gate_up(_rms_norm(residual, layer.post_norm, eps)).chunk(2, dim=-1)
            residual = residual + layer.down(functional.silu(gate) * up)
        return residual if self._raw_states else _rms_norm(residual, self._final_norm, eps)

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if not hidden.shape[0]:
            return hidden.new_empty(0, self._config.vocab_size)
        if self._raw_states:
            hidden = _rms_norm(hidden, self._final_norm, self._config.norm_eps)
        return all_tokens(self._lm_head(hidden), self._token_ids, self._config.vocab_size)

    @torch.no_grad()
    def argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits(hidden).argmax(dim=-1)

    @torch.no_grad()
    def topk_logprobs(
        self, hidden: torch.Tensor, transform: LogitTransform, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return best_of(self.logits(hidden), transform, width)

    def _taken_in(
        self, embedded: torch.Tensor, before: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """What a head's residual stream begins with."""
        if self._stage is None or self._project is None:
            return before
        eps, seen = self._config.norm_eps, embedded * (positions > 1)[:, None]
        token = _rms_norm(seen, self._stage.token_norm, eps)
        hidden = _rms_norm(before, self._stage.hidden_norm, eps)
        return self._project(torch.cat((token, hidden), dim=-1))

    def _heads(
        self, layer: _Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        c = self._config
        heads = layer.qkv(x).view(x.shape[0], c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        q, k, v = heads.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = _rms_norm(q, layer.q_norm, c.qk_norm_eps)
            k = _rms_norm(k, layer.k_norm, c.qk_norm_eps)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v


def _build_layer(w: LayerWeights, storage: Storage) -> _Layer:
    return _Layer(
        input_norm=w.input_norm.float(),
        hidden_norm=None if w.hidden_norm is None else w.hidden_norm.float(),
        qkv=torch_linear(w.qkv, w.qkv_bias, storage),
        q_norm=None if w.q_norm is None else w.q_norm.float(),
        k_norm=None if w.k_norm is None else w.k_norm.float(),
        o=torch_linear(w.o, w.o_bias, storage),
        post_norm=w.post_norm.float(),
        gate_up=torch_linear(w.gate_up, None, storage),
        down=torch_linear(w.down, None, storage),
    )


def all_tokens(logits: torch.Tensor, token_ids: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """fp32 [rows, vocab] of the logits that a head has; what it does not know is impossible."""
    if token_ids is None:
        return logits
    every = torch.full((logits.shape[0], vocab_size), -torch.inf)
    every[:, token_ids] = logits
    return every


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
