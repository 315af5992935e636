"""Finds where the end of a text has occurred before, so that what followed there can be proposed.

Each text's contexts of a few lengths stand in one dictionary of hashes that points to their latest
occurrence. This answers what a suffix automaton is asked (the latest of the longest matches, by length
class) for a fixed price per token, and unlike an automaton it can forget a text again.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

ORDERS = (3, 6, 12, 24)
"""Lengths of the contexts that are indexed, in tokens; each is twice the one before."""

BYTES_PER_TOKEN = 720
"""Most memory of an indexed token, all containers included (CPython 3.11 to 3.13). Where old texts have made
room, a dictionary has up to six times the room that its entries need."""

_SHIFT = 40
"""A place is ``text << _SHIFT | position``."""


class Text:
    """One request's tokens so far. Grows through ``TextIndex.extend`` only."""

    __slots__ = ("hashes", "number", "tokens")

    def __init__(self, number: int) -> None:
        self.number = number
        self.tokens: list[int] = []
        self.hashes: tuple[list[int], ...] = tuple([] for _ in ORDERS)  # of the context that ends there

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Match:
    """The last ``ORDERS[order]`` tokens of a text also end at ``position`` of ``text``."""

    order: int
    text: Text
    position: int

    def continuation(self, length: int, own: bool) -> list[int]:
        """Up to ``length`` tokens that followed. ``own``: the match lies in the text that is to go on, so
        that after its end the repetition repeats."""
        start, tokens = self.position + 1, self.text.tokens
        followed = tokens[start : start + length]
        if own:
            while followed and len(followed) < length:
                followed += followed[: length - len(followed)]
        return followed


class TextIndex:
    """Texts that may be proposed to one another: one request's, or all of one tenant."""

    def __init__(self) -> None:
        self._numbers = count()
        self._texts: dict[int, Text] = {}
        self._latest: dict[int, int] = {}  # hash of a context -> its latest place that something followed

    def __len__(self) -> int:
        """Texts."""
        return len(self._texts)

    def start(self) -> Text:
        """A new text without tokens."""
        text = Text(next(self._numbers))
        self._texts[text.number] = text
        return text

    def extend(self, text: Text, new: list[int]) -> None:
        """Appends tokens, O(1) each. A context is indexed once a token has followed it."""
        tokens, latest, (shortest, *_) = text.tokens, self._latest, text.hashes
        levels = tuple(zip(ORDERS, ORDERS[1:], text.hashes, text.hashes[1:], strict=False))
        length = len(tokens)
        place = (text.number << _SHIFT) + length - 1  # of the token before
        for token in new:
            if length >= ORDERS[0]:
                latest[shortest[-1]] = place
            tokens.append(token)
            length += 1
            shortest.append(hash((tokens[-3], tokens[-2], token)) if length >= ORDERS[0] else 0)
            for half, whole, lower, upper in levels:
                if length > whole:
                    latest[upper[-1]] = place
                elif length < whole:
                    upper.append(0)
                    continue
                # A context is the two halves that it consists of.
                upper.append(hash((lower[-1 - half], lower[-1])))
            place += 1

    def matches(self, text: Text) -> list[Match]:
        """Where the end of ``text`` has occurred before, longest first; each place once, at its longest."""
        found: list[Match] = []
        places: set[int] = set()
        tokens = text.tokens
        for order in range(len(ORDERS) - 1, -1, -1):
            length = ORDERS[order]
            place = self._latest.get(text.hashes[order][-1]) if len(tokens) >= length else None
            if place is None or place in places:
                continue
            other, position = self._texts[place >> _SHIFT], place & ((1 << _SHIFT) - 1)
            if other.tokens[position + 1 - length : position + 1] == tokens[-length:]:  # no hash collision
                places.add(place)
                found.append(Match(order, other, position))
        return found

    def remove(self, text: Text) -> None:
        """Forgets a text: nothing of it is proposed, and its memory is free again."""
        del self._texts[text.number]
        latest, first = self._latest, text.number << _SHIFT
        for length, hashes in zip(ORDERS, text.hashes, strict=True):
            for position, known in enumerate(hashes):
                if position + 1 >= length and latest.get(known) == first + position:
                    del latest[known]
