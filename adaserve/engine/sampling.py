"""One draw per verified token from exactly the distribution that plain decoding would use, on any device.

A sampled token is the best one after Gumbel noise of its request and position (adaserve/noise.py). Draft
trees do not enter, nor do other requests, so the text of a request is the same whatever was drafted and
whoever is served beside it.

SGLang's own relaxed form applies a request's penalties as they stood at the root to the whole
tree, which changes the output. Here every node gets the penalties of its own path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.sampler import (
    apply_custom_logit_processor,
    sampling_from_probs_torch,
    top_k_top_p_min_p_sampling_from_probs_torch,
)
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch import Tensor

from adaserve.engine.grammar import Allowed
from adaserve.engine.parts import Device
from adaserve.engine.reading import Reading
from adaserve.engine.state import RequestState
from adaserve.engine.trees.verify import Tensors, VerifyBatch
from adaserve.patches.dead_ends import TOO_EARLY


@dataclass(frozen=True)
class Step:
    """The requests of one verification, and what they ask of their draws."""

    device: Device
    reqs: Sequence[Any]
    states: Sequence[RequestState]
    info: SamplingBatchInfo
    verified: VerifyBatch
    tensors: Tensors  # the verified tokens on the device
    allowed: Allowed | None = None  # by the requests' grammars

    def of_rows(self, wanted: Callable[[Any], bool]) -> np.ndarray:
        """bool [n]: requests whose sampling parameters are as ``wanted``."""
        return np.array([wanted(r.sampling_params) for r in self.reqs], np.bool_)

    def tokens_of(self, rows: np.ndarray) -> np.ndarray:
        """int64: the verified tokens of the requests in a mask [n]."""
        return np.flatnonzero(rows[self.verified.row])

    def put(self, **arrays: np.ndarray) -> list[Tensor]:
        return list(self.device.put(arrays).values())

    def column(self, name: str, at: np.ndarray) -> Tensor:
        """[k] values of a numeric sampling parameter at the verified tokens ``at``."""
        values = np.array([getattr(r.sampling_params, name) for r in self.reqs])
        kind = np.int64 if values.dtype.kind in "iu" else np.float32
        return self.put(values=values[self.verified.row[at]].astype(kind))[0]

    @cached_property
    def temperature(self) -> np.ndarray:
        """float64 [n]: 0 = greedy, which SGLang writes as top_k 1."""
        return np.array(
            [0.0 if r.sampling_params.top_k == 1 else r.sampling_params.temperature for r in self.reqs]
        )


def is_plain_greedy(info: SamplingBatchInfo, reqs: Sequence[Any]) -> bool:
    """Whether the argmax of the raw logits is the draw of every row, so that no logits are needed."""
    return (
        info.is_all_greedy
        and info.logit_bias is None
        and not info.has_custom_logit_processor
        and not any(has_penalty(r.sampling_params) for r in reqs)
    )


def has_penalty(p: Any) -> bool:
    """Whether sampling parameters make logits depend on what was generated."""
    return bool(p.frequency_penalty or p.presence_penalty or p.repetition_penalty != 1.0 or p.min_new_tokens)


# -- logits -------------------------------------------------------------------------------------


def adjust_logits(logits: Tensor, step: Step) -> None:
    """Penalties, grammar, logit bias, custom processors, in SGLang's order, in place on [T, vocab]."""
    info = step.info
    if (penalized := step.of_rows(has_penalty)).any():
        _penalize(logits, step, penalized)
    if step.allowed is not None:
        step.allowed.mask(logits, step.verified.row, step.verified.candidate)
    if info.logit_bias is not None:
        logits.add_(info.logit_bias[step.tensors["row"]])
    if info.has_custom_logit_processor:
        # Such requests have root-only trees, so the rows of the batch are the roots.
        root = step.tensors["root"]
        rows = logits[root]
        apply_custom_logit_processor(rows, info)
        logits[root] = rows


def _penalize(logits: Tensor, step: Step, penalized: np.ndarray) -> None:
    """SGLang's frequency, presence, repetition and min-new-tokens penalties at every node of some rows."""
    at = step.tokens_of(penalized)
    v, rows = step.verified, np.flatnonzero(penalized)
    generated = [step.states[r].generated for r in rows]
    rank = np.cumsum(penalized) - 1
    on_path, path_token = _paths(v, at)
    seen = _counts(generated, logits, step)[step.put(row=rank[v.row[at]])[0]]
    node, token = step.put(node=on_path, token=path_token)
    seen.index_put_((node, token), torch.ones((), device=seen.device), accumulate=True)
    length = np.array([len(g) for g in generated])[rank[v.row[at]]] + v.depth[at]
    every, (where,) = [step.reqs[r] for r in v.row[at]], step.put(at=at)
    logits[where] = _penalized(logits[where], seen, every, length, step.put)


def _paths(v: VerifyBatch, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(index into ``at``, token) of every node on the path to each token; the root is generated already."""
    of, token = [], []
    for i, end in enumerate(at.tolist()):
        node = end
        while v.depth[node]:
            of.append(i)
            token.append(int(v.tokens[node]))
            node = int(v.parent[node])
    return np.array(of, np.int64), np.array(token, np.int64)


def _counts(generated: Sequence[Sequence[int]], logits: Tensor, step: Step) -> Tensor:
    """float32 [rows, vocab]: how often each token was generated."""
    of = np.repeat(np.arange(len(generated)), [len(g) for g in generated])
    row, token = step.put(row=of, token=np.array([t for g in generated for t in g], np.int64))
    counts = torch.zeros(len(generated), logits.shape[1], device=logits.device)
    return counts.index_put_((row, token), torch.ones((), device=logits.device), accumulate=True)


Put = Callable[..., list[Tensor]]


def _penalized(logits: Tensor, seen: Tensor, reqs: Sequence[Any], length: np.ndarray, put: Put) -> Tensor:
    """``logits`` [k, vocab] with the penalties of ``reqs`` [k] after ``length`` [k] tokens."""
    additive, scale = _penalty(seen, reqs, length, put)
    logits = logits + additive
    return torch.where(logits < 0, logits * scale, logits / scale)


def _penalty(seen: Tensor, reqs: Sequence[Any], length: np.ndarray, put: Put) -> tuple[Tensor, Tensor]:
    """[k, vocab] each: what is added to the logits, and then the factor of the repetition penalty."""

    def column(name: str) -> np.ndarray:
        return np.array([getattr(r.sampling_params, name) for r in reqs], np.float32)

    names = ("frequency_penalty", "presence_penalty", "repetition_penalty")
    frequency, presence, repetition = (t[:, None] for t in put(**{n: column(n) for n in names}))
    additive = -(seen * frequency) - (seen > 0) * presence
    short = np.flatnonzero(length < column("min_new_tokens"))
    if len(short):
        stops = [_stop_tokens(reqs[i]) for i in short]
        row = np.repeat(short, [len(s) for s in stops])
        row_, stop = put(row=row, stop=np.array([t for s in stops for t in s], np.int64))
        additive[row_, stop] = TOO_EARLY
    return additive, torch.where(seen > 0, repetition, 1.0)


def _stop_tokens(req: Any) -> list[int]:
    stops = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    stops |= set(req.tokenizer.additional_stop_token_ids or ()) | {req.tokenizer.eos_token_id}
    return sorted(s for s in stops if s is not None)


def restore_penalties(info: SamplingBatchInfo, reqs: Sequence[Any]) -> None:
    """For a prefill: SGLang forgets what a retracted request had generated when it prefills it anew."""
    for r, req in enumerate(reqs):
        if not req.output_ids or not has_penalty(req.sampling_params):
            continue
        sums, factors = info.acc_additive_penalties, info.acc_scaling_penalties
        seen = torch.bincount(torch.tensor(req.output_ids), minlength=info.vocab_size).float()[None]
        put = _put_on(sums.device)
        additive, scale = _penalty(seen.to(sums.device), [req], np.array([len(req.output_ids)]), put)
        sums[r] = additive[0]
        if factors is not None:
            factors[r] = scale[0]


def _put_on(device: torch.device) -> Put:
    return lambda **arrays: [torch.from_numpy(a).to(device) for a in arrays.values()]


# -- draws --------------------------------------------------------------------------------------


def draw(logits: Tensor, step: Step) -> Tensor:
    """One token per row of ``logits`` [T, vocab] (adjusted already), int64 [T].

    A request's own settings decide which rule applies to it, on the host, so a draw does not depend on what
    other requests ask for.
    """
    if step.info.is_all_greedy:
        return logits.argmax(dim=-1)
    vocabulary = logits.shape[1]
    filtered = step.of_rows(lambda p: p.top_k != 1 and (p.top_k < vocabulary or p.top_p < 1 or p.min_p > 0))
    if step.info.sampling_seed is not None:
        return _draw_seeded(logits, step, filtered)
    row = step.verified.row
    if len(at := step.tokens_of(filtered)):
        (where,) = step.put(at=at)
        probs = _probs(logits[where], step, at)
        settings = (step.column(name, at) for name in ("top_k", "top_p", "min_p"))
        allowed = _allowed(probs, *settings)
        logits = logits.clone()  # log-probabilities are told without the filters
        logits[where] = logits[where].masked_fill_(~allowed, -torch.inf)
    keys = np.array([s.key for s in step.states], np.uint64)
    return step.device.draw(logits, Reading.draws(step.temperature[row], keys[row], step.verified.positions))


def _probs(logits: Tensor, step: Step, at: np.ndarray) -> Tensor:
    return torch.softmax(logits / step.column("temperature", at)[:, None], dim=-1)


def _allowed(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """bool [k, vocab]: tokens that top-k, top-p and min-p leave of ``probs``, jointly as SGLang does."""
    falling, token = probs.sort(dim=-1, descending=True)
    rank = torch.arange(probs.shape[1], device=probs.device)
    kept = rank < top_k[:, None]
    kept &= falling.cumsum(dim=-1) - falling <= top_p[:, None]
    kept &= falling >= min_p[:, None] * falling[:, :1]
    return torch.zeros_like(kept).scatter_(1, token, kept)


def _draw_seeded(logits: Tensor, step: Step, filtered: np.ndarray) -> Tensor:
    """Draws that SGLang's deterministic inference would make: its own function of seed and position."""
    out = logits.argmax(dim=-1)
    plain = (step.temperature > 0) & ~filtered
    for rows, is_filtered in ((plain, False), (filtered, True)):
        if not len(at := step.tokens_of(rows)):
            continue
        where, position, row = step.put(
            at=at, position=step.verified.positions[at], row=step.verified.row[at]
        )
        probs, seed = _probs(logits[where], step, at), step.info.sampling_seed[row]
        if is_filtered:
            top_k, top_p, min_p = (step.column(n, at) for n in ("top_k", "top_p", "min_p"))
            wants_min_p = bool(step.of_rows(lambda p: p.min_p > 0)[step.verified.row[at]].any())
            out[where] = top_k_top_p_min_p_sampling_from_probs_torch(
                probs, top_k, top_p, min_p, wants_min_p, seed, position
            ).long()
        else:
            out[where] = sampling_from_probs_torch(probs, seed, position).long()
    return out
