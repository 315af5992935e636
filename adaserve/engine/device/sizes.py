"""The padded sizes that forwards run at: each has a CUDA graph, up to a point."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Head = Literal["logits", "candidates", "last-candidates"]
"""What a forward returns: logits and their argmax; the best tokens of every row; of every second one."""

FIRST = 2
"""Tokens per request in the first step of a search: the last cached one and the root."""


@dataclass(frozen=True)
class Key:
    """A padded size: what a graph is made for."""

    tokens: int
    rows: int
    head: Head
    noisy: bool = False  # candidates are those of requests that sample: noise is added to the logits


@dataclass(frozen=True)
class Tiers:
    """Rising sizes that forwards are padded to; larger ones are rounded up to a multiple of the last."""

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes or list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] < 1:
            raise ValueError(f"tiers must be positive and rising, not {self.sizes}")

    def fit(self, size: int) -> int:
        """The smallest padded size for ``size``."""
        place = bisect_left(self.sizes, size)
        if place < len(self.sizes):
            return self.sizes[place]
        return -(-size // self.sizes[-1]) * self.sizes[-1]

    def captured(self, size: int) -> bool:
        """Whether this padded size gets a graph."""
        return size <= self.sizes[-1]

    @staticmethod
    def up_to(most: int) -> Tiers:
        """1, 2, 4, 8, then steps that waste a quarter at most, ending at ``most``."""
        sizes = [1, 2, 4, 8, 12, 16]
        while sizes[-1] < most:
            sizes.append(sizes[-1] + max(8, 1 << (sizes[-1].bit_length() - 2)))
        return Tiers((*(s for s in sizes if s < most), most))


@dataclass(frozen=True)
class Sizes:
    """Of one model's forwards."""

    rows: Tiers  # requests of a draft step
    tokens: Tiers  # tokens of a verification
    most_rows: int  # requests that run at a time
    most_tokens: int  # of any forward
    captured: frozenset[Key] = frozenset()  # sizes that are served often: each has a graph

    def verification(self, tokens: int, rows: int = 0) -> Key:
        """The padded size for ``tokens`` of ``rows`` requests: one request more holds the padding."""
        padded = self.tokens.fit(tokens)
        return Key(padded, max(min(padded, self.most_rows), rows) + 1, "logits")

    def verifications(self) -> Iterator[Key]:
        """Sizes that verifications are padded to, the largest first."""
        for tokens in reversed(self.tokens.sizes):
            yield self.verification(tokens)

    def drafts(self, width: int) -> Iterator[Key]:
        """Draft steps of every tier of rows: the first, and those of 1 to ``width`` beams."""
        for rows in reversed(self.rows.sizes):
            for noisy in (True, False):
                yield Key(FIRST * rows, rows, "last-candidates", noisy)
                for beams in range(width, 0, -1):
                    yield Key(beams * rows, rows, "candidates", noisy)
