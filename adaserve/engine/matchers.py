"""Runs a request's matcher over the branches of a tree: which tokens its grammar allows and forbids there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
from torch import Tensor

BITS = 32
"""Tokens per word of a packed mask."""

MAX_SPELLINGS = 32
"""Tokens that may be allowed where text is forced: beginnings of one token, so there are few."""


@dataclass(frozen=True, slots=True)
class ForcedToken:
    """A token that spells forced text."""

    token: int
    alone: bool  # no other token is allowed; otherwise shorter ones could spell the same text


def is_live(grammar: Any) -> bool:
    """Whether there is a grammar (SGLang's object, or None) that still has a say in what follows."""
    return grammar is not None and not grammar.finished and not grammar.is_terminated()


def can_roll_back(grammar: BaseGrammarObject) -> bool:
    """Whether a matcher can step back; Outlines' cannot, so only roots can be masked by it."""
    if isinstance(grammar, ReasonerGrammarObject):
        return grammar.grammar is None or can_roll_back(grammar.grammar)
    return type(grammar).rollback is not BaseGrammarObject.rollback


def active_grammar(grammar: Any) -> Any:
    """The answer's grammar where the reasoning before it is over."""
    if isinstance(grammar, ReasonerGrammarObject) and grammar._is_generation():
        return grammar.grammar or grammar
    return grammar


def fill_masks(grammar: Any, tokens: np.ndarray, parents: np.ndarray, masks: Tensor) -> np.ndarray:
    """Fills the masks of a root and its k nodes, which the matcher visits from where it stands.

    ``tokens``, ``parents``: int64 [k], parents first, -1 = child of the root. ``masks`` must allow everything
    at first. Returns bool [k]: nodes that the grammar allows and does not end with; the masks of all
    others mean nothing.
    """
    grammar = active_grammar(grammar)
    if isinstance(grammar, XGrammarGrammar) and len(tokens):
        return _fill_natively(grammar, tokens, parents, masks)
    tree = GrowingTree(grammar)
    tree.add(tokens, parents, masks)
    return np.array([mask is not None for mask in tree.masks[1:]], np.bool_)


@dataclass(slots=True)
class GrowingTree:
    """A root and nodes that may come level by level, and no mask is filled twice: on a large vocabulary one
    takes a hundred times as long as to follow a token. Between calls the matcher stands where it stood."""

    grammar: Any
    paths: list[list[int]] = field(default_factory=list)  # from the root, which comes first, as below
    masks: list[np.ndarray | None] = field(default_factory=list)  # None: forbidden there, or the end

    def add(self, tokens: np.ndarray, parents: np.ndarray, masks: Tensor) -> None:
        """Fills ``masks``, which must allow everything, of the last of k nodes, or of the root where there is
        none. All before them must be known from earlier calls; otherwise as in ``fill_masks``."""
        first = 1 + len(tokens) - len(masks)
        assert first == len(self.paths)
        bits = masks.numpy()
        for i in range(len(masks)):
            node = first + i - 1
            if node < 0:
                path, possible = list[int](), True
            else:
                parent, token = int(parents[node]) + 1, int(tokens[node])
                above = self.masks[parent]
                path, possible = [*self.paths[parent], token], above is not None and _is_set(above, token)
            self.paths.append(path)
            self.masks.append(bits[i] if possible and self._fill(path, masks, i) else None)

    def _fill(self, path: list[int], masks: Tensor, i: int) -> bool:
        """False where the grammar ends with ``path``."""
        # SGLang's own steps back copy all that the grammar has read.
        steps = self.grammar.matcher if isinstance(self.grammar, XGrammarGrammar) else self.grammar
        for token in path:
            steps.accept_token(token)
        if goes_on := not steps.is_terminated():
            self.grammar.fill_vocab_mask(masks, i)
        else:
            masks[i] = 0  # so that no beam is spent on what follows
        if path:
            steps.rollback(len(path))
        return goes_on


def forced(grammar: Any, spelling: Sequence[bytes], depth: int, mask: Tensor) -> list[ForcedToken]:
    """Up to ``depth`` tokens that must follow where the matcher stands; it comes back there.

    Text is forced where every allowed token is a beginning of the longest one, and the longest is how a
    tokenizer mostly writes it. ``spelling``: bytes of each token; ``mask``: of one place, overwritten.
    (xgrammar's own ``find_jump_forward_string`` never returns for ``root ::= "a" root``, and fails where the
    forced bytes begin or end inside of a character.)
    """
    chain: list[ForcedToken] = []
    while len(chain) < depth:
        mask.fill_(-1)
        grammar.fill_vocab_mask(mask, 0)
        found = _spelled(_few_allowed(mask.numpy()[0]), spelling)
        if found is None:
            break
        grammar.accept_token(found.token)
        if grammar.is_terminated():
            grammar.rollback(1)
            break
        chain.append(found)
    if chain:
        grammar.rollback(len(chain))
    return chain


def _few_allowed(words: np.ndarray) -> list[int]:
    """Tokens that a mask allows; none where they are too many."""
    some = np.flatnonzero(words)
    if len(some) > MAX_SPELLINGS:
        return []
    place, bit = np.nonzero(words[some, None] >> np.arange(BITS) & 1)
    return [] if len(place) > MAX_SPELLINGS else (some[place] * BITS + bit).tolist()


def _spelled(tokens: Sequence[int], spelling: Sequence[bytes]) -> ForcedToken | None:
    """The longest of ``tokens``, if all others are beginnings of it."""
    tokens = [t for t in tokens if t < len(spelling)]
    if not tokens:
        return None
    longest = max(tokens, key=lambda t: len(spelling[t]))
    if not all(spelling[longest].startswith(spelling[t]) for t in tokens):
        return None
    return ForcedToken(longest, len(tokens) == 1)


def _fill_natively(grammar: Any, tokens: np.ndarray, parents: np.ndarray, masks: Tensor) -> np.ndarray:
    """In one call of xgrammar; what it does not reach is forbidden."""
    child, sibling = _links(parents)
    every = torch.from_numpy(np.concatenate([[0], tokens]))
    grammar.matcher.traverse_draft_tree(child, sibling, every, masks)
    bits, stops = masks.numpy(), set(grammar.matcher.stop_token_ids)
    possible = np.zeros(len(tokens), np.bool_)
    for i, (token, parent) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
        reached = parent < 0 or possible[parent]
        possible[i] = reached and token not in stops and _is_set(bits[parent + 1], token)
    return possible


def _is_set(words: np.ndarray, token: int) -> bool:
    return bool(int(words[token // BITS]) >> (token % BITS) & 1)


def _links(parents: np.ndarray) -> tuple[Tensor, Tensor]:
    """(first child, next sibling) of a root and its k nodes, int64 [k + 1], -1 = none; from parents [k]."""
    child, sibling = (np.full(len(parents) + 1, -1, np.int64) for _ in range(2))
    last: dict[int, int] = {}  # child of a parent that was seen last
    for place, above in enumerate((parents + 1).tolist(), start=1):
        if above in last:
            sibling[last[above]] = place
        else:
            child[above] = place
        last[above] = place
    return torch.from_numpy(child), torch.from_numpy(sibling)
