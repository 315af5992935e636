"""The target's draws at verified tokens on the device, with SGLang's sampling settings.

The rules, and for the same requests the draws, are those of ``adaserve.engine.sampling``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.layers.sampler import (
    apply_custom_logit_processor,
    sampling_from_probs_torch,
    top_k_top_p_min_p_sampling_from_probs_torch,
)
from torch import Tensor

from adaserve.engine import sampling
from adaserve.engine.device import noise
from adaserve.engine.device.layout import to_device
from adaserve.engine.device.verify import DeviceVerify
from adaserve.engine.state import RequestState


def draw(
    batch: Any, v: DeviceVerify, logits: Tensor, best: Tensor, states: list[RequestState]
) -> tuple[Tensor, Tensor | None]:
    """Draws int64 [T], and the adjusted fp32 logits where they were needed."""
    info = batch.sampling_info
    # SGLang fills these in when it makes a ForwardBatch, which we do not.
    info.grammars = [r.grammar for r in batch.reqs] if batch.has_grammar else None
    if not batch.return_logprob and sampling.is_plain_greedy(info, batch.reqs):
        return best, None
    adjusted = logits.float().clone() if logits.dtype == torch.float32 else logits.float()
    _adjust(adjusted, v, batch, states)
    return _sample(adjusted, v, batch, states), adjusted


def _adjust(logits: Tensor, v: DeviceVerify, batch: Any, states: list[RequestState]) -> None:
    """Penalties, grammar, logit bias, custom processors, in SGLang's order, in place on [T, vocab]."""
    info = batch.sampling_info
    if any(sampling.has_penalty(r) for r in batch.reqs):
        _penalize(logits, v, batch, states)
    if info.grammars:
        info.update_regex_vocab_mask()
        if info.grammar_mask is not None:
            _at_roots(logits, v, info.grammar_mask.apply)
            info.grammar_mask = None
    if info.logit_bias is not None:
        logits.add_(info.logit_bias[v.row])
    if info.has_custom_logit_processor:
        # Such requests have root-only trees, so the rows of the batch are the roots.
        _at_roots(logits, v, lambda rows: apply_custom_logit_processor(rows, info))


def _at_roots(logits: Tensor, v: DeviceVerify, apply: Any) -> None:
    rows = logits[v.root]
    apply(rows)
    logits[v.root] = rows


class _HostTree:
    """What the host's penalties read of a verification."""

    def __init__(self, v: DeviceVerify) -> None:
        self.row, self.depth, self.parent, self.tokens = (
            t.cpu().numpy() for t in (v.row, v.depth, v.parent, v.tokens)
        )


def _penalize(logits: Tensor, v: DeviceVerify, batch: Any, states: list[RequestState]) -> None:
    """Rare, and different at every node: worked out on the host, which costs a copy both ways."""
    host, tree = logits.cpu(), _HostTree(v)
    for r, req in enumerate(batch.reqs):
        if sampling.has_penalty(req):
            sampling._apply_penalties(host, tree, r, req, states[r].generated)  # type: ignore[arg-type]
    logits.copy_(host)


def _sample(logits: Tensor, v: DeviceVerify, batch: Any, states: list[RequestState]) -> Tensor:
    """One token per row of ``logits`` [T, vocab], int64 [T]: the best after its request's noise.

    Which rule applies to a request is read off its settings on the host.
    """
    info = batch.sampling_info
    if info.is_all_greedy:
        return logits.argmax(dim=-1)
    settings, vocabulary, device = [r.sampling_params for r in batch.reqs], logits.shape[1], logits.device
    greedy = np.array([p.top_k == 1 for p in settings])
    filtered = ~greedy & np.array(
        [p.top_k < vocabulary or p.top_p < 1 or p.min_p > 0 for p in settings], np.bool_
    )
    is_greedy = to_device(greedy, device)[v.row]
    if info.sampling_seed is not None:
        wants_min_p = any(p.min_p > 0 for p in settings)
        return torch.where(
            is_greedy, logits.argmax(dim=-1), _seeded(logits, v, info, bool(filtered.any()), wants_min_p)
        )
    temperature = info.temperatures[v.row]
    if filtered.any():
        with device:  # where the host's rule makes its tensors
            allowed = sampling._allowed(
                torch.softmax(logits / temperature, dim=-1),
                info.top_ks[v.row],
                info.top_ps[v.row],
                info.min_ps[v.row],
            )
        logits = logits.masked_fill(~allowed & to_device(filtered, device)[v.row][:, None], -torch.inf)
    keys = to_device(np.array([s.key for s in states], np.uint64).view(np.int64), device)[v.row]
    scale = torch.where(is_greedy, 1.0, 1.0 / temperature[:, 0])
    return noise.read(logits, scale, (~is_greedy).float(), keys, v.positions).argmax(dim=-1)


def _seeded(logits: Tensor, v: DeviceVerify, info: Any, filtered: bool, wants_min_p: bool) -> Tensor:
    """Draws that SGLang's deterministic inference would make: its own function of seed and position."""
    probs = torch.softmax(logits / info.temperatures[v.row], dim=-1)
    seed = info.sampling_seed[v.row]
    if not filtered:
        return sampling_from_probs_torch(probs, seed, v.positions).long()
    top_k, top_p, min_p = info.top_ks[v.row], info.top_ps[v.row], info.min_ps[v.row]
    return top_k_top_p_min_p_sampling_from_probs_torch(
        probs, top_k, top_p, min_p, wants_min_p, seed, v.positions
    ).long()
