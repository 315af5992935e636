"""Proposes what grammars force: keys, separators and other text that must come next.

It needs no forward. If a single token is allowed, it is certain. If several tokens begin the same text
(``name`` can be written as ``na`` and ``me``), the model still chooses how to write it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from xgrammar import TokenizerInfo

from adaserve.engine.matchers import ForcedToken, forced
from adaserve.engine.request_state import DecodeRows, RequestState
from adaserve.engine.sources.rates import LEAST, Rates
from adaserve.engine.sources.source import TreeSource
from adaserve.engine.trees.proposal import Proposal
from adaserve.engine.trees.verify import VerifyBatch
from adaserve.patches.scheduler.grammar_time import timed
from adaserve.scheduler.interface import CandidateTrees

logger = logging.getLogger(__name__)

FORCED = 8
"""Bit of ``CandidateTrees.source``."""

START = 0.9
"""How often the longest of several spellings is right, before anything is known."""


@dataclass(frozen=True, slots=True)
class _Chain:
    """What was offered to a request."""

    state: RequestState
    known: int  # generated tokens at that time
    tokens: list[ForcedToken]


class ForcedSource(TreeSource):
    """Reads the matchers of requests, which SGLang keeps.

    ``spelling``: bytes of each token; ``depth``: tokens in a row that it offers at most.
    """

    def __init__(self, spelling: Sequence[bytes], depth: int) -> None:
        self._spelling, self._depth = spelling, depth
        self._mask: Tensor | None = None
        self._offered: list[_Chain] = []
        self.rates = Rates([START])

    def advanced(self, rows: DecodeRows, verified: VerifyBatch, accepted: np.ndarray) -> None:
        """Learns how forced text is written."""
        for chain in self._offered:
            for forced_token, token in zip(chain.tokens, chain.state.generated[chain.known :], strict=False):
                right = forced_token.token == token
                if not forced_token.alone:
                    self.rates.learn(0, right)
                if not right:
                    break
        self._offered = []

    def offer(self, rows: DecodeRows) -> Proposal | None:
        """A chain for every request whose grammar forces something; None when there is none."""
        self._offered = []
        if rows.grammars is None:
            return None
        chains: list[list[ForcedToken]] = [[] for _ in rows.states]
        most = np.minimum(rows.running.max_depth, self._depth).tolist()
        for r, grammar in rows.grammars.live.items():
            if most[r]:
                if self._mask is None:
                    self._mask = grammar.allocate_vocab_mask(rows.grammars.vocab_size, 1, "cpu")
                with timed(rows.grammars.reqs[r]):
                    chains[r] = forced(grammar, self._spelling, most[r], self._mask)
                state = rows.states[r]
                self._offered.append(_Chain(state, len(state.generated), chains[r]))
        return _proposal(chains, math.log(self.rates.rate[0]))


def spelling_of(tokenizer: Any) -> list[bytes] | None:
    """Bytes of each token; None for a tokenizer that xgrammar cannot read."""
    try:
        if hasattr(tokenizer, "init_xgrammar"):  # SGLang's own kind
            info, _ = tokenizer.init_xgrammar()
        else:
            info = TokenizerInfo.from_huggingface(tokenizer)
        spelling: list[bytes] = info.decoded_vocab
    except Exception as error:  # of whatever kind: SGLang serves without grammars then
        logger.warning("AdaServe: text that grammars force is not proposed: %r", error)
        return None
    return spelling


def _proposal(chains: list[list[ForcedToken]], choice: float) -> Proposal | None:
    """What is likely enough of one chain per row. ``choice``: log-probability of a token that is not the only
    one allowed."""
    starts, token, depth = [0], [], []
    logprob: list[float] = []
    for chain in chains:
        likely = 0.0
        for place, forced_token in enumerate(chain, start=1):
            likely += 0.0 if forced_token.alone else choice
            if likely < math.log(LEAST):
                break
            token.append(forced_token.token)
            depth.append(place)
            logprob.append(likely)
        starts.append(len(token))
    if not token:
        return None
    depths = np.array(depth)
    trees = CandidateTrees(
        row_start=np.array(starts),
        token=np.array(token),
        parent=depths - 2,
        depth=depths,
        logprob=np.array(logprob),
        source=np.full(len(token), FORCED),
    )
    return Proposal(trees, depths.copy(), 1 + max(depth))
