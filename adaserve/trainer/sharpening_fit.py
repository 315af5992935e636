"""How the logits of a draft in training are read, and how well they are read so.

A server reads a draft by what was measured for it (adaserve/sharpening.py). Learning makes a draft more
certain and more like its target, so it wants another weight of the shared noise and another tau: both are
fitted anew to what was served.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as fn

from adaserve.noise import gumbel
from adaserve.pair.sharpening_loss import top_k_log_loss
from adaserve.sharpening import Correction, DraftSharpening
from adaserve.trainer import losses
from adaserve.trainer.draft import UNKNOWN
from adaserve.trainer.records import Record

_NOISE_FACTORS = np.geomspace(0.75, 1.4, 9)
_TAU_FACTORS = np.geomspace(0.6, 1.8, 15)
Device = torch.device | str
CPU = "cpu"
LIKELIEST = 64
"""Tokens of the target's that are looked at one by one; others are never counted as accepted."""


def accepted(record: Record, logits: Tensor, sharpening: DraftSharpening) -> Tensor:
    """[n]: the probability that the draft's best token is the served one, over all noise that the two could
    share; for greedy requests 0 or 1. A draft whose logits are NaN gets nothing accepted."""
    p, ids = likeliest(record, logits.device)
    if record.temperature == 0:
        return (logits.argmax(-1) == ids[:, 0]).float()
    q = losses.coarse(fn.log_softmax(logits / noise_weight(record, sharpening), dim=-1), ids)
    return losses.agreement(p, q)[:, :-1].sum(-1).nan_to_num(0.0)


def likeliest(record: Record, device: Device = CPU) -> tuple[Tensor, Tensor]:
    """Log-probabilities [n, k + 1] of the target's k likeliest tokens, best first, and of all others; the
    tokens [n, k]."""
    if record.ids is not None:
        return target(record, device), _ids(record, device)
    p = target(record, device)
    best, ids = p.topk(min(LIKELIEST, p.shape[1]))
    return losses.with_rest(best), ids


def noise_weight(record: Record, sharpening: DraftSharpening) -> float:
    """Of the shared noise, on the draft's logits as they are."""
    scale, spread = sharpening.with_shared_noise(record.temperature)
    return float(spread / scale)


def target(record: Record, device: Device = CPU) -> Tensor:
    """[n, k]: the target's log-probabilities of all tokens, or of the likeliest ones and of all others."""
    p = torch.from_numpy(record.logprobs.astype("float32")).to(device)
    if record.ids is None:
        return fn.log_softmax(p, dim=-1)  # rounding to float16 has moved the sum
    return losses.with_rest(p)


def draft(record: Record, logits: Tensor, temperature: float) -> Tensor:
    """[n, k]: what the draft says of the same outcomes at ``temperature``."""
    q = fn.log_softmax(logits / temperature, dim=-1)
    return q if record.ids is None else losses.coarse(q, _ids(record, q.device))


def noise(record: Record, vocabulary: int, device: Device = CPU) -> Tensor:
    """[n, vocabulary]: by which the target drew the record's tokens."""
    keys = np.full(len(record), record.key, np.uint64)
    at = record.cut + record.start + np.arange(len(record))
    return torch.from_numpy(gumbel(keys, at, vocabulary)).to(device)


def served(record: Record, device: Device = CPU) -> Tensor:
    """[n]: the tokens that were served."""
    first = record.start + 1
    return torch.from_numpy(record.tokens[first : first + len(record)].astype("int64")).to(device)


def knows_served(record: Record, logits: Tensor) -> Tensor:
    """bool [n]: whether the draft, which says ``logits``, knows the token that was served."""
    return logits.gather(1, served(record, logits.device)[:, None])[:, 0] > UNKNOWN / 2


@torch.no_grad()
def fit(
    records: Sequence[Record],
    logits: Sequence[Tensor],
    sharpening: DraftSharpening,
    present: Correction,
) -> Correction:
    """What ``sharpening`` lacks for a draft that says ``logits`` [n, vocab] of each record.

    The weight of the noise is the one under which most drafted tokens agree with the target's, the taus those
    under which its likeliest tokens are served as often as they claim. Where there is no record of a kind
    (greedy or drawn), that of the ``present`` draft stays."""
    every = list(zip(records, logits, strict=True))
    greedy = [(r, said) for r, said in every if r.temperature == 0]
    drawn = [(r, said) for r, said in every if r.temperature > 0 and r.key]
    noise, tau, greedy_tau = present.noise, present.tau, present.greedy_tau
    if drawn:
        noise = _best_noise(drawn, sharpening)
        tau = _best_tau(drawn, sharpening, noise)
    if greedy:
        greedy_tau = _best_tau(greedy, sharpening, 1.0)
    return Correction(noise, tau, greedy_tau)


def _best_noise(drawn: Sequence[tuple[Record, Tensor]], sharpening: DraftSharpening) -> float:
    scores = np.zeros(len(_NOISE_FACTORS))
    for record, logits in drawn:
        readings = (sharpening.corrected(Correction(noise=f)) for f in _NOISE_FACTORS)
        scores += [float(accepted(record, logits, reading).sum()) for reading in readings]
    return float(_NOISE_FACTORS[scores.argmax()])


def _best_tau(
    records: Sequence[tuple[Record, Tensor]], sharpening: DraftSharpening, noise_factor: float
) -> float:
    costs = np.zeros(len(_TAU_FACTORS))
    for record, logits in records:
        scale, spread = map(float, sharpening.with_shared_noise(record.temperature))
        read, token = logits * scale, served(record, logits.device)
        if record.temperature > 0:
            read = read + spread * noise_factor * noise(record, logits.shape[1], logits.device)
        costs += top_k_log_loss(read, token, _TAU_FACTORS)
    return float(_TAU_FACTORS[costs.argmin()])


def _ids(record: Record, device: Device) -> Tensor:
    assert record.ids is not None
    return torch.from_numpy(record.ids.astype("int64")).to(device)
