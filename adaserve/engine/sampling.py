"""One draw per verified token from exactly the distribution that plain decoding would use, on any device.

A sampled token is the best one after Gumbel noise of its request and position (adaserve/noise.py). Draft
trees and other requests have no influence, so the text of a request is the same whatever was drafted and
whichever requests run beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sglang.srt.layers.sampler import (
    sampling_from_probs_torch,
    top_k_top_p_min_p_sampling_from_probs_torch,
)
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch import Tensor

from adaserve.engine.device import Device
from adaserve.engine.grammar import Allowed
from adaserve.engine.logits.logit_transform import LogitTransform
from adaserve.engine.logits.portions import portions
from adaserve.engine.penalties import Penalties, has_penalty
from adaserve.engine.request_state import RequestState, temperature_of
from adaserve.engine.trees.verify import Tensors, VerifyBatch
from adaserve.patches.scheduler.logit_processors import apply_processors


@dataclass(frozen=True, slots=True)
class Settings:
    """What n requests ask of their draws."""

    temperature: np.ndarray  # float64 [n]: 0 = greedy
    top_k: np.ndarray  # int64 [n]
    top_p: np.ndarray  # float64 [n]
    min_p: np.ndarray  # float64 [n]
    penalized: np.ndarray  # bool [n]: logits depend on what was generated

    @classmethod
    def of(cls, reqs: Sequence[Any]) -> Settings:
        asked = [r.sampling_params for r in reqs]
        return cls(
            np.array([temperature_of(p) for p in asked], np.float64),
            np.array([p.top_k for p in asked], np.int64),
            np.array([p.top_p for p in asked], np.float64),
            np.array([p.min_p for p in asked], np.float64),
            np.array([has_penalty(p) for p in asked], np.bool_),
        )

    def filtered(self, vocabulary: int) -> np.ndarray:
        """bool [n]: requests that draw from only a part of the vocabulary."""
        less = (self.top_k < vocabulary) | (self.top_p < 1) | (self.min_p > 0)
        return less & (self.temperature > 0)


@dataclass(frozen=True)
class Step:
    """The requests of one verification, and what they ask of their draws."""

    device: Device
    reqs: Sequence[Any]
    states: Sequence[RequestState]
    settings: Settings
    info: SamplingBatchInfo
    verified: VerifyBatch
    tensors: Tensors  # the verified tokens on the device
    penalties: Penalties
    allowed: Allowed | None = None  # by the requests' grammars
    keeps: bool = True  # the adjusted logits, which are read again after the draws

    def tokens_of(self, rows: np.ndarray) -> np.ndarray:
        """int64: the verified tokens of the requests in a mask [n]."""
        return np.flatnonzero(rows[self.verified.row])

    def columns(self, at: np.ndarray, *names: str) -> list[Tensor]:
        """The verified tokens ``at`` int64 [k], and settings at them, [k] each."""
        row, arrays = self.verified.row[at], {"at": at}
        for name in names:
            values = getattr(self.settings, name)
            arrays[name] = values[row].astype(np.int64 if values.dtype.kind == "i" else np.float32)
        return list(self.device.put(arrays).values())


def is_plain_greedy(info: SamplingBatchInfo, settings: Settings) -> bool:
    """Whether the argmax of the raw logits is the draw of every row, so that no logits are needed."""
    return (
        info.is_all_greedy
        and info.logit_bias is None
        and not info.has_custom_logit_processor
        and not settings.penalized.any()
    )


# -- logits -------------------------------------------------------------------------------------


def adjust_logits(logits: Tensor, step: Step) -> None:
    """Penalties, grammar, logit bias, custom processors, in SGLang's order, in place on [T, vocab]."""
    info = step.info
    if (penalized := step.settings.penalized).any():
        step.penalties.apply(logits, penalized, step.reqs, step.states, step.verified, step.device.put)
    if step.allowed is not None:
        step.allowed.mask(logits, step.verified.row, step.verified.candidate)
    if info.logit_bias is not None:
        for part in portions(*logits.shape):
            logits[part].add_(info.logit_bias[step.tensors["row"][part]])
    if info.has_custom_logit_processor:
        # Such requests have root-only trees, so the rows of the batch are the roots.
        root = step.tensors["root"]
        rows = logits[root]
        apply_processors(rows, info)
        logits[root] = rows


# -- draws --------------------------------------------------------------------------------------


def draw(logits: Tensor, step: Step) -> Tensor:
    """One token per row of ``logits`` [T, vocab] (adjusted already), int64 [T]. Filters them in place, unless
    ``step`` keeps them.

    A request's own settings decide which rule applies to it, on the host, so a draw does not depend on what
    other requests ask for.
    """
    if step.info.is_all_greedy:
        return logits.argmax(dim=-1)
    vocabulary = logits.shape[1]
    asked = step.settings
    filtered = asked.filtered(vocabulary)
    if step.info.sampling_seed is not None:
        return _draw_seeded(logits, step, filtered)
    if len(at := step.tokens_of(filtered)):
        if step.keeps:  # log-probabilities are told without the filters
            logits = logits.clone()
        step.device.filter(logits, *step.columns(at, "temperature", "top_k", "top_p", "min_p"))
    row, keys = step.verified.row, np.array([s.key for s in step.states], np.uint64)
    transform = LogitTransform.draws(asked.temperature[row], keys[row], step.verified.positions)
    return step.device.draw(logits, transform)


def _draw_seeded(logits: Tensor, step: Step, filtered: np.ndarray) -> Tensor:
    """Draws that SGLang's deterministic inference would make: its own function of seed and position."""
    out = logits.argmax(dim=-1)
    seeds = step.info.sampling_seed[step.tensors["row"]]
    plain = (step.settings.temperature > 0) & ~filtered
    wants_min_p = bool((filtered & (step.settings.min_p > 0)).any())
    for rows, is_filtered in ((plain, False), (filtered, True)):
        at = step.tokens_of(rows)
        where, temperature, *settings = step.columns(at, "temperature", "top_k", "top_p", "min_p")
        for part in portions(len(at), logits.shape[1]):
            here = where[part]
            probs = (logits[here] / temperature[part, None]).softmax(dim=-1)
            seed, position = seeds[here], step.tensors["places"][0, here]
            if is_filtered:
                drawn = top_k_top_p_min_p_sampling_from_probs_torch(
                    probs, *(s[part] for s in settings), wants_min_p, seed, position
                )
            else:
                drawn = sampling_from_probs_torch(probs, seed, position)
            out[here] = drawn.long()
    return out
