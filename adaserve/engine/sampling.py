"""One draw per verified token from exactly the distribution that plain decoding would use.

A sampled token is the best one after Gumbel noise of its request and position (adaserve/noise.py). Draft
trees do not enter, so the text of a request is the same whatever was drafted.

SGLang's own relaxed form applies a request's penalties as they stood at the root to the whole
tree, which changes the output. Here every node gets the penalties of its own path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.sampler import (
    apply_custom_logit_processor,
    sampling_from_probs_torch,
    top_k_top_p_min_p_sampling_from_probs_torch,
)
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from adaserve.engine.host import gumbel
from adaserve.engine.host.gumbel import Reading
from adaserve.engine.state import RequestState
from adaserve.engine.trees.verify import VerifyBatch


def is_plain_greedy(info: SamplingBatchInfo, reqs: Sequence[Any]) -> bool:
    """Whether the argmax of the raw logits is the draw of every row, so that no logits are needed."""
    return (
        info.is_all_greedy
        and info.logit_bias is None
        and not info.grammars
        and not info.has_custom_logit_processor
        and not any(has_penalty(r) for r in reqs)
    )


def has_penalty(req: Any) -> bool:
    p = req.sampling_params
    return bool(p.frequency_penalty or p.presence_penalty or p.repetition_penalty != 1.0 or p.min_new_tokens)


def adjust_logits(
    logits: torch.Tensor,
    batch: VerifyBatch,
    info: SamplingBatchInfo,
    reqs: Sequence[Any],
    states: Sequence[RequestState],
) -> None:
    """Penalties, grammar, logit bias, custom processors, in SGLang's order, in place on [T, vocab]."""
    for r, req in enumerate(reqs):
        if has_penalty(req):
            _apply_penalties(logits, batch, r, req, states[r].generated)
    if info.grammars:
        info.update_regex_vocab_mask()
        if info.grammar_mask is not None:
            _at_roots(logits, batch, info.grammar_mask.apply)
            info.grammar_mask = None
    if info.logit_bias is not None:
        logits.add_(info.logit_bias[torch.from_numpy(batch.row)])
    if info.has_custom_logit_processor:
        # Such requests have root-only trees, so the rows of the batch are the roots.
        _at_roots(logits, batch, lambda rows: apply_custom_logit_processor(rows, info))


def _at_roots(logits: torch.Tensor, batch: VerifyBatch, apply: Any) -> None:
    root = torch.from_numpy(batch.root)
    rows = logits[root]
    apply(rows)
    logits[root] = rows


def restore_penalties(info: SamplingBatchInfo, reqs: Sequence[Any]) -> None:
    """For a prefill: SGLang forgets what a retracted request had generated when it prefills it anew."""
    for r, req in enumerate(reqs):
        if not req.output_ids or not has_penalty(req):
            continue
        seen = _counts(req.output_ids, info.vocab_size)
        additive, scale = _penalty(req, seen, len(req.output_ids))
        info.acc_additive_penalties[r] = additive
        if info.acc_scaling_penalties is not None:
            info.acc_scaling_penalties[r] = scale


def _apply_penalties(
    logits: torch.Tensor, batch: VerifyBatch, r: int, req: Any, generated: Sequence[int]
) -> None:
    """SGLang's frequency, presence, repetition and min-new-tokens penalties, per node of row ``r``."""
    counts = _counts(generated, logits.shape[1])
    paths: dict[int, torch.Tensor] = {}
    for i in np.flatnonzero(batch.row == r):
        # The root is already among the generated tokens.
        seen = counts if batch.depth[i] == 0 else _plus_one(paths[batch.parent[i]], int(batch.tokens[i]))
        paths[i] = seen
        additive, scale = _penalty(req, seen, len(generated) + int(batch.depth[i]))
        row = logits[i].add_(additive)
        row.copy_(torch.where(row < 0, row * scale, row / scale))


def _penalty(req: Any, seen: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What is added to the logits, and then the factor of the repetition penalty, after ``length`` tokens."""
    p = req.sampling_params
    additive = -(seen * p.frequency_penalty) - (seen > 0) * p.presence_penalty
    if length < p.min_new_tokens:
        additive[_stop_tokens(req)] = -torch.inf
    return additive, torch.where(seen > 0, p.repetition_penalty, 1.0)


def _counts(tokens: Sequence[int], vocab_size: int) -> torch.Tensor:
    return torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=vocab_size).float()


def _plus_one(counts: torch.Tensor, token: int) -> torch.Tensor:
    out = counts.clone()
    out[token] += 1
    return out


def _stop_tokens(req: Any) -> list[int]:
    stops = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    stops |= set(req.tokenizer.additional_stop_token_ids or ()) | {req.tokenizer.eos_token_id}
    return sorted(s for s in stops if s is not None)


def draw(logits: torch.Tensor, batch: VerifyBatch, info: SamplingBatchInfo, keys: np.ndarray) -> np.ndarray:
    """One token per row of ``logits`` [T, vocab] (adjusted already), int64 [T].

    ``keys`` uint64 [n]: of the requests' noise, which decides the draws and which their drafts know.
    """
    if info.is_all_greedy:
        return logits.argmax(dim=-1).numpy()
    row = torch.from_numpy(batch.row)
    top_k, top_p, min_p = info.top_ks[row], info.top_ps[row], info.min_ps[row]
    greedy = top_k == 1  # so SGLang writes a temperature of 0
    temperature = torch.where(greedy, 0.0, info.temperatures[row, 0])
    filtered = ~greedy & ((top_k < logits.shape[1]) | (top_p < 1) | (min_p > 0))
    if info.sampling_seed is not None:
        return _draw_seeded(logits, batch, info, greedy, filtered)
    if filtered.any():
        logits = logits.clone()
        probs = torch.softmax(logits[filtered] / temperature[filtered, None], dim=-1)
        outside = ~_allowed(probs, top_k[filtered], top_p[filtered], min_p[filtered])
        logits[filtered] = logits[filtered].masked_fill_(outside, -torch.inf)
    reading = Reading.draws(temperature.numpy(), keys[batch.row], batch.positions)
    return gumbel.draw(logits, reading).numpy()


def _allowed(
    probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """bool [k, vocab]: tokens that top-k, top-p and min-p leave of ``probs``, jointly as SGLang does."""
    falling, token = probs.sort(dim=-1, descending=True)
    rank = torch.arange(probs.shape[1])
    kept = rank < top_k[:, None]
    kept &= falling.cumsum(dim=-1) - falling <= top_p[:, None]
    kept &= falling >= min_p[:, None] * falling[:, :1]
    return torch.zeros_like(kept).scatter_(1, token, kept)


def _draw_seeded(
    logits: torch.Tensor,
    batch: VerifyBatch,
    info: SamplingBatchInfo,
    greedy: torch.Tensor,
    filtered: torch.Tensor,
) -> np.ndarray:
    """Draws that SGLang's deterministic inference would make: its own function of seed and position."""
    row, positions = torch.from_numpy(batch.row), torch.from_numpy(batch.positions)
    assert info.sampling_seed is not None
    seed = info.sampling_seed[row]
    out = logits.argmax(dim=-1)
    plain = ~greedy & ~filtered
    if plain.any():
        out[plain] = _seeded(_probs(logits, info, row, plain), seed[plain], positions[plain])
    if filtered.any():
        out[filtered] = top_k_top_p_min_p_sampling_from_probs_torch(
            _probs(logits, info, row, filtered),
            info.top_ks[row][filtered],
            info.top_ps[row][filtered],
            info.min_ps[row][filtered],
            bool((info.min_ps[row][filtered] > 0).any()),
            seed[filtered],
            positions[filtered],
        ).long()
    return out.numpy()


def _probs(
    logits: torch.Tensor, info: SamplingBatchInfo, row: torch.Tensor, which: torch.Tensor
) -> torch.Tensor:
    return torch.softmax(logits[which] / info.temperatures[row[which]], dim=-1)


def _seeded(probs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return sampling_from_probs_torch(probs, seed, positions).long()
