"""The tap in verification: records the target's distributions at accepted tokens, for a share of the
requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from adaserve.engine.device import Device
from adaserve.engine.penalties import has_penalty, stop_tokens
from adaserve.engine.request_state import DecodeRows, RequestState, temperature_of
from adaserve.engine.trees.verify import Acceptance, Tensors, VerifyBatch, path_index
from adaserve.trainer.records import Record, distributions
from adaserve.trainer.shared_memory import Ring

MAX_OPEN = 16
"""Requests that are recorded at the same time."""
MIN_POSITIONS, MAX_POSITIONS = 8, 256
"""Of a request; later ones are not recorded."""
MAX_STATE = 6e4
"""Hidden states beyond this are cut off: float16 ends near it."""
MAX_CONTEXT = 1024
"""Tokens before the first position; earlier ones are cut off."""

NOBODY = np.zeros(0, np.int64)

ReadStates = Callable[[Tensor, Tensor], Tensor]
"""(rows of ``req_to_token``, places there) -> the target's hidden states [.., H] of those tokens."""


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
        return max(0, self.start - MAX_CONTEXT)

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


def _halved(states: Tensor) -> Tensor:
    return states.clamp(-MAX_STATE, MAX_STATE).half()


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
        if self._may(req, state) and len(self._open) < MAX_OPEN:
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

    def rows(self, rows: DecodeRows) -> np.ndarray:
        """int64 [k]: the requests that are being recorded."""
        if not self._open:
            return NOBODY
        return np.flatnonzero([s.rid in self._open for s in rows.states])

    def verified(
        self,
        device: Device,
        rows: DecodeRows,
        recorded: np.ndarray,
        verified: VerifyBatch,
        tensors: Tensors,
        acceptance: Acceptance,
        logits: Tensor,
    ) -> dict[str, Tensor]:
        """What ``heard`` needs of a verification, on the device: for each of the ``recorded`` requests as
        many rows as it may accept tokens, the accepted ones first. ``logits``: the target's, fp32 [T, vocab].
        """
        most, vocabulary = verified.deepest + 1, logits.shape[1]
        warmth = rows.running.temperature[recorded]
        scale = 1.0 / np.where(warmth > 0, warmth, 1.0)
        there = device.put({"recorded": recorded, "scale": scale.astype(np.float32)})
        path = path_index(tensors, acceptance, most)[there["recorded"]]
        said = logits.index_select(0, path.flatten()).view(-1, most, vocabulary)
        logprobs, ids = distributions(said.mul_(there["scale"][:, None, None]).flatten(0, 1))
        found = {"logprobs": logprobs.unflatten(0, (-1, most))}
        if ids is not None:
            found["ids"] = ids.unflatten(0, (-1, most))
        if self._states is not None:
            put = device.put({"rows": rows.pool_rows[recorded], "places": verified.batch.places})
            found["states"] = _halved(self._states(put["rows"][:, None], put["places"][path]))
        for row in recorded.tolist():
            opened = self._open[rows.states[row].rid]
            if opened.start < 0:
                opened.start = int(rows.seq_lens[row])
                if self._states is not None:
                    context = np.arange(opened.cut, opened.start)
                    put = device.put({"row": rows.pool_rows[row : row + 1], "places": context})
                    found[f"context {row}"] = _halved(self._states(put["row"], put["places"]))
        return found

    def heard(self, rows: DecodeRows, recorded: np.ndarray, found: Mapping[str, np.ndarray]) -> None:
        """The outcome of an iteration has arrived: ``count`` and ``emitted``, and what ``verified`` gave."""
        emitted, counts = found["emitted"].tolist(), found["count"].tolist()
        for k, row in enumerate(recorded.tolist()):
            opened = self._going_on(rows.states[row], int(rows.seq_lens[row]))
            if opened is None:
                continue
            count = counts[row] + 1
            served = _until(emitted[row][:count], opened.stops)
            here = k, slice(len(served))
            opened.keep(opened.logprobs, found["logprobs"][here])
            if "ids" in found:
                opened.keep(opened.ids, found["ids"][here].astype(np.int32))
            if "states" in found:
                if f"context {row}" in found:
                    opened.keep(opened.states, found[f"context {row}"])
                opened.keep(opened.states, found["states"][here])
            opened.positions += len(served)
            opened.tokens += served
            ends = opened.positions >= MAX_POSITIONS or len(served) < count
            if ends or self._open_bytes > self._most_bytes:
                self.finished(rows.states[row].rid)

    def _going_on(self, state: RequestState, length: int) -> _Open | None:
        """The open record of a request whose root is at position ``length``, if that is its next one."""
        if (opened := self._open.get(state.rid)) is None:
            return None
        if opened.start + opened.positions == length and len(opened.tokens) == length + 1:
            return opened
        del self._open[state.rid]
        return None

    def finished(self, rid: str) -> None:
        opened = self._open.pop(rid, None)
        if opened is None or self.ring is None or opened.positions < MIN_POSITIONS:
            return
        written = self.ring.write(opened.record().to_bytes())
        self.recorded += written
        self.dropped += not written
