"""Drafts for tests: a target with noise on its weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor

from adaserve.pair.model import TinyLlama, load_hf, save_hf
from adaserve.pair.prompts import load_prompts
from adaserve.pair.tokenizer import load_tokenizer
from adaserve.pair.vocabulary import BOS_ID

_BISECTIONS = 10


def _perturbed(model: TinyLlama, share: float, seed: int) -> TinyLlama:
    """Every matrix plus gaussian noise of `share` times its own root mean square."""
    random = torch.Generator().manual_seed(seed)
    noisy = TinyLlama(model.shape)
    with torch.no_grad():
        for (_, weight), (_, new) in zip(model.named_parameters(), noisy.named_parameters(), strict=True):
            scale = share * weight.square().mean().sqrt() if weight.ndim == 2 else 0.0
            new.copy_(weight + scale * torch.randn(weight.shape, generator=random))
    return noisy


@torch.no_grad()
def _agreement(model: TinyLlama, noisy: TinyLlama, tokens: Tensor) -> float:
    return float((model(tokens).argmax(-1) == noisy(tokens).argmax(-1)).float().mean())


def noisy_copy(source: Path, out: Path, *, agreement: float, seed: int) -> float:
    """Writes a draft whose best token is the target's about `agreement` of the time; returns the true share.

    `source` is a folder of the embedded family (the widened target works, the small one is quicker).
    """
    model, tokenizer = load_hf(source), load_tokenizer(source)
    texts = [p.text for p in load_prompts("coding")[:32]]
    rows = [
        ids for ids in (tokenizer.encode(t, add_special_tokens=False).ids for t in texts) if len(ids) >= 64
    ]
    tokens = torch.tensor([[BOS_ID, *ids[:63]] for ids in rows])
    low, high = 0.0, 2.0
    for _ in track(range(_BISECTIONS), description="Looking for the noise"):
        middle = (low + high) / 2
        enough = _agreement(model, _perturbed(model, middle, seed), tokens) > agreement
        low, high = (middle, high) if enough else (low, middle)
    noisy = _perturbed(model, low, seed)
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
    save_hf(noisy, out)
    return _agreement(model, noisy, tokens)
