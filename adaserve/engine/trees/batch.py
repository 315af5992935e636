"""The tokens of one forward, in host arrays: what every device's models are given."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class TreeBatch:
    """T tokens of n requests, request after request.

    A request's keys are the KV slots of its first ``kv_lens`` places in SGLang's ``req_to_token``. The last
    of them are its window: the root and the candidates, each at a place of its own.
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

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def row(self) -> np.ndarray:
        """int64 [T]: request of each token."""
        return np.repeat(np.arange(len(self.q_lens)), self.q_lens)

    @staticmethod
    def causal(
        tokens: np.ndarray, pool_rows: np.ndarray, starts: np.ndarray, q_lens: np.ndarray
    ) -> TreeBatch:
        """Tokens that follow one another in their texts: row r's stand at ``starts[r]`` and behind it."""
        first = np.cumsum(q_lens) - q_lens
        at = np.arange(len(tokens)) + np.repeat(starts - first, q_lens)
        return TreeBatch(tokens, at, at, pool_rows, q_lens, starts + q_lens)
