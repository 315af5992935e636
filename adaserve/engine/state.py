"""What the worker knows about the requests of one decode iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from adaserve.engine.grammar import Grammars
from adaserve.engine.matchers import can_walk, is_live
from adaserve.scheduler.interface import RunningBatch
from adaserve.slo.lengths import OutputLengths


@dataclass(slots=True)
class RequestState:
    """Per-request memory between iterations, kept by request-pool row.

    Under SGLang's overlap schedule ``Req`` lags one iteration behind, so what an iteration needs from the one
    before it is kept here.
    """

    rid: str
    slo_class: str
    tpot_slo_s: float  # inf = none
    decode_start_s: float  # when the first output token was known
    decoded: int = 0  # tokens since decode_start_s
    generated: list[int] = field(default_factory=list)  # all output tokens, first one included
    key: int = 0  # of its noise when it samples (adaserve/noise.py)
    speculation: int | None = None  # deepest node that its client allows; None = no limit
    osl: int | None = None  # output tokens that its client expects
    learn: bool = True  # whether its client allows that the draft learns from it
    prompt_tokens: int = 0

    @property
    def cached(self) -> int:
        """Its tokens in the KV cache: all but the last one."""
        return self.prompt_tokens + len(self.generated) - 1

    def advance(self, tokens: list[int]) -> None:
        """Takes in what an iteration emitted."""
        self.generated.extend(tokens)
        self.decoded += len(tokens)


@dataclass(frozen=True)
class DecodeRows:
    """The n requests of one decode iteration. ``L`` (seq_lens) counts cached tokens without the root."""

    states: list[RequestState]
    seq_lens: np.ndarray  # int64 [n]
    pool_rows: np.ndarray  # int64 [n]: rows of ``req_to_token``
    running: RunningBatch
    noisy: bool = True
    """Whether sampled requests draw by their own noise; not where SGLang's deterministic inference draws."""
    grammars: Grammars | None = None

    def __len__(self) -> int:
        return len(self.states)

    @cached_property
    def roots(self) -> np.ndarray:
        """int64 [n]: the token every tree hangs from, the last one that is known and not cached."""
        return np.array([s.generated[-1] for s in self.states], np.int64)

    @cached_property
    def keys(self) -> np.ndarray:
        """uint64 [n]: of the requests' noise."""
        return np.array([s.key for s in self.states], np.uint64)


def temperature_of(params: Any) -> float:
    """Of SGLang's sampling parameters; 0 = greedy, which SGLang writes as top_k 1 at temperature 1."""
    return 0.0 if params.top_k == 1 else float(params.temperature)


def max_tree_depth(req: Any, state: RequestState, remaining: int) -> int:
    """Deepest useful node that is allowed: 0 for requests whose logits depend on more than their own tokens.
    ``remaining``: tokens that may still be generated."""
    if req.custom_logit_processor is not None or req.to_finish is not None:
        return 0
    if req.grammar is not None and not (is_live(req.grammar) and can_walk(req.grammar)):
        return 0
    return remaining - 1 if state.speculation is None else min(remaining - 1, state.speculation)


def remaining_tokens(req: Any, state: RequestState) -> int:
    """Tokens that the request may still generate; at least 1."""
    limit = req.sampling_params.max_new_tokens
    return max(1, limit - len(state.generated)) if limit is not None else 1 << 20


def expected_tokens(state: RequestState, lengths: OutputLengths) -> int:
    """What the client expects still to come. Where it said nothing, or was wrong: what the answers of its
    class brought."""
    ahead = (state.osl or 0) - len(state.generated)
    return ahead if ahead > 0 else lengths.left(state.slo_class, len(state.generated) - 1)


def running_batch(
    reqs: Sequence[Any],
    states: Sequence[RequestState],
    seq_lens: np.ndarray,
    deepest: int,
    lengths: OutputLengths,
) -> RunningBatch:
    """The policy's view of the batch. ``deepest``: levels that a request's KV window has room for."""
    each = [(r, s, remaining_tokens(r, s)) for r, s in zip(reqs, states, strict=True)]
    remaining = np.array([left for _, _, left in each], np.int64)
    likely = None
    if lengths or any(s.osl is not None for s in states):
        expected = [expected_tokens(s, lengths) for s in states]
        likely = np.minimum(remaining, np.array(expected, np.int64))
    return RunningBatch(
        rids=tuple(s.rid for s in states),
        slo_class=tuple(s.slo_class for s in states),
        tpot_slo_s=np.array([s.tpot_slo_s for s in states]),
        decode_start_s=np.array([s.decode_start_s for s in states]),
        decoded_tokens=np.array([s.decoded for s in states], np.int64),
        context_tokens=seq_lens,
        remaining_tokens=remaining,
        max_depth=np.array([min(deepest, max_tree_depth(*one)) for one in each], np.int64),
        temperature=np.array([temperature_of(r.sampling_params) for r in reqs]),
        likely_tokens=likely,
    )
