"""The tokens of one forward in host arrays: the input of every device's models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ContextGap:
    """Places between a request's first tokens and its recent ones that a sparse draft does not read.

    The first tokens are attention sinks (StreamingLLM, section 3.2); a draft over sinks and recent tokens is
    that of MagicDec, section 4. Both count positions inside of what is kept. Here tokens keep those that they
    have in the text, since other drafts read the same keys without a gap.
    """

    start: int  # places before it, which are read
    length: np.ndarray  # int64 [n]: places left out; 0 = everything is read


@dataclass(frozen=True, slots=True)
class UnreadNodes:
    """Candidates of one search, all of which are verified before the host has read them."""

    found: Tensor  # int64 [3, R, nodes], ``Levels.found``
    tensors: Mapping[str, Tensor]
    """``VerifyBatch.arrays`` on the device, where tokens and ways up are written; and ``of`` and ``columns``
    of ``Unread``."""


@dataclass(frozen=True, slots=True)
class TreeBatch:
    """T tokens of n requests, request after request.

    A request's keys are the KV slots of the first ``kv_lens`` places in SGLang's ``req_to_token``, those in
    the gap not counted. The last of them are its window: the root and the candidates, each at a place of its
    own.
    """

    tokens: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T]: in the text, for the rotary embedding
    places: np.ndarray  # int64 [T]: in the request's list of slots, where the token's KV goes
    pool_rows: np.ndarray  # int64 [n]: the requests' rows of ``req_to_token``
    q_lens: np.ndarray  # int64 [n]
    kv_lens: np.ndarray  # int64 [n]
    seen: np.ndarray | None = None
    """bool [T, width]: which of its request's last ``width`` keys a token sees, besides all earlier ones.
    None = causal: a request's tokens are the last ones of its keys."""
    gap: ContextGap | None = None  # None = every place is read
    drawn: Tensor | None = None
    """int64 [T]: the tokens on the device, if they were drawn there and the host does not know them yet."""
    unread: UnreadNodes | None = None
    """What the nodes are, where that is known to the device alone: in ``tokens`` and ``seen`` they have no
    token, and hang from the roots."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def row(self) -> np.ndarray:
        """int64 [T]: request of each token."""
        return np.arange(len(self.q_lens)).repeat(self.q_lens)

    @staticmethod
    def causal(
        tokens: np.ndarray,
        pool_rows: np.ndarray,
        starts: np.ndarray,
        q_lens: np.ndarray,
        gap: ContextGap | None = None,
    ) -> TreeBatch:
        """Tokens that follow one another in their texts: row r's stand from ``starts[r]`` on."""
        first = q_lens.cumsum() - q_lens
        at = np.arange(len(tokens)) + (starts - first).repeat(q_lens)
        kv_lens = without_gap(starts + q_lens, gap)
        return TreeBatch(tokens, at, at, pool_rows, q_lens, kv_lens, gap=gap)

    @staticmethod
    def roots(
        tokens: np.ndarray, pool_rows: np.ndarray, base: np.ndarray, width: int, gap: ContextGap | None = None
    ) -> TreeBatch:
        """One token of each request, after ``base`` [n] cached ones: the heads of windows of ``width``."""
        seen = np.zeros((len(tokens), width), np.bool_)
        seen[:, 0] = True
        kv_lens = without_gap(base + width, gap)
        return TreeBatch(tokens, base, base, pool_rows, np.ones(len(tokens), np.int64), kv_lens, seen, gap)


def without_gap(places: np.ndarray, gap: ContextGap | None) -> np.ndarray:
    """int64 [n]: how many of the first ``places`` [n] of each request are read."""
    return places if gap is None else places - gap.length


def without_first(batch: TreeBatch) -> TreeBatch:
    """The batch without the first token of every text, which no key shows either. A head's gap begins with
    it."""
    if batch.gap is not None and batch.gap.start:
        raise ValueError(f"a head's gap begins at 0, not at {batch.gap.start}")
    left_out = np.zeros_like(batch.kv_lens) if batch.gap is None else batch.gap.length
    some = batch.places > 0
    first = np.where(left_out > 0, 0, np.minimum(batch.kv_lens, 1))
    return replace(
        batch,
        tokens=batch.tokens[some],
        positions=batch.positions[some],
        places=batch.places[some],
        q_lens=np.bincount(batch.row[some], minlength=len(batch.q_lens)),
        kv_lens=batch.kv_lens - first,
        seen=None if batch.seen is None else batch.seen[some],
        gap=ContextGap(0, left_out + first),
    )
