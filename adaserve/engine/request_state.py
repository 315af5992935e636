"""What the worker knows about the requests of one decode iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from adaserve.engine.grammar import Grammars
from adaserve.engine.matchers import can_roll_back, is_live
from adaserve.scheduler.interface import RunningBatch
from adaserve.slo.lengths import OutputLengths

UNKNOWN = -1
"""A token that the device has drawn, and the host has not heard of."""

NO_LIMIT = 1 << 20
"""More levels than any tree has."""


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

    def expect(self) -> None:
        """Counts a token that comes in any case, before it is known which one. ``advance`` puts it right."""
        self.advance([UNKNOWN])

    def advance(self, tokens: list[int]) -> None:
        """Adds the tokens that an iteration emitted."""
        if self.generated[-1] == UNKNOWN:
            self.generated.pop()
            self.decoded -= 1
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

    @property
    def root_tokens(self) -> np.ndarray:
        """int64 [n]: the token every tree hangs from, the last one that is known and not cached."""
        return np.array([s.generated[-1] for s in self.states], np.int64)

    @cached_property
    def keys(self) -> np.ndarray:
        """uint64 [n]: of the requests' noise."""
        return np.array([s.key for s in self.states], np.uint64)


def temperature_of(params: Any) -> float:
    """Of SGLang's sampling parameters; 0 = greedy, which SGLang writes as top_k 1 at temperature 1."""
    return 0.0 if params.top_k == 1 else float(params.temperature)


def deepest_allowed(req: Any, state: RequestState) -> int:
    """Deepest node of a request's trees: 0 where its logits depend on more than its own tokens, or where its
    grammar cannot be followed down a tree."""
    if req.custom_logit_processor is not None or req.to_finish is not None:
        return 0
    if req.grammar is not None and not (is_live(req.grammar) and can_roll_back(req.grammar)):
        return 0
    return NO_LIMIT if state.speculation is None else state.speculation


def likely_tokens(state: RequestState, lengths: OutputLengths) -> int:
    """Tokens that are likely still to come, by what the client expects or, if it said nothing or was wrong,
    by the answers of its class."""
    ahead = (state.osl or 0) - len(state.generated)
    return ahead if ahead > 0 else lengths.left(state.slo_class, len(state.generated) - 1)


@dataclass(frozen=True, slots=True)
class BatchRequests:
    """What n requests ask for. It is known before an iteration's outcome is, which only adds tokens."""

    reqs: Sequence[Any]  # SGLang's
    states: list[RequestState]
    rids: tuple[str, ...]
    slo_class: tuple[str, ...]
    tpot_slo_s: np.ndarray  # float64 [n]
    decode_start_s: np.ndarray  # float64 [n]
    temperature: np.ndarray  # float64 [n]: 0 = greedy
    prompt_tokens: np.ndarray  # int64 [n]
    most_tokens: np.ndarray  # int64 [n]: of the answer
    deepest: np.ndarray  # int64 [n]: ``deepest_allowed``, but for requests with a grammar
    with_grammar: list[int]  # whose matchers the outcome moves on
    expects: bool  # whether a client said how long its answer will be

    @classmethod
    def of(cls, reqs: Sequence[Any], states: list[RequestState]) -> BatchRequests:
        deepest = [
            0 if r.grammar is not None else deepest_allowed(r, s) for r, s in zip(reqs, states, strict=True)
        ]
        return cls(
            reqs,
            states,
            rids=tuple(s.rid for s in states),
            slo_class=tuple(s.slo_class for s in states),
            tpot_slo_s=np.array([s.tpot_slo_s for s in states]),
            decode_start_s=np.array([s.decode_start_s for s in states]),
            temperature=np.array([temperature_of(r.sampling_params) for r in reqs]),
            prompt_tokens=np.array([s.prompt_tokens for s in states], np.int64),
            most_tokens=np.array([r.sampling_params.max_new_tokens for r in reqs], np.int64),
            deepest=np.array(deepest, np.int64),
            with_grammar=[i for i, r in enumerate(reqs) if r.grammar is not None],
            expects=any(s.osl is not None for s in states),
        )

    def running(
        self, generated: np.ndarray, cached: np.ndarray, most: int, lengths: OutputLengths
    ) -> RunningBatch:
        """The policy's view of the batch: int64 [n], tokens that were generated and those that are cached.
        ``most``: levels that a request's KV window has room for."""
        remaining = np.maximum(self.most_tokens - generated, 1)
        deepest = self.deepest.copy()
        for i in self.with_grammar:
            deepest[i] = deepest_allowed(self.reqs[i], self.states[i])
        likely = None
        if self.expects or lengths:
            each = [likely_tokens(s, lengths) for s in self.states]
            likely = np.minimum(remaining, np.array(each, np.int64))
        return RunningBatch(
            rids=self.rids,
            slo_class=self.slo_class,
            tpot_slo_s=self.tpot_slo_s,
            decode_start_s=self.decode_start_s,
            decoded_tokens=np.array([s.decoded for s in self.states], np.int64),
            context_tokens=cached,
            remaining_tokens=remaining,
            max_depth=np.minimum(np.minimum(remaining - 1, most), deepest),
            temperature=self.temperature,
            likely_tokens=likely,
        )


def running_batch(reqs: Sequence[Any], states: list[RequestState], lengths: OutputLengths) -> RunningBatch:
    """Requests as far as their SLOs and lengths go: none has anything cached, or may have a tree."""
    generated = np.array([len(s.generated) for s in states], np.int64)
    return BatchRequests.of(reqs, states).running(generated, np.zeros_like(generated), 0, lengths)
