"""Structured output under trees: what the requests' grammars allow after every candidate.

A node's draw is masked by the grammar of its own path, so the output is that of plain decoding. Candidates
that a grammar forbids get probability 0 before any of them is selected. If the host sees every step of a
search, its beams choose only among allowed tokens: a token that the grammar forces has probability 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adaserve.engine.logits.portions import portions
from adaserve.engine.matchers import GrowingTree, active_grammar, fill_masks, is_live
from adaserve.engine.transfer import put
from adaserve.patches.scheduler.grammar_time import timed
from adaserve.scheduler.interface import CandidateTrees

Forbid = Callable[[Tensor, np.ndarray, np.ndarray, int], None]
"""(logits [a * beams, vocab], tokens [a, k], parents [a, k], beams): sets to -inf what grammars forbid after
the last ``beams`` of each row's k nodes, or after its root where there is none yet. A search asks after its
root first, and then after each level."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """What may follow the roots and candidates of the rows that have a grammar."""

    grammar: Any  # one of them, as SGLang wraps it: they share a backend, which applies its own masks
    masks: Tensor  # on the host, in the backend's form: per such row its root, then its candidates
    first: np.ndarray  # int64 [n]: where the masks of a row begin; -1 = no grammar
    row_start: np.ndarray  # int64 [n + 1]: of the candidates

    def mask(self, logits: Tensor, row: np.ndarray, candidate: np.ndarray) -> None:
        """Sets what is forbidden to -inf, in place in ``logits`` [T, vocab].

        ``row``, ``candidate``: int64 [T], whose logits these are; candidate -1 is the row's root.
        """
        at = np.flatnonzero(self.first[row] >= 0)
        row, candidate = row[at], candidate[at]
        place = np.where(candidate < 0, 0, 1 + candidate - self.row_start[row])
        _apply(self.grammar, self.masks[torch.from_numpy(self.first[row] + place)], logits, at)


@dataclass(frozen=True, slots=True)
class Grammars:
    """The grammars of n requests. Between calls their matchers are at the state after the requests' roots."""

    reqs: Sequence[Any]  # SGLang's
    live: Mapping[int, Any]  # SGLang's grammar objects, by row
    vocab_size: int

    @staticmethod
    def of(reqs: Sequence[Any], info: Any) -> Grammars | None:
        """Of SGLang's requests and its ``SamplingBatchInfo``; None where there are none. A grammar that has
        ended masks nothing: SGLang is about to notice."""
        live = {r: req.grammar for r, req in enumerate(reqs) if is_live(req.grammar)}
        return Grammars(reqs, live, info.vocab_size) if live else None

    def _masks(self, count: int) -> Tensor:
        """``count`` masks that allow everything."""
        masks: Tensor = self._any.allocate_vocab_mask(self.vocab_size, count, "cpu")
        return masks

    @property
    def _any(self) -> Any:
        return next(iter(self.live.values()))

    def constrain(self, trees: CandidateTrees) -> tuple[CandidateTrees, Allowed]:
        """The trees with what is forbidden made impossible, and the masks of what is left."""
        counts = np.diff(trees.row_start)
        masks = self._masks(sum(1 + int(counts[r]) for r in self.live))
        first = np.full(trees.n_rows, -1, np.int64)
        logprob, start = trees.logprob.copy(), 0
        for r, grammar in self.live.items():
            nodes, end = slice(*trees.row_start[r : r + 2].tolist()), start + 1 + int(counts[r])
            with timed(self.reqs[r]):
                possible = fill_masks(grammar, trees.token[nodes], trees.parent[nodes], masks[start:end])
            logprob[nodes][~possible] = -np.inf
            first[r], start = start, end
        return replace(trees, logprob=logprob), Allowed(self._any, masks, first, trees.row_start)

    def forbid(self, active: np.ndarray) -> Forbid | None:
        """For a search over the rows ``active``; None where none of them has a grammar."""
        mine = [
            (i, GrowingTree(active_grammar(self.live[r])), self.reqs[r])
            for i, r in enumerate(active.tolist())
            if r in self.live
        ]
        if not mine:
            return None

        def forbid(logits: Tensor, tokens: np.ndarray, parents: np.ndarray, beams: int) -> None:
            masks = self._masks(beams * len(mine))
            for k, (i, tree, req) in enumerate(mine):
                with timed(req):
                    tree.add(tokens[i], parents[i], masks[k * beams : (k + 1) * beams])
            at = np.concatenate([i * beams + np.arange(beams) for i, *_ in mine])
            _apply(self._any, masks, logits, at)

        return forbid


def _apply(grammar: Any, masks: Tensor, logits: Tensor, at: np.ndarray) -> None:
    """Masks the rows ``at`` of ``logits``."""
    # A copy from memory that is not pinned would wait for the forward that computes the logits.
    there = put({"masks": masks.numpy(), "at": at}, logits.device)
    masks, where = grammar.move_vocab_mask(there["masks"], logits.device), there["at"]
    if len(at) == len(logits):
        grammar.apply_vocab_mask(logits=logits, vocab_mask=masks)
        return
    for part in portions(len(at), logits.shape[1]):
        some = logits[where[part]]
        grammar.apply_vocab_mask(logits=some, vocab_mask=masks[part])
        logits[where[part]] = some
