"""The weights of a Llama-family model, independent of the framework that loaded them, and what its forwards
are given."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from adaserve.engine.trees.attention import TreeAttentionPlan


@dataclass(frozen=True)
class ModelConfig:
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int  # leading columns of a head that rotate, in two halves ("neox" style)
    vocab_size: int
    norm_eps: float
    qk_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError("num_heads must be a multiple of num_kv_heads")
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError("rotary_dim must be even and at most head_dim")


@dataclass(frozen=True)
class LayerWeights:
    """Matrices are [out, in] as in `torch.nn.Linear`; any floating dtype."""

    input_norm: torch.Tensor  # [H]
    qkv: torch.Tensor  # [(num_heads + 2 * num_kv_heads) * head_dim, H]
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [head_dim], Qwen3
    k_norm: torch.Tensor | None
    o: torch.Tensor  # [H, num_heads * head_dim]
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor  # [H]
    gate_up: torch.Tensor  # [2 * I, H], gate first
    down: torch.Tensor  # [H, I]
    hidden_norm: torch.Tensor | None = None
    """[H]: only in the first layer of an EAGLE-3 head, whose ``qkv`` is [.., 2 * H]. It reads a token's
    normed embedding and the normed hidden state of the token before, side by side (EAGLE-3, section 3.1)."""


@dataclass(frozen=True)
class InputStage:
    """What an MTP layer does first: it projects a token's normed embedding and the normed hidden state of the
    token before, side by side (DeepSeek-V3, section 2.2, equation 21). The second token of a text is read
    without its embedding, as SGLang and vLLM do it."""

    token_norm: torch.Tensor  # [H]
    hidden_norm: torch.Tensor  # [H]
    project: torch.Tensor  # [H, 2 * H], the columns of the embedding first


@dataclass(frozen=True)
class ModelWeights:
    embed: torch.Tensor  # [vocab, H]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor  # [H]
    lm_head: torch.Tensor  # [vocab, H], or a row for each of `token_ids`; rows of `embed` when tied
    cos_sin: torch.Tensor  # [max positions, rotary_dim], cosines then sines, scaling included
    token_ids: torch.Tensor | None = None
    """int64 [rows of lm_head]: the token of each row, for a draft that knows only some tokens; None: row
    i is token i."""
    stage: InputStage | None = None
    """The inputs of an MTP layer, which reads its own states after the final norm; None = no MTP layer."""
    norm_output: bool = False
    """Whether an EAGLE-3 head also reads its own states after the final norm."""

    @property
    def raw_states(self) -> bool:
        """Whether its states come before the final norm, as those that an EAGLE-3 head reads usually do."""
        return self.layers[0].hidden_norm is not None and not self.norm_output


@dataclass(frozen=True, slots=True)
class Before:
    """What a head reads besides T tokens: hidden states of the tokens before them."""

    states: torch.Tensor  # [N, H], any floating dtype
    rows: torch.Tensor | None = None  # int64 [T]: of ``states``; None: row t goes with token t

    def gathered(self) -> torch.Tensor:
        """fp32 [T, H]."""
        return (self.states if self.rows is None else self.states[self.rows]).float()


@dataclass(frozen=True, slots=True)
class Inputs:
    """T tokens of one forward. Their keys and values are written before any of them attends."""

    tokens: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]: for the rotary embedding
    slots: torch.Tensor  # int64 [T]: of the KV pool, where their keys and values go
    plan: TreeAttentionPlan
    before: Before | None = None  # what a head takes in besides

    def __post_init__(self) -> None:
        for name in ("tokens", "positions", "slots"):
            tensor = getattr(self, name)
            if tensor.dtype is not torch.int64 or not tensor.is_contiguous():
                object.__setattr__(self, name, tensor.to(torch.int64).contiguous())


@dataclass(frozen=True, slots=True)
class Capture:
    """The residual stream before some layers, which a forward of T tokens hands out."""

    layers: torch.Tensor  # int32 [k]
    states: torch.Tensor  # out, fp32 [T, k, H]
