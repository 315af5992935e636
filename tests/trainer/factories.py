"""Records and drafts for tests of learning: a tiny model pair, and what its target says."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as fn

from adaserve.noise import gumbel
from adaserve.trainer.records import Record, kept
from tests.engine.pairs import VOCAB, noisy_copy, random_target


def record(
    start: int = 3, positions: int = 10, vocab: int = 16, *, top: bool = False, seed: int = 0
) -> Record:
    """Random tokens and distributions."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = fn.log_softmax(3 * torch.randn(positions, vocab, generator=generator), -1)
    tokens = torch.randint(0, vocab, (start + positions + 1,), generator=generator)
    best, ids = logprobs.topk(vocab // 4)
    if top:
        return Record(tokens.int().numpy(), start, best.half().numpy(), ids.int().numpy(), 0.8, seed)
    return Record(tokens.int().numpy(), start, logprobs.half().numpy(), None, 0.8, seed)


def save_drafts(folder: Path, noise: float = 0.12) -> torch.nn.Module:
    """A draft that lacks something below ``folder``; returns the target."""
    target = random_target()
    noisy_copy(target, noise).save_pretrained(folder)
    return target


@lru_cache
@torch.no_grad()
def served(target: torch.nn.Module, count: int, *, seed: int = 0, temperature: float = 0.8) -> list[Record]:
    """What a tap would have collected: the target's own text, with its distributions."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, VOCAB // 16, (count, 6), generator=generator)
    keys = np.arange(count, dtype=np.uint64) + np.uint64(1000 * seed + 1)
    for at in range(5, 29):
        logits = target(tokens).logits[:, -1]
        if temperature:
            noise = gumbel(keys, np.full(count, at), VOCAB)
            logits = logits / temperature + torch.from_numpy(noise)
        tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True)), dim=1)
    logits = target(tokens).logits[:, 6:-1]
    records = []
    for row, says, key in zip(tokens, logits, keys.tolist(), strict=True):
        logprobs, ids = kept(fn.log_softmax(says / (temperature or 1.0), -1))
        records.append(Record(row.numpy().astype(np.int32), 6, logprobs, ids, temperature, key))
    return records
