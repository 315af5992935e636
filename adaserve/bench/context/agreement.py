"""How often the embedded pair agrees at long contexts, by what its drafts read.

The target continues long held-out texts with noise that the draft knows, as a server does. At every token
each way to draft is asked what it would have proposed there: a draft that has been right so far has the same
text before it, so a run of right tokens is what a chain would have got accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as fn

from adaserve.bench.context.report import Mode
from adaserve.pair.acceptance import load_sharpening
from adaserve.pair.data import load_tokenizer
from adaserve.pair.evaluate import Written, noise_of, write
from adaserve.pair.generate import Cache, extend
from adaserve.pair.model import TinyLlama, load_hf
from adaserve.pair.prompts import load_prompts
from adaserve.pair.vocabulary import BOS_ID

CATEGORIES = ("coding", "summarization")


@dataclass(frozen=True)
class TextPlan:
    """Texts per category, their tokens, and how many the target writes behind each."""

    rows: int
    length: int
    new: int
    temperature: float
    seed: int = 0


def long_prompts(tokenizer: Tokenizer, category: str, rows: int, length: int) -> Tensor:
    """[rows, length]: held-out prompts of a category, one behind the other, each begun with `begin`.

    Where a row begins does not depend on the length."""
    ids: list[int] = []
    for prompt in load_prompts(category):
        ids += [BOS_ID, *tokenizer.encode(prompt.text, add_special_tokens=False).ids]
    if len(ids) < rows * length:
        raise ValueError(f"the held-out {category} prompts have {len(ids)} tokens, not {rows} x {length}")
    return torch.tensor(ids).unfold(0, length, len(ids) // rows)[:rows]


@torch.no_grad()
def sparse_logits(model: TinyLlama, written: Written, window: int, sinks: int) -> Tensor:
    """The model's logits for every written token, [rows, new, vocabulary], if it reads the first ``sinks``
    and the last ``window`` tokens before each one (0 = all). The KV cache is as when everything is read.
    """
    whole, first = written.whole, written.prompts.shape[1] - 1
    full = Cache(model, len(whole), whole.shape[1])
    extend(model, whole[:, :-1], full)
    steps = []
    for position in range(first, whole.shape[1] - 1):
        left_out = position - sinks - window if window else 0
        cache = _without(full, position, sinks, max(0, left_out))
        steps.append(extend(model, whole[:, position : position + 1], cache))
    return torch.stack(steps, dim=1)


def _without(full: Cache, position: int, sinks: int, left_out: int) -> Cache:
    """What is cached before ``position``, with a gap behind the sinks; keys keep their positions."""
    parts = (full.store[..., :sinks, :], full.store[..., sinks + left_out : position, :])
    cache = Cache.__new__(Cache)
    cache.store = fn.pad(torch.cat(parts, dim=-2), (0, 0, 0, 1))
    cache.rope = (full.rope[0][left_out:], full.rope[1][left_out:])
    cache.length = position - left_out
    return cache


def agreement(logits: Tensor, written: Written, noise: Tensor, scale: float, spread: float) -> Tensor:
    """Whether the best token, as the draft reads its logits, is the one that was written, [rows, new]."""
    return (logits * scale + noise * spread).argmax(-1) == written.text


def chain_tokens(agrees: Tensor, deepest: int) -> tuple[float, ...]:
    """Expected tokens of chains of 0, 1, ..., ``deepest``, the bonus included."""
    streak, runs = torch.zeros(len(agrees)), []
    for column in agrees.flip(1).T:
        streak = torch.where(column, streak + 1, 0)
        runs.append(streak)
    run = torch.stack(runs[deepest - 1 :])  # where a chain of the deepest still fits into the text
    return tuple(1.0 + run.clamp(max=k).mean().item() for k in range(deepest + 1))


def measure_agreement(
    target: Path, draft: Path, modes: list[Mode], plan: TextPlan, deepest: int
) -> dict[str, tuple[float, tuple[float, ...]]]:
    """Per mode: the share of right tokens, and ``chain_tokens``."""
    tokenizer, models = load_tokenizer(target), {True: load_hf(target), False: load_hf(draft)}
    scale, spread = (float(v) for v in load_sharpening(draft).reading(plan.temperature))
    own = (1.0 / plan.temperature, 1.0) if plan.temperature else (1.0, 0.0)
    found: dict[str, list[Tensor]] = {mode.name: [] for mode in modes}
    for category in CATEGORIES:
        prompts = long_prompts(tokenizer, category, plan.rows, plan.length)
        written = write(models[True], prompts, plan.new, plan.temperature, seed=plan.seed)
        noise = noise_of(written, models[True].shape.vocab)
        for mode in modes:
            logits = sparse_logits(models[mode.is_self], written, mode.window, mode.sinks)
            reading = own if mode.is_self else (scale, spread)
            found[mode.name].append(agreement(logits, written, noise, *reading))
    joined = {name: torch.cat(parts) for name, parts in found.items()}
    return {name: (a.float().mean().item(), chain_tokens(a, deepest)) for name, a in joined.items()}
