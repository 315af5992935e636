"""How far a draft is from its target, position by position, and how much of it is accepted.

Distributions are given by log-probabilities [n, k] over the same k outcomes: all tokens, or the target's
likeliest ones and "any other token" (``coarse``). Sources: Online Speculative Decoding (arXiv:2310.07177),
section 4; DistillSpec (arXiv:2310.08461) for the reverse and the Jensen-Shannon divergence.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as fn

from adaserve.pair.distill import SHARPENED

CHAIN = 4
"""Tokens of the chain of drafts that acceptance is told for."""
_LEAST = 1e-6
"""Probability of all tokens that are not kept, at the least."""
_MIN_LOG = -60.0
"""Log-probabilities below this are taken for it: their inverse must be a float32."""
_LK_DECAY = 1.0


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """[n]: sum min(p, q), the probability that a token drafted from q is accepted under p."""
    return torch.minimum(p.exp(), q.exp()).sum(-1)


def agreement(p: Tensor, q: Tensor) -> Tensor:
    """[n, k]: for each outcome i, the probability that it is both ``argmax(p + g)`` and ``argmax(q + g)``,
    where g is one Gumbel noise; the sum over i is how often a draft that shares the noise is right.

    It is ``1 / sum_j max(p_j / p_i, q_j / q_i)``. In the order of falling ``p_j / q_j``, outcomes up to i
    contribute ``p_j / p_i`` and later ones ``q_j / q_i``, so two running sums do.
    """
    p, q = p.clamp(min=_MIN_LOG), q.clamp(min=_MIN_LOG)
    order = (p - q).argsort(-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    up_to = p.exp().cumsum(-1)
    after = fn.pad(q.exp().flip(-1).cumsum(-1).flip(-1)[:, 1:], (0, 1))
    both = 1 / (up_to * (-p).exp() + after * (-q).exp())
    return torch.zeros_like(both).scatter(-1, order, both)


def forward_kl(p: Tensor, q: Tensor) -> Tensor:
    """[n]: KL(p || q) in nats."""
    return fn.kl_div(q, p, log_target=True, reduction="none").sum(-1)


def reverse_kl(p: Tensor, q: Tensor) -> Tensor:
    """[n]: KL(q || p) in nats."""
    return forward_kl(q, p)


def jsd(p: Tensor, q: Tensor) -> Tensor:
    """[n]: Jensen-Shannon divergence, the mean of both divergences from the middle of p and q."""
    middle = torch.logaddexp(p, q) - math.log(2)
    return (forward_kl(p, middle) + forward_kl(q, middle)) / 2


def lk(p: Tensor, q: Tensor) -> Tensor:
    """[n]: ``w KL(p || q) + (1 - w) (1 - overlap)``; w falls from 1 as the mean overlap rises.

    The weight is data: no gradient goes through it.
    """
    accepted = overlap(p, q)
    weight = torch.exp(-_LK_DECAY * accepted.detach().mean())
    return weight * forward_kl(p, q) + (1 - weight) * (1 - accepted)


Loss = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {"forward": forward_kl, "reverse": reverse_kl, "jsd": jsd, "lk": lk}
"""By the names of the option; "hard" needs more than distributions (``hard_loss``)."""


def hard_loss(logits: Tensor, token: Tensor, noise: Tensor, tau: float, weight: float) -> Tensor:
    """[n]: cross entropy of the served ``token`` [n] under ``(logits + weight noise) / tau``.

    The target drew it with that very noise [n, vocab] (adaserve/noise.py), so the draft need not explain
    chance.
    """
    return fn.cross_entropy((logits + weight * noise) / tau, token, reduction="none")


def coarse(logprobs: Tensor, ids: Tensor) -> Tensor:
    """[n, vocab] -> [n, k + 1]: the tokens ``ids`` [n, k], and all others together."""
    return with_rest(logprobs.gather(1, ids))


def with_rest(kept: Tensor) -> Tensor:
    """[n, k] -> [n, k + 1]: one more outcome, which has what the others leave of the probability."""
    rest = torch.log1p(-kept.exp().sum(-1, keepdim=True).clamp(max=1 - _LEAST))
    return torch.cat((kept, rest), dim=1)


def sharpened(logprobs: Tensor) -> Tensor:
    """The same at the low temperature that greedy requests are trained at as well."""
    return fn.log_softmax(logprobs / SHARPENED, dim=-1)


def loss_of(loss: Loss, p: Tensor, q: Tensor, greedy: bool) -> Tensor:
    """[n]: ``loss``; greedy requests care for the best token, so the sharpened distributions count too."""
    plain = loss(p, q)
    return plain + 0.5 * loss(sharpened(p), sharpened(q)) if greedy else plain


def expected_accepted(accepted: Tensor) -> float:
    """Tokens of a chain of drafts that are accepted on average, from [n] acceptances of n positions in a row.

    A chain that starts at t gives ``a_t + a_t a_t+1 + ...``; the mean is over all starts that have room.
    """
    chain = min(CHAIN, len(accepted))
    return float(accepted.unfold(0, chain, 1).cumprod(dim=1).sum(1).mean())
