"""Work on the logits of many tokens a portion at a time, so that what it needs in between is bounded.

A vocabulary of 128k makes 262 MB of 512 rows, and sorting them takes several times as much.
"""

from __future__ import annotations

from collections.abc import Iterator

MAX_VALUES = 1 << 23
"""Logits in a portion: 64 rows of 128k tokens, 33 MB in fp32."""

BYTES_PER_VALUE = 32
"""Of temporaries at the same time, at most, for each logit of a portion: penalties take 29, filters 24 and
what sorting takes for itself where they sort."""

ALIGNED_ROWS = 16
"""Portions start at multiples of it, so that a kernel that is compiled for aligned addresses serves them all
whatever the vocabulary."""


def portions(rows: int, vocabulary: int) -> Iterator[slice]:
    """Slices of ``rows`` rows, each of ``MAX_VALUES`` logits at most where that is ``ALIGNED_ROWS``."""
    size = max(ALIGNED_ROWS, MAX_VALUES // vocabulary // ALIGNED_ROWS * ALIGNED_ROWS)
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))
