"""SGLang's frequency, presence, repetition and min-new-tokens penalties at every node of candidate trees.

SGLang's own relaxed form applies a request's penalties as they stood at the root to the whole
tree, which changes the output. Here every node gets the penalties of its own path.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch import Tensor

from adaserve.engine.logits.portions import portions
from adaserve.engine.request_state import RequestState
from adaserve.engine.trees.verify import VerifyBatch
from adaserve.patches.scheduler.no_allowed_token import TOO_EARLY

Put = Callable[[Mapping[str, np.ndarray]], Mapping[str, Tensor]]
"""Host arrays on the device, in one upload."""

RATES = ("frequency_penalty", "presence_penalty", "repetition_penalty")


def has_penalty(p: Any) -> bool:
    """Whether sampling parameters make logits depend on what was generated."""
    return bool(p.frequency_penalty or p.presence_penalty or p.repetition_penalty != 1.0 or p.min_new_tokens)


@dataclass(slots=True)
class _Counted:
    """A request whose text is counted."""

    state: RequestState
    slot: int  # its row of the counts
    tokens: int = 0  # of its text, so far


class Penalties:
    """Penalties of running requests, and on the device how often each has generated each token.

    Of a text that may be thousands of tokens long, an iteration uploads what is new.
    """

    def __init__(self) -> None:
        self._counts: Tensor | None = None  # float32 [slots, vocab]
        self._counted: list[_Counted] = []  # the requests that had penalties the last time

    def apply(
        self,
        logits: Tensor,
        penalized: np.ndarray,
        reqs: Sequence[Any],
        states: Sequence[RequestState],
        v: VerifyBatch,
        put: Put,
    ) -> None:
        """In place at every token of the rows ``penalized`` (bool [n]) of ``logits`` [T, vocab]."""
        vocabulary, rows = logits.shape[1], np.flatnonzero(penalized)
        at = np.flatnonzero(penalized[v.row])
        rank = (np.cumsum(penalized) - 1)[v.row[at]]  # of a token's request among the penalized
        mine, texts = [reqs[r] for r in rows], [states[r] for r in rows]
        slots, fresh, new = self._take_in(texts, vocabulary)
        length = np.array([len(s.generated) for s in texts])[rank] + v.depth[at]
        path, stops = _paths(v, at, vocabulary), _forbidden_stops(mine, rank, length, vocabulary)
        t = put({
            "fresh": fresh, "new": new, "at": at, "slot": slots[rank], "path": path, "stops": stops,
            **{name: values[rank] for name, values in _rates(mine).items()},
        })  # fmt: skip
        counts, one = self._room(logits), torch.ones(1, device=logits.device)
        counts.index_fill_(0, t["fresh"], 0.0)
        counts.view(-1).index_add_(0, t["new"], one.expand(len(new)))
        for part in portions(len(at), vocabulary):
            where, seen = t["at"][part], counts[t["slot"][part]]
            on_path = _inside(part, path, t["path"], vocabulary)
            seen.view(-1).index_add_(0, on_path, one.expand(len(on_path)))
            too_early = _inside(part, stops, t["stops"], vocabulary)
            additive, scale = _penalty(seen, [t[name][part, None] for name in RATES], too_early)
            some = additive.add_(logits[where])
            logits[where] = torch.where(some < 0, some * scale, some / scale)

    def _take_in(
        self, states: Sequence[RequestState], vocabulary: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Slots of requests, int64 [n], those of them that held others' counts, and the places in the counts
        of what is new of their texts. The slots of requests that are not named are free again."""
        known = {id(c.state): c for c in self._counted}
        kept = [known[id(s)] for s in states if id(s) in known]
        taken = {c.slot for c in kept}
        free = (slot for slot in itertools.count() if slot not in taken)
        added = {id(s): _Counted(s, next(free)) for s in states if id(s) not in known}
        self._counted = [added.get(id(s)) or known[id(s)] for s in states]
        new = []
        for c in self._counted:
            tokens = np.array(c.state.generated[c.tokens :], np.int64)
            new.append(c.slot * vocabulary + tokens)
            c.tokens += len(tokens)
        slots, fresh = ([c.slot for c in some] for some in (self._counted, added.values()))
        return np.array(slots, np.int64), np.array(fresh, np.int64), np.concatenate(new)

    def _room(self, logits: Tensor) -> Tensor:
        """The counts, with all slots that are in use."""
        have = 0 if self._counts is None else len(self._counts)
        if have < (needed := 1 + max(c.slot for c in self._counted)):
            grown = torch.zeros(max(needed, 2 * have), logits.shape[1], device=logits.device)
            if self._counts is not None:
                grown[:have] = self._counts
            self._counts = grown
        assert self._counts is not None
        return self._counts


def _inside(rows: slice, places: np.ndarray, there: Tensor, vocabulary: int) -> Tensor:
    """Of rising ``places`` in [k, vocab] those in some of the rows, as places in these. ``there``: the places
    on the device."""
    begin = rows.start * vocabulary
    first, end = np.searchsorted(places, (begin, rows.stop * vocabulary))
    return there[first:end] - begin


def _paths(v: VerifyBatch, at: np.ndarray, vocabulary: int) -> np.ndarray:
    """Rising places in [k, vocab], k = len(at): the tokens on the path to each of the verified tokens ``at``.
    Its root is part of the text."""
    of, node, found = np.arange(len(at)), at, [np.zeros(0, np.int64)]
    while len(inside := np.flatnonzero(v.depth[node])):
        of, node = of[inside], node[inside]
        found.append(of * vocabulary + v.tokens[node])
        node = v.parent[node]
    return np.sort(np.concatenate(found))


def _rates(reqs: Sequence[Any]) -> dict[str, np.ndarray]:
    return {n: np.array([getattr(r.sampling_params, n) for r in reqs], np.float32) for n in RATES}


def _forbidden_stops(
    reqs: Sequence[Any], rank: np.ndarray, length: np.ndarray, vocabulary: int
) -> np.ndarray:
    """Rising places in [k, vocab]: tokens that would end a text of ``length`` [k] too early, whose request is
    ``reqs[rank]``."""
    least = np.array([r.sampling_params.min_new_tokens for r in reqs])[rank]
    short, found = length < least, [np.zeros(0, np.int64)]
    for r in np.unique(rank[short]).tolist():
        of = np.flatnonzero(short & (rank == r))
        found.append((of[:, None] * vocabulary + np.array(stop_tokens(reqs[r]), np.int64)).ravel())
    return np.sort(np.concatenate(found))


def stop_tokens(req: Any) -> list[int]:
    """Tokens that end the request, unless it ignores them."""
    stops = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if req.tokenizer is not None:  # --skip-tokenizer-init
        stops |= set(req.tokenizer.additional_stop_token_ids or ()) | {req.tokenizer.eos_token_id}
    return sorted(s for s in stops if s is not None)


def _penalty(seen: Tensor, rates: Sequence[Tensor], stops: Tensor) -> tuple[Tensor, Tensor]:
    """[k, vocab] each: what is added to the logits, and then the factor of the repetition penalty. ``rates``
    [k, 1] each, as ``RATES``; ``stops``: places of tokens that may not come yet."""
    frequency, presence, repetition = rates
    is_seen = seen > 0
    additive = -(seen * frequency) - is_seen * presence
    additive.view(-1).index_fill_(0, stops, TOO_EARLY)
    return additive, torch.where(is_seen, repetition, 1.0)


def restore_penalties(info: SamplingBatchInfo, reqs: Sequence[Any]) -> None:
    """For a prefill: SGLang forgets what a retracted request had generated when it prefills it anew."""
    for r, req in enumerate(reqs):
        if not req.output_ids or not has_penalty(req.sampling_params):
            continue
        sums, factors = info.acc_additive_penalties, info.acc_scaling_penalties
        seen = torch.bincount(torch.tensor(req.output_ids), minlength=info.vocab_size).float()[None]
        length, first = np.array([len(req.output_ids)]), np.zeros(1, np.int64)
        stops = _forbidden_stops([req], first, length, info.vocab_size)
        rates = [torch.from_numpy(values)[:, None] for values in _rates([req]).values()]
        additive, scale = _penalty(seen, rates, torch.from_numpy(stops))
        sums[r] = additive[0].to(sums.device)
        if factors is not None:
            factors[r] = scale[0].to(factors.device)
