"""Long held-out texts, and how often a model that reads little of them agrees with what the target writes.

At every token each way to draft is asked what it would have proposed there: a draft that has been right so
far has the same text before it, so a run of right tokens is what a tree would have got accepted.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as fn

from adaserve.pair.folders import PairError
from adaserve.pair.generate import Cache, Written, extend
from adaserve.pair.model import TinyLlama
from adaserve.pair.prompts import load_prompts
from adaserve.pair.vocabulary import BOS_ID

CATEGORIES = ("coding", "summarization")
"""Categories of the shipped prompts that make long texts when put one after the other."""


def long_prompts(tokenizer: Tokenizer, category: str, rows: int, length: int) -> Tensor:
    """[rows, length]: held-out prompts of a category, one after the other, each begun with `begin`.

    Where a row begins does not depend on the length. Raises PairError if there are too few."""
    ids: list[int] = []
    for prompt in load_prompts(category):
        ids += [BOS_ID, *tokenizer.encode(prompt.text, add_special_tokens=False).ids]
    if len(ids) < rows * length:
        raise PairError(
            f"the held-out {category} prompts have {len(ids)} tokens, not {rows} x {length}: ask for fewer "
            "or shorter texts"
        )
    return torch.tensor(ids).unfold(0, length, len(ids) // rows)[:rows]


@torch.no_grad()
def sparse_logits(model: TinyLlama, written: Written, window: int, sinks: int) -> Tensor:
    """The model's logits for every written token, [rows, new, vocabulary], if it reads the first ``sinks``
    and the last ``window`` tokens before each one (0 = all). The KV cache is as when everything is read.
    """
    whole, first = written.whole, written.prompts.shape[1] - 1
    full = Cache.empty(model, len(whole), whole.shape[1])
    extend(model, whole[:, :-1], full)
    steps = []
    for position in range(first, whole.shape[1] - 1):
        left_out = position - sinks - window if window else 0
        cache = _without(full, position, sinks, max(0, left_out))
        steps.append(extend(model, whole[:, position : position + 1], cache))
    return torch.stack(steps, dim=1)


def _without(full: Cache, position: int, sinks: int, left_out: int) -> Cache:
    """What is cached before ``position``, with a gap after the sinks; keys keep their positions."""
    parts = (full.store[..., :sinks, :], full.store[..., sinks + left_out : position, :])
    store = fn.pad(torch.cat(parts, dim=-2), (0, 0, 0, 1))
    cos, sin = (of[left_out:] for of in full.rope)
    return Cache(store, (cos, sin), position - left_out)


def ranks(logits: Tensor, written: Written, noise: Tensor, scale: float, spread: float) -> Tensor:
    """How many tokens the draft, as it reads its logits, puts before the written one, [rows, new]."""
    read = logits * scale + noise * spread
    return (read > read.gather(-1, written.text[..., None])).sum(-1)


def tree_tokens(ranks: Tensor, deepest: int, width: int = 1) -> tuple[float, ...]:
    """Expected tokens, the bonus included, of trees with 0, 1, ..., ``deepest`` levels.

    A tree has the draft's ``width`` best tokens at each level, and continues after the best one only.
    Averaged over the places where the deepest tree still fits into the text.
    """
    places = ranks.shape[1] - deepest + 1
    offered, followed = (ranks < width).float(), (ranks == 0).float()
    accepted = torch.zeros(len(ranks), ranks.shape[1] + 1)
    expected = [1.0]
    for level in range(deepest):
        starts = slice(0, ranks.shape[1] - level)
        accepted = offered[:, starts] + followed[:, starts] * accepted[:, 1:]
        expected.append(1.0 + accepted[:, :places].mean().item())
    return tuple(expected)
