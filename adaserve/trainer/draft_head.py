"""The trainer's copy of an EAGLE-3 head, in its public format.

A head reads hidden states of the target, which the tap hands over as the head's own projection has made them.
The projection stays as it is, since what is cached of earlier tokens was made by it; so does the embedding,
which is the target's. The layer, its norms and the output matrix are trained, over several steps on the
head's own guesses (EAGLE-3, section 3.2, training-time test).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as fn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.utils import cached_file

from adaserve.pair.eagle import unrolled
from adaserve.trainer.draft import spread
from adaserve.trainer.records import Record

STEPS = 4
"""Levels that a head is trained to draft: more are rarely drafted, and every one costs as much again."""
_FILE = "model.safetensors"
_FIXED = ("fc.", "fc_norm.", "input_norm.", "aux_norm_", "d2t", "t2d", "embed_tokens.")
"""What is in a checkpoint and is not trained."""
_EMBEDDING = "model.embed_tokens.weight"
"""In a target's checkpoint."""


class _Layer(nn.Module):
    """Reads an embedding and a hidden state side by side; the latter is its residual."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, dim, bias = config.hidden_size, config.head_dim, bool(config.attention_bias)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.shape = heads, kv_heads, dim
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(2 * size, heads * dim, bias=bias),
                "k_proj": nn.Linear(2 * size, kv_heads * dim, bias=bias),
                "v_proj": nn.Linear(2 * size, kv_heads * dim, bias=bias),
                "o_proj": nn.Linear(heads * dim, size, bias=bias),
            }
        )
        self.mlp = LlamaMLP(config)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            LlamaRMSNorm(size, config.rms_norm_eps) for _ in range(3)
        )

    def project(self, embedded: Tensor, before: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values [rows, heads, length, head_dim]."""
        heads, kv_heads, dim = self.shape
        joined = torch.cat((self.input_layernorm(embedded), self.hidden_norm(before)), -1)
        q, k, v = (
            self.self_attn[name](joined).unflatten(-1, (-1, dim)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return q, *(t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))

    def finish(self, before: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output from what its heads have gathered, [rows, heads, length, head_dim]."""
        x: Tensor = before + self.self_attn["o_proj"](mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class _Head(nn.Module):
    """Its parameters have the names of public checkpoints."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.midlayer, self.norm = _Layer(config), LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        known = getattr(config, "draft_vocab_size", None) or config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, known, bias=False)
        self.rope = LlamaRotaryEmbedding(config)

    def unroll(self, embedded: Tensor, before: Tensor, steps: int) -> list[Tensor]:
        """States [rows, length, H] of every step: at step k a token is read as the k-th of a draft."""
        places = torch.arange(1, 1 + embedded.shape[1], device=embedded.device)
        cos, sin = self.rope(embedded, places[None])
        return unrolled(self.midlayer, embedded, before, cos, sin, steps)


def learnable(folder: str, target: str) -> tuple[LlamaConfig, dict[str, str]]:
    """Config and tensors of a head that can be trained: their names in the checkpoint, and as most have them.
    Reads no weights, so that a server can ask before it starts.

    Raises ValueError for a head that cannot be trained here, OSError where there is none.
    """
    config = LlamaConfig(**json.loads(Path(cached_file(folder, "config.json")).read_text()))
    with safe_open(cached_file(folder, _FILE), "pt") as f:
        names = {name: _plain(name) for name in f.keys()}  # noqa: SIM118 (it is not a mapping)
    # SGLang serves a head with the target's matrix where its config has no size for one.
    has_matrix = getattr(config, "draft_vocab_size", None) is not None and not config.tie_word_embeddings
    if config.num_hidden_layers != 1 or not has_matrix or "lm_head.weight" not in names.values():
        raise ValueError("only EAGLE-3 heads of one layer, with an output matrix of their own, can learn")
    if getattr(config, "norm_output", False):
        raise ValueError("an EAGLE-3 head that reads what its final norm gives (norm_output) cannot learn")
    with torch.device("meta"):
        parameters = {name for name, _ in _Head(config).named_parameters()}
    other = [name for name, plain in names.items() if not (plain in parameters or plain.startswith(_FIXED))]
    if other or not parameters <= set(names.values()):
        found = (other or sorted(parameters - set(names.values())))[0]
        raise ValueError(f"this EAGLE-3 head cannot learn: {found} is not as expected")
    with safe_open(_embedding_file(target), "pt") as f:
        size = f.get_slice(_EMBEDDING).get_shape()[1]
    if size != config.hidden_size:
        raise ValueError("an EAGLE-3 head whose hidden size is not the target's cannot learn")
    return config, names


def file_bytes(folder: str) -> int:
    """Size of a head's checkpoint, which ``HeadCopy.state`` has whole."""
    return os.path.getsize(cached_file(folder, _FILE))


class HeadCopy:
    """``DraftCopy`` of a head. ``target``: whose embedding it reads. Both as transformers takes them.

    Raises ValueError for a head that cannot be trained here, OSError where there is none.
    """

    def __init__(self, folder: str, target: str, device: str = "cpu") -> None:
        config, names = learnable(folder, target)
        stored = _tensors(folder)
        self.model = _Head(config).eval().to(device)
        parameters = dict(self.model.named_parameters())
        self._trained = {name: parameters[plain] for name, plain in names.items() if plain in parameters}
        self._fixed = {name: t for name, t in stored.items() if name not in self._trained}
        self.dtypes = {name: t.dtype for name, t in stored.items()}
        self.load(stored)
        rows = torch.arange(self.model.lm_head.out_features)
        differences = next((t for name, t in stored.items() if names[name] == "d2t"), torch.zeros_like(rows))
        self._token_ids, self._vocabulary = (rows + differences).to(device), config.vocab_size
        with safe_open(_embedding_file(target), "pt") as f:  # as served: one in the head's own is not used
            self._embed: Tensor = f.get_tensor(_EMBEDDING).to(device)

    @property
    def weights(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def manifest(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """As of a ``DraftCopy``."""
        every = {**self._trained, **self._fixed}
        return {
            name: (str(self.dtypes[name]).removeprefix("torch."), tuple(every[name].shape))
            for name in self.dtypes
        }

    def state(self) -> dict[str, Tensor]:
        """As of a ``DraftCopy``; with what is not trained, so that it is a whole checkpoint."""
        trained = {n: p.detach().to("cpu", self.dtypes[n], copy=True) for n, p in self._trained.items()}
        return {**trained, **self._fixed}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        for name, parameter in self._trained.items():
            parameter.copy_(state[name])

    def logits(self, records: Sequence[Record]) -> list[Tensor]:
        """fp32 [n, vocab] for every record: the head's logits after hidden states of the target."""
        return self._unrolled(records, 1)[0]

    def unrolled(self, records: Sequence[Record]) -> list[list[Tensor]]:
        """The same for every step on its own guesses, the first one included."""
        return self._unrolled(records, min(STEPS, *(r.start for r in records)))

    def _unrolled(self, records: Sequence[Record], steps: int) -> list[list[Tensor]]:
        longest = max(r.start + len(r) for r in records)
        tokens = torch.zeros(len(records), longest, dtype=torch.int64)
        before = torch.zeros(len(records), longest, self._embed.shape[1])
        for row, record in enumerate(records):
            end = record.start + len(record)
            assert record.states is not None, "the tap did not hand over what the head has read"
            tokens[row, :end] = torch.from_numpy(record.tokens[:end].astype("int64"))
            before[row, :end] = torch.from_numpy(record.states.astype("float32"))
        # A head does not read the first token of a text.
        device = self._embed.device
        embedded = fn.embedding(tokens[:, 1:].to(device), self._embed).float()
        every = self.model.unroll(embedded, before[:, :-1].to(device), steps)
        return [self._said(states, records) for states in every]

    def _said(self, states: Tensor, records: Sequence[Record]) -> list[Tensor]:
        """Logits over the target's vocabulary, at the records' positions."""
        spans = [states[row, r.start - 1 : r.start - 1 + len(r)] for row, r in enumerate(records)]
        known = self.model.lm_head(self.model.norm(torch.cat(spans)))
        every = spread(known, self._token_ids, self._vocabulary)
        return list(every.split([len(r) for r in records]))


def _plain(name: str) -> str:
    """A tensor's name as most checkpoints have it."""
    return name.removeprefix("model.").replace("layers.0.", "midlayer.")


def _tensors(folder: str) -> dict[str, Tensor]:
    """Of a checkpoint in one file."""
    with safe_open(cached_file(folder, _FILE), "pt") as f:
        return {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (it is not a mapping)


def _embedding_file(target: str) -> str:
    file = _FILE
    index = cached_file(target, f"{file}.index.json", _raise_exceptions_for_missing_entries=False)
    if index is not None:
        file = json.loads(Path(index).read_text())["weight_map"][_EMBEDDING]
    return str(cached_file(target, file))
