"""The tap in verification: records the target's distributions at accepted tokens, for a share of the
requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adaserve.engine.penalties import has_penalty, stop_tokens
from adaserve.engine.state import DecodeRows, RequestState, temperature_of
from adaserve.engine.trees.verify import Acceptance, VerifyBatch
from adaserve.learning.records import Record, kept
from adaserve.learning.shared import Ring

MOST_OPEN = 16
"""Requests that are recorded at the same time."""
LEAST_POSITIONS, MOST_POSITIONS = 8, 256
"""Of a request; later ones are not recorded."""
MOST_STATE = 6e4
"""Hidden states beyond this are cut off: float16 ends near it."""
MOST_CONTEXT = 1024
"""Tokens before the first position; earlier ones are cut off."""

ReadStates = Callable[[int, np.ndarray], Tensor]
"""(row of ``req_to_token``, places [k]) -> the target's hidden states [k, H] of the tokens that are there."""


@dataclass(slots=True)
class _Open:
    """A request that is being recorded."""

    state: RequestState
    temperature: float  # 0 = greedy
    tokens: list[int]  # prompt and output
    stops: frozenset[int]  # tokens that end it
    start: int = -1  # of the first position; -1 = not known yet
    logprobs: list[np.ndarray] = field(default_factory=list)
    ids: list[np.ndarray] = field(default_factory=list)
    states: list[np.ndarray] = field(default_factory=list)
    positions: int = 0
    nbytes: int = 0  # of distributions and hidden states

    def keep(self, kind: list[np.ndarray], part: np.ndarray) -> None:
        """Of a forward's array, a copy: a view would keep all of it, other requests' parts included."""
        kind.append(part.copy())
        self.nbytes += part.nbytes

    @property
    def cut(self) -> int:
        """The first token that is kept."""
        return max(0, self.start - MOST_CONTEXT)

    def record(self) -> Record:
        cut = self.cut
        tokens = np.array(self.tokens[cut : self.start + self.positions + 1], np.int32)
        ids = np.concatenate(self.ids) if self.ids else None
        return Record(
            tokens,
            self.start - cut,
            np.concatenate(self.logprobs),
            ids,
            self.temperature,
            self.state.key,
            self.state.slo_class,
            np.concatenate(self.states) if self.states else None,
            cut,
        )


def _until(tokens: list[int], stops: frozenset[int]) -> list[int]:
    """Those that are served: SGLang cuts what was accepted behind the end of a text."""
    ends = (i + 1 for i, token in enumerate(tokens) if token in stops)
    return tokens[: next(ends, len(tokens))]


class Tap:
    """Collects records of running requests and puts finished ones into the trainer's ``ring``.

    ``share``: of the requests, chosen by their noise's key. Where the ring is full nothing is recorded, so a
    trainer that hangs costs no time; without a ring there is none. What is recorded takes half as much memory
    as the ring, at most. ``states``: for a draft that is a head.
    """

    def __init__(self, share: float, states: ReadStates | None = None) -> None:
        self._share, self._states = share, states
        self.ring: Ring | None = None  # of the trainer that runs
        self._open: dict[str, _Open] = {}  # by rid
        self.recorded = self.dropped = 0
        self.pauses = False  # no request is begun

    def started(self, req: Any, state: RequestState) -> None:
        """A prompt was prefilled, perhaps once more."""
        self.finished(state.rid)
        if self._may(req, state) and len(self._open) < MOST_OPEN:
            text = [*req.origin_input_ids, *state.generated]
            stops = [] if req.sampling_params.ignore_eos else stop_tokens(req)
            self._open[state.rid] = _Open(state, temperature_of(req.sampling_params), text, frozenset(stops))

    def _may(self, req: Any, state: RequestState) -> bool:
        """Only requests whose logits are the target's own, of text alone: the draft knows of nothing else."""
        p = req.sampling_params
        untouched = req.grammar is None and req.custom_logit_processor is None and not p.logit_bias
        plain = untouched and req.multimodal_inputs is None
        chosen = (state.key >> 32) < self._share * 2**32
        return (
            not self.pauses and state.learn and plain and chosen and not has_penalty(p) and not self._is_full
        )

    @property
    def is_open(self) -> bool:
        """Whether any request is being recorded, so that logits are wanted."""
        return bool(self._open)

    @property
    def _is_full(self) -> bool:
        if self.ring is None or self._open_bytes > self._most_bytes // 2:
            return True
        return self.ring.used > self.ring.capacity // 2

    @property
    def _open_bytes(self) -> int:
        return sum(opened.nbytes for opened in self._open.values())

    @property
    def _most_bytes(self) -> int:
        """Of all open records. One that would need more ends early."""
        return 0 if self.ring is None else self.ring.capacity // 2

    def verified(
        self,
        rows: DecodeRows,
        verified: VerifyBatch,
        acceptance: Acceptance,
        logits: Tensor,
    ) -> None:
        """``logits``: the target's, [T, vocab]."""
        if not self._open:
            return
        goes_on = np.array([self._goes_on(s, n) for s, n in zip(rows.states, rows.seq_lens, strict=True)])
        at = np.flatnonzero(acceptance.accepted.numpy() & goes_on[verified.row])
        if not len(at):
            return
        warmth = np.where(rows.running.temperature > 0, rows.running.temperature, 1.0)[verified.row[at]]
        scale = torch.from_numpy((1.0 / warmth[:, None]).astype(np.float32))
        logprobs, ids = kept(logits.index_select(0, torch.from_numpy(at)).mul_(scale))
        emitted, counts = acceptance.emitted.tolist(), acceptance.count.tolist()
        end = 0
        for row in np.flatnonzero(goes_on).tolist():  # nodes of one request stand together, in this order
            count = counts[row] + 1
            opened = self._open[rows.states[row].rid]
            served = _until(emitted[row][:count], opened.stops)
            here, end = slice(end, end + len(served)), end + count
            opened.keep(opened.logprobs, logprobs[here])
            if ids is not None:
                opened.keep(opened.ids, ids[here])
            if self._states is not None:
                before = [] if opened.states else [np.arange(opened.cut, opened.start)]
                places = np.concatenate([*before, verified.batch.places[at[here]]])
                states = self._states(int(rows.pool_rows[row]), places)
                opened.keep(opened.states, states.clamp(-MOST_STATE, MOST_STATE).half().numpy())
            opened.positions += len(served)
            opened.tokens += served
            ends = opened.positions >= MOST_POSITIONS or len(served) < count
            if ends or self._open_bytes > self._most_bytes:
                self.finished(rows.states[row].rid)

    def _goes_on(self, state: RequestState, length: int) -> bool:
        """Whether the root at position ``length`` is the next one of an open record."""
        if (opened := self._open.get(state.rid)) is None:
            return False
        if opened.start < 0:
            opened.start = int(length)
        follows = opened.start + opened.positions == length and len(opened.tokens) == length + 1
        if not follows:
            del self._open[state.rid]
        return bool(follows)

    def finished(self, rid: str) -> None:
        opened = self._open.pop(rid, None)
        if opened is None or self.ring is None or opened.positions < LEAST_POSITIONS:
            return
        written = self.ring.write(opened.record().to_bytes())
        self.recorded += written
        self.dropped += not written
