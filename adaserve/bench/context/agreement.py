"""How often the embedded pair agrees at long contexts, by what its drafts read.

The target continues long held-out texts with noise that the draft knows, as a server does
(`pair/long_context.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import Progress
from torch import Tensor

from adaserve.bench.context.report import Mode
from adaserve.bench.context.speedup import SINKS
from adaserve.pair.evaluate import noise_of, write
from adaserve.pair.long_context import CATEGORIES, long_prompts, ranks, sparse_logits, tree_tokens
from adaserve.pair.model import load_hf
from adaserve.pair.tokenizer import load_tokenizer
from adaserve.sharpening import load_sharpening


@dataclass(frozen=True)
class TextPlan:
    """Texts per category, their tokens, and how many the target writes after each."""

    rows: int
    length: int
    new: int
    temperature: float


@dataclass(frozen=True)
class Agreement:
    """How often one mode agrees with the target."""

    share: float  # of tokens that are its best guess
    tokens: Mapping[int, tuple[float, ...]]  # by width: ``tree_tokens``


def measure_agreement(
    target: Path,
    draft: Path,
    modes: list[Mode],
    plan: TextPlan,
    widths: Sequence[int],
    deepest: int,
    bar: Progress,
) -> dict[str, Agreement]:
    """By the mode's name, of trees up to ``deepest`` levels."""
    tokenizer, models = load_tokenizer(target), {True: load_hf(target), False: load_hf(draft)}
    scale, spread = (float(v) for v in load_sharpening(draft).with_shared_noise(plan.temperature))
    own = (1.0 / plan.temperature, 1.0) if plan.temperature else (1.0, 0.0)
    found: dict[str, list[Tensor]] = {mode.name: [] for mode in modes}
    steps = len(CATEGORIES) * (1 + len(modes))
    task = bar.add_task(f"held-out texts of {plan.length} tokens", total=steps)
    for category in CATEGORIES:
        prompts = long_prompts(tokenizer, category, plan.rows, plan.length)
        written = write(models[True], prompts, plan.new, plan.temperature, seed=0)
        noise = noise_of(written, models[True].shape.vocab)
        bar.advance(task)
        for mode in modes:
            logits = sparse_logits(models[mode.is_self], written, mode.window, SINKS)
            reading = own if mode.is_self else (scale, spread)
            found[mode.name].append(ranks(logits, written, noise, *reading))
            bar.advance(task)
    joined = {name: torch.cat(parts) for name, parts in found.items()}
    return {
        name: Agreement((r == 0).float().mean().item(), {w: tree_tokens(r, deepest, w) for w in widths})
        for name, r in joined.items()
    }
