"""Tiny Medusa heads, what they say in plain torch, and their public checkpoint format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as fn

from adaserve.checkpoints.medusa import MedusaHeads
from adaserve.engine.cpu.noise import transformed
from adaserve.engine.logits.logit_transform import LogitTransform
from tests.engine.pairs import VOCAB

HEADS = 3


def random_heads(target: Any, layers: int = 1, tied: bool = False, seed: int = 5) -> MedusaHeads:
    """Which all say something else."""
    generator = torch.Generator().manual_seed(seed)
    size, lm_head = target.config.hidden_size, target.lm_head.weight.detach()

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    matrices = tuple(lm_head + lm_head.std() * noise(*lm_head.shape) for _ in range(HEADS))
    return MedusaHeads(
        noise(HEADS, layers, size, size) / size**0.5,
        noise(HEADS, layers, size),
        None if tied else matrices,
    )


def said_by(heads: MedusaHeads, target: Any, text: list[int]) -> Tensor:
    """Logits [heads, vocab] of what each head says behind ``text``, which ends in the root: by the token
    before the root alone."""
    with torch.no_grad():
        x = target.model(torch.tensor([text[:-1]])).last_hidden_state[0, -1]
        logits = []
        for i in range(len(heads)):
            y = x
            for weight, bias in zip(heads.weight[i], heads.bias[i], strict=True):
                y = y + fn.silu(weight @ y + bias)
            matrix = target.lm_head.weight if heads.lm_heads is None else heads.lm_heads[i]
            logits.append(matrix @ y)
    return torch.stack(logits)


def best_paths(
    heads: MedusaHeads, target: Any, text: list[int], depth: int, width: int, key: int, spread: float
) -> list[dict[tuple[int, ...], float]]:
    """Per level the ``width`` best extensions of the level before, with their scores: over all tokens."""
    logits = said_by(heads, target, text)
    levels: list[dict[tuple[int, ...], float]] = [{(): 0.0}]
    for level in range(depth):
        one, position = np.ones(1, np.float32), np.array([len(text) - 1 + level])
        transform = LogitTransform(one, spread * one, np.array([key], np.uint64), position)
        logprobs = transformed(logits[level : level + 1], transform)[0].double().log_softmax(-1).tolist()
        grown = {
            (*path, token): score + logprob
            for path, score in levels[-1].items()
            for token, logprob in enumerate(logprobs)
        }
        levels.append(dict(sorted(grown.items(), key=lambda item: -item[1])[:width]))
    return levels[1:]


def fitted_heads(target: Any, prompts: Iterable[Sequence[int]], new: int = 48) -> MedusaHeads:
    """Know by heart half of what ``target`` says behind ``prompts``: LM heads by ridge regression, behind
    blocks that add nothing."""
    texts = [
        target.generate(
            batch, attention_mask=torch.ones_like(batch), max_new_tokens=new, do_sample=False, pad_token_id=1
        )
        for _, same in groupby(sorted(map(tuple, prompts), key=len), key=len)
        for batch in [torch.tensor([*same])]
    ]
    with torch.no_grad():
        states = [target.model(text).last_hidden_state for text in texts]
    size, matrices = target.config.hidden_size, []
    for i in range(HEADS):
        x = torch.cat([h[:, : -2 - i].flatten(0, 1) for h in states])
        y = torch.cat([text[:, 2 + i :].flatten() for text in texts])
        of_token = torch.zeros(VOCAB, size).index_add_(0, y, x)
        gram = x.T @ x + 0.1 * len(x) / size * torch.eye(size)
        matrices.append(20 * torch.linalg.solve(gram, of_token.T).T.contiguous())
    return MedusaHeads(torch.zeros(HEADS, 1, size, size), torch.zeros(HEADS, 1, size), tuple(matrices))


def save_published(heads: MedusaHeads, folder: Path) -> None:
    """As published: pickled tensors, and a ``config.json`` that names no architecture."""
    assert heads.lm_heads is not None
    folder.mkdir()
    count, layers = heads.bias.shape[:2]
    tensors = {f"{i}.{layers}.weight": matrix for i, matrix in enumerate(heads.lm_heads)}
    for i in range(count):
        for j in range(layers):
            tensors[f"{i}.{j}.linear.weight"] = heads.weight[i, j].clone()
            tensors[f"{i}.{j}.linear.bias"] = heads.bias[i, j].clone()
    torch.save(tensors, folder / "medusa_lm_head.pt")
    config = {
        "base_model_name_or_path": "target", "medusa_num_heads": count, "medusa_num_layers": layers,
        "transformers_version": "4.31.0",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
