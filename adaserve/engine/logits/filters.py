"""Top-k, top-p and min-p: which tokens a draw may take.

The rule, on every device: the tokens of a row stand in the order of their logits, the largest first, and
those with equal logits in the order of their ids. Kept is what all three allow, as in SGLang: the first
``top_k``; those before which no more than ``top_p`` of the probability stands (1 keeps all); and those that
are at least ``min_p`` times as likely as the first. (While a request of the batch sets ``min_p``, SGLang's
FlashInfer sampler takes the share ``top_p`` of what ``top_k`` has left, and so keeps fewer tokens.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from adaserve.engine.logits.portions import portions

logger = logging.getLogger(__name__)

Filter = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""(logits [T, vocab], at int64 [k], temperature, top_k, top_p, min_p [k] each): in place, -inf for what is
not kept in the rows ``at``. ``top_k`` is int64, the other settings are fp32."""

EDGE = 1e-5
"""So close to what a request asks for, rounding may decide whether a token is kept."""


def by_sort(
    logits: Tensor, at: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> None:
    """A ``Filter`` of torch's operators."""
    settings = temperature, top_k, top_p, min_p
    for part in portions(len(at), logits.shape[1]):
        here = at[part]
        some = logits[here]
        logits[here] = some.masked_fill_(~_kept(some, *(s[part, None] for s in settings)), -torch.inf)


def _order(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[k, vocab] each: tokens, the share of the probability before each, and how likely it is beside the
    first. ``temperature``: [k, 1]."""
    falling, token = logits.sort(dim=-1, descending=True, stable=True)
    likely = falling.sub_(falling[:, :1].clone()).div_(temperature).exp_()
    before = likely.cumsum(dim=-1).sub_(likely).div_(likely.sum(dim=-1, keepdim=True))
    return token, before, likely


def _kept(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """bool [k, vocab]; settings [k, 1]."""
    token, before, likely = _order(logits.float(), temperature)
    kept = torch.arange(logits.shape[1], device=logits.device) < top_k
    kept &= (before <= top_p) | (top_p >= 1)  # sums are rounded, and may be more than 1
    kept &= likely >= min_p
    return torch.zeros_like(kept).scatter_(1, token, kept)


def differences(other: Filter, logits: Tensor, settings: Sequence[Tensor]) -> Tensor:
    """int64 [k]: in how many tokens of each row ``other`` differs from ``by_sort``, but for those on an edge.
    ``logits`` [k, vocab]; ``settings``: temperature, top_k, top_p, min_p [k] each."""
    found, every = [], torch.arange(len(logits), device=logits.device)
    for one in (by_sort, other):
        filtered = logits.clone()
        one(filtered, every, *settings)
        found.append(filtered != logits)
    temperature, _, top_p, min_p = (s[:, None] for s in settings)
    token, before, likely = _order(logits.double(), temperature)
    on_edge = (top_p < 1) & ((before - top_p).abs() < EDGE) | ((likely / min_p - 1).abs() < EDGE)
    return ((found[0] != found[1]).gather(1, token) & ~on_edge).sum(dim=1)


EXAMPLES = (
    (1.0, 50, 1.0, 0.0), (0.8, 1 << 30, 0.9, 0.0), (1.5, 1 << 30, 1.0, 0.05), (0.7, 40, 0.95, 0.01),
    (1.0, 1, 1.0, 0.0), (1.0, 1 << 30, 1e-6, 0.0), (1.0, 20_000, 0.999, 0.0), (1.0, 1 << 30, 1.0, 1.0),
)  # fmt: skip
"""Temperature, top_k, top_p and min_p, as requests ask for them and beyond."""


def examples(rows: int, vocabulary: int, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """What ``differences`` takes: logits with many equal ones, and some that a grammar forbids."""
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(rows, vocabulary, generator=generator)).bfloat16().float()
    logits[:, ::7] = -torch.inf
    logits[-1] = 0.0
    asked = list(zip(*(EXAMPLES[r % len(EXAMPLES)] for r in range(rows)), strict=True))
    kinds = (torch.float32, torch.int64, torch.float32, torch.float32)
    settings = [torch.tensor(s, dtype=kind, device=device) for s, kind in zip(asked, kinds, strict=True)]
    return logits.to(device), settings


def checked(other: Filter, vocabulary: int, device: torch.device) -> Filter:
    """``other`` if it does here what ``by_sort`` does, or else that one, with a sentence."""
    try:
        wrong = int((differences(other, *examples(len(EXAMPLES), vocabulary, device)) > 0).sum())
        reason = f"it is wrong for {wrong} of {len(EXAMPLES)} examples" if wrong else None
    except Exception as error:  # a compiler, a driver: it can be anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1][:300]
    if reason is None:
        return other
    logger.warning(
        "AdaServe: the kernel for top-k, top-p and min-p cannot be used on this host, so logits are sorted "
        "(slower where requests filter): %s", reason,
    )  # fmt: skip
    return by_sort
