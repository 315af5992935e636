"""What one request teaches: its tokens, and the target's distributions at the served positions."""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

FULL_VOCABULARY = 8192
"""Up to this many tokens a distribution is kept whole; above, the likeliest ``TOP`` and what is left."""
TOP = 32
MIN_LOG = -6e4
"""Log-probabilities below this are taken for it: float16 ends near it, and no loss is a number with -inf."""

_HEADER = struct.Struct("<iiiiiiidQ")
"""Tokens, start, positions, columns (0 = whole), width of hidden states (0 = none), bytes of the class, cut;
temperature and key."""


@dataclass(frozen=True, slots=True)
class Record:
    """Position ``start + i`` of ``tokens`` has the distribution ``logprobs[i]`` of the token behind it."""

    tokens: np.ndarray  # int32 [start + n + 1]: prompt and output
    start: int
    logprobs: np.ndarray  # float16 [n, vocab], not normalized, or [n, TOP]; at ``temperature`` (1 where 0)
    ids: np.ndarray | None  # int32 [n, TOP]: whose log-probabilities these are; None = all tokens
    temperature: float  # 0 = greedy
    key: int  # of the request's noise (adaserve/noise.py)
    slo_class: str = ""
    states: np.ndarray | None = None
    """float16 [start + n, H]: hidden states of the target, for heads; of all tokens but the last."""
    cut: int = 0  # tokens of the text before these

    def __len__(self) -> int:
        return len(self.logprobs)

    @property
    def nbytes(self) -> int:
        more = [a.nbytes for a in (self.ids, self.states) if a is not None]
        return self.tokens.nbytes + self.logprobs.nbytes + sum(more)

    def to_bytes(self) -> bytes:
        n, columns = self.logprobs.shape
        name = self.slo_class.encode()
        width = 0 if self.states is None else self.states.shape[1]
        columns = 0 if self.ids is None else columns
        header = (len(self.tokens), self.start, n, columns, width, len(name), self.cut)
        parts = [_HEADER.pack(*header, self.temperature, self.key), name, self.tokens.tobytes()]
        parts += [a.tobytes() for a in (self.ids, self.states) if a is not None]
        return b"".join([*parts, self.logprobs.tobytes()])

    @classmethod
    def from_bytes(cls, data: bytes) -> Record:
        length, start, n, columns, width, named, cut, temperature, key = _HEADER.unpack_from(data)
        at = _HEADER.size + named
        name = data[_HEADER.size : at].decode()
        tokens = np.frombuffer(data, np.int32, length, at)
        at += tokens.nbytes
        ids = states = None
        if columns:
            ids = np.frombuffer(data, np.int32, n * columns, at).reshape(n, columns)
            at += ids.nbytes
        if width:
            states = np.frombuffer(data, np.float16, (start + n) * width, at).reshape(-1, width)
            at += states.nbytes
        logprobs = np.frombuffer(data, np.float16, -1, at).reshape(n, -1)
        return cls(tokens, start, logprobs, ids, temperature, key, name, states, cut)


@dataclass
class Newest:
    """The newest requests, up to some memory."""

    most_bytes: int
    records: deque[Record] = field(default_factory=deque)
    nbytes: int = 0

    def __len__(self) -> int:
        return len(self.records)

    def add(self, record: Record) -> bool:
        """False where older ones had to go."""
        self.records.append(record)
        self.nbytes += record.nbytes
        fits = self.nbytes <= self.most_bytes
        while self.nbytes > self.most_bytes:
            self.take()
        return fits

    def take(self) -> Record:
        """The oldest one, which is not kept any longer."""
        record = self.records.popleft()
        self.nbytes -= record.nbytes
        return record


def distributions(logits: Tensor, whole: int = FULL_VOCABULARY) -> tuple[Tensor, Tensor | None]:
    """The part of logits [n, vocab] that a record keeps: float16 [n, k] and their tokens int64 [n, k].

    A vocabulary of up to ``whole`` tokens is kept without ids, as logits minus the best one: the reader
    normalizes them, which is too slow for a server. Otherwise they are log-probabilities."""
    if logits.shape[1] <= whole:
        return _halves(logits - logits.amax(-1, keepdim=True)), None
    best, ids = logits.topk(TOP)
    return _halves(best - logits.logsumexp(-1, keepdim=True)), ids


def kept(logits: Tensor, whole: int = FULL_VOCABULARY) -> tuple[np.ndarray, np.ndarray | None]:
    """``distributions`` as a record has them; the tokens as int32."""
    logprobs, ids = distributions(logits, whole)
    return logprobs.numpy(force=True), None if ids is None else ids.int().numpy(force=True)


def _halves(logprobs: Tensor) -> Tensor:
    return logprobs.clamp(min=MIN_LOG).half()
