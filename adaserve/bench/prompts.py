"""Held-out text to measure with, and whether an output repeats itself.

A small model tends to loop in greedy decoding, and drafts guess loops perfectly, so acceptance measured on
them says nothing about text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from adaserve.pair.prompts import distinct_share, load_prompts

DISTINCT = 0.9
"""Share of an output's 8-grams that must be distinct for it not to count as a loop."""
LEAST = 16
"""Prompts that are used even if their outputs loop."""


def held_out(seed: int) -> list[str]:
    """Held-out code and prose of 30 to 300 tokens, shuffled."""
    texts = [p.text for p in load_prompts() if p.category != "summarization" and 30 <= p.tokens <= 300]
    random.Random(seed).shuffle(texts)
    return texts


def that_loop_least(outputs: Sequence[Sequence[int]], least: int = LEAST) -> list[int]:
    """Indices of the outputs that do not loop, in order; if these are fewer than ``least``, those of the
    ``least`` outputs that loop least."""
    shares = [distinct_share(tokens) for tokens in outputs]
    usable = max(least, sum(share >= DISTINCT for share in shares))
    return sorted(sorted(range(len(shares)), key=lambda k: -shares[k])[:usable])
