"""The padded sizes of forwards: each has a CUDA graph, up to a limit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from adaserve.engine.trees.shape import TreeShape

FIRST = 2
"""Tokens per request that the first step of a draft model's search has room for: the last accepted one,
which it has not read when all were accepted, and the root."""

READ_AT_ONCE = 256
"""Tokens of texts in one forward of a draft that catches up, or of a head that reads a prompt: the mask of a
causal forward is worked out on the host, which takes time and an upload by the square of this (0.1 ms and
0.1 MB; 0.8 ms and 1.1 MB for 1024)."""


@dataclass(frozen=True)
class Key:
    """The padded size of a verification, or of a forward that reads texts: what a graph is made for."""

    tokens: int
    rows: int
    columns: int  # of the windows, a multiple of 8
    pieces: int = 0  # it gives logits of the last token of each of so many; 0 = of every token


@dataclass(frozen=True)
class SearchKey:
    """A whole beam search, over padded rows: what another graph is made for."""

    rows: int
    beams: tuple[int, ...]  # kept after each step
    is_branching: bool = False


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

    @staticmethod
    def up_to(most: int, steps: int = 2) -> Tiers:
        """1, 2, 4, 8, 12, 16, then so many steps, of 8 at least, from each power of two to the next one,
        ending at ``most``."""
        sizes = [1, 2, 4, 8, 12, 16]
        while sizes[-1] < most:
            sizes.append(sizes[-1] + max(8, (1 << (sizes[-1].bit_length() - 1)) // steps))
        return Tiers((*(s for s in sizes if s < most), most))


@dataclass(frozen=True)
class Sizes:
    """Of one model's forwards."""

    rows: Tiers  # requests of a draft step
    tokens: Tiers  # tokens of a verification
    most_rows: int  # requests that run at a time
    most_tokens: int  # of any forward
    depth: int = 1  # of the deepest beam search with a graph
    widths: tuple[int, ...] = (1,)  # and beams of the widest, for each tier of rows
    captured: frozenset[Key | SearchKey] = frozenset()  # what is served often: each has a graph
    columns: int = 64  # of the widest window of a verification with a graph

    @property
    def width(self) -> int:
        """Beams of the widest search with a graph."""
        return max(self.widths)

    def verification(self, tokens: int, rows: int = 0, width: int = 1) -> Key:
        """The padded size for ``tokens`` of ``rows`` requests, with windows of ``width`` columns: one request
        more holds the padding."""
        padded, columns = self.tokens.fit(tokens), -(-max(width, self.columns) // 8) * 8
        return Key(padded, max(min(padded, self.most_rows), rows) + 1, columns)

    def verifications(self) -> Iterator[Key]:
        """Sizes that verifications are padded to, the largest first."""
        for tokens in reversed(self.tokens.sizes):
            yield self.verification(tokens)

    def search(self, shape: TreeShape, rows: int) -> SearchKey:
        """The padded size of a search over ``rows`` requests."""
        return SearchKey(self.rows.fit(rows), shape.beams, shape.is_branching)

    def searches(self) -> Iterator[SearchKey]:
        """Beam searches of every depth and width, for every tier of rows; the largest first."""
        for rows, widest in reversed([*zip(self.rows.sizes, self.widths, strict=True)]):
            for width in range(widest, 0, -1):
                for depth in range(self.depth, 0, -1):
                    yield SearchKey(rows, (width,) * depth)

    def drafts(self) -> Iterator[Key | SearchKey]:
        """All forwards that a draft model runs often: searches, and catching up on a few tokens for each
        request."""
        yield from self.searches()
        yield from (key for key in self.verifications() if key.tokens <= READ_AT_ONCE)
