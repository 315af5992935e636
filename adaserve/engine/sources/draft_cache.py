"""Records for which cached tokens a draft model has the KV.

The draft shares the target's slots but not its forwards: it has not seen what was generated while nothing was
drafted, nor the last token of a path that was accepted whole. Such tokens are pending until it catches up.
A request may end before that, and its answer may become the prefix of another prompt, with holes in the
draft's KV. So each slot is known to be held or not, and a prompt's holes are filled before it is read.

Once SGLang has processed a prefill it exchanges the prompt's slots for those that the radix cache has of the
same text, if another request put it there meanwhile. Under overlap this happens after the request's first
decode iteration has begun, so holes are looked for until that one is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from adaserve.engine.device import ModelForward
from adaserve.engine.trees.batch import ContextGap, TreeBatch


@dataclass(slots=True)
class Held:
    """What the draft has of one request."""

    length: int  # leading cached tokens whose KV the draft has
    pending: list[int]  # the cached tokens after them


@dataclass(slots=True)
class _Exchangeable:
    """A prompt whose slots SGLang may exchange."""

    text: list[int]  # its tokens, and those committed since
    length: int  # of the prompt
    iterations: int = 0  # that are over


class DraftCache:
    """``slots``: size of the KV pool. ``stride``: tokens that an iteration commits at most. All tensors stand
    on the device of ``req_to_token``."""

    def __init__(self, forward: ModelForward, req_to_token: Tensor, slots: int, stride: int) -> None:
        self._forward, self._req_to_token, self._stride = forward, req_to_token, stride
        self._is_held = torch.zeros(slots, dtype=torch.bool, device=req_to_token.device)
        self._held: dict[int, Held] = {}
        self._exchangeable: dict[int, _Exchangeable] = {}  # by row of the request pool

    def __getitem__(self, pool_row: int) -> Held:
        return self._held[pool_row]

    def fill_holes(
        self, pool_rows: Sequence[int], prefix_lens: Sequence[int], texts: Sequence[Sequence[int]]
    ) -> None:
        """Feeds what is missing of the prefixes that prompts have in the radix cache."""
        if not any(prefix_lens):
            return  # without asking the device, which reads the prompt by now
        late = []
        starts = self._held_lengths(pool_rows, prefix_lens)
        for row, start, prefix, text in zip(pool_rows, starts, prefix_lens, texts, strict=True):
            if start < prefix:  # what follows a hole was read without it
                late.append((row, start, list(text[start:prefix])))
        if late:
            self.feed([row for row, _, _ in late], [s for _, s, _ in late], [t for _, _, t in late])

    def _held_lengths(self, pool_rows: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """How many of the first ``lengths`` tokens of each row come before the first one that is missing."""
        slots = [self._req_to_token[row, :n] for row, n in zip(pool_rows, lengths, strict=True)]
        held = self._is_held[torch.cat(slots).long()].cpu().numpy()
        parts = np.split(held, np.cumsum(lengths)[:-1])
        return [len(part) if part.all() else int(part.argmin()) for part in parts]

    def started(self, pool_row: int, text: Sequence[int], slots: Tensor, read: bool) -> None:
        """A prompt, or all of it so far (``text``), is cached; its new tokens at ``slots`` were ``read`` by
        the draft or were not."""
        self._note(slots, read)
        self._held[pool_row] = Held(len(text) if read else 0, [] if read else list(text))
        self._exchangeable[pool_row] = _Exchangeable(list(text), len(text))

    def find_holes(self, pool_rows: Sequence[int]) -> None:
        """Takes back what the draft has of prompts whose slots were exchanged for some that have holes."""
        if not self._exchangeable or not (rows := [row for row in pool_rows if row in self._exchangeable]):
            return
        lengths = [min(self._exchangeable[row].length, self._held[row].length) for row in rows]
        for row, length, start in zip(rows, lengths, self._held_lengths(rows, lengths), strict=True):
            prompt, held = self._exchangeable[row], self._held[row]
            if start < length:
                held.length, held.pending = start, prompt.text[start:]
            if prompt.iterations:
                del self._exchangeable[row]

    def may_have_holes(self, pool_rows: Sequence[int]) -> bool:
        """Whether ``find_holes`` has still to look at the slots of any of these requests, and so to wait for
        the device."""
        return any(row in self._exchangeable for row in pool_rows)

    def has_all(self, pool_rows: Sequence[int]) -> bool:
        """Whether the draft has all that is cached of these requests."""
        return not any(self._held[row].pending for row in pool_rows)

    def late(self, pool_rows: Sequence[int], most_pending: int) -> list[int]:
        """Requests with more than ``most_pending`` missed tokens.

        Rare: after iterations without a draft, and for prompts that were prefilled without one.
        """
        return [row for row in pool_rows if len(self._held[row].pending) > most_pending]

    def catch_up(self, pool_rows: Sequence[int]) -> None:
        """Feeds requests all that they have missed."""
        held = [self._held[row] for row in pool_rows]
        self.feed(pool_rows, [h.length for h in held], [h.pending for h in held])
        self.drafted(pool_rows)

    def feed(self, pool_rows: Sequence[int], starts: Sequence[int], tokens: Sequence[list[int]]) -> None:
        """Causal forwards over cached tokens, as large as the model takes them."""
        for row, start, text in zip(pool_rows, starts, tokens, strict=True):
            self._note(self._req_to_token[row, start : start + len(text)], True)
        most = self._forward.most_tokens
        group: list[tuple[int, int, list[int]]] = []
        room = most
        for row, start, text in zip(pool_rows, starts, tokens, strict=True):
            at = 0
            while at < len(text):
                part = text[at : at + room]
                group.append((row, start + at, part))
                at, room = at + len(part), room - len(part)
                if room == 0:
                    self._run(group)
                    group, room = [], most
        if group:
            self._run(group)

    def _run(self, group: Sequence[tuple[int, int, list[int]]]) -> None:
        rows, starts, texts = zip(*group, strict=True)
        self._forward.feed(
            TreeBatch.causal(
                np.array([t for text in texts for t in text], np.int64),
                np.array(rows, np.int64),
                np.array(starts, np.int64),
                np.array([len(text) for text in texts], np.int64),
            )
        )

    def first_batch(
        self,
        pool_rows: np.ndarray,
        base: np.ndarray,
        roots: np.ndarray,
        width: int,
        gap: ContextGap | None = None,
    ) -> TreeBatch:
        """The first step of a search: what the draft has not seen of each request, and the root.

        ``base`` int64 [n]: cached tokens. ``width``: columns of the window, which the whole search has in its
        list of keys. ``gap``: what the whole search leaves out; it ends before the tokens that the draft has
        not seen.
        """
        pending = [self._held[row].pending for row in pool_rows.tolist()]
        if not any(pending):
            return TreeBatch.roots(roots, pool_rows, base, width, gap)
        texts = [[*missed, root] for missed, root in zip(pending, roots.tolist(), strict=True)]
        q_lens = np.array([len(t) for t in texts], np.int64)
        tokens = np.array([t for text in texts for t in text], np.int64)
        return TreeBatch.causal(tokens, pool_rows, base + 1 - q_lens, q_lens, gap)

    def drafted(self, pool_rows: Sequence[int]) -> None:
        """A search has fed the draft all that was pending. The root's KV is there, but not committed yet."""
        for row in pool_rows:
            held = self._held[row]
            if held.pending:
                held.length, held.pending = held.length + len(held.pending), []

    def advanced(self, pool_row: int, tokens: list[int], known: int) -> None:
        """``tokens`` were committed, the root first; the draft has the KV of the first ``known``."""
        held = self._held[pool_row]
        if held.pending:
            held.pending += tokens
        else:
            held.length, held.pending = held.length + known, tokens[known:]
        if (prompt := self._exchangeable.get(pool_row)) is not None:
            prompt.text += tokens
            prompt.iterations += 1

    def finished(self, pool_row: int, unheard: bool) -> None:
        """Remembers, for those who may share the request's slots, which of them hold KV of the draft.

        Under overlap a finished request rides in one iteration more, so its row is known until the next
        request has it. And if nobody else runs, this comes before the draft hears of the last tokens: then
        they are ``unheard``. Behind its own tokens a row still lists the slots of whoever had it before.

        A prompt's slots may have been exchanged so far. What is known of them is right: it is what was noted
        when they were read, by this request or by the one that they come from. To look at them here would
        wait for all that the device has to do.
        """
        held, prompt = self._held[pool_row], self._exchangeable.pop(pool_row, None)
        known = 0 if prompt is None else prompt.length
        slots = self._req_to_token[pool_row]
        self._note(slots[known : held.length], True)
        end = held.length + len(held.pending) + (self._stride if unheard else 0)
        self._note(slots[max(known, held.length) : end], False)

    def _note(self, slots: Tensor, is_held: bool) -> None:
        """By ``index_fill_``: a number that is assigned at indices is sent to a GPU, and waited for."""
        self._is_held.index_fill_(0, slots.long(), is_held)
