"""Which images, audio and video of prompts still have to go through an encoder of the target."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sglang.srt.managers import mm_schedule


def tokens_to_encode(parts: Iterable[tuple[Any, int, int]]) -> int:
    """How many tokens encoders have to make before these parts of prompts can be read together: SGLang's
    requests, and where the part of each begins and ends.

    SGLang encodes a whole image with the first chunk that has a token of it, and keeps what comes out."""
    missing = {}
    for req, begin, end in parts:
        for item in () if req.multimodal_inputs is None else req.multimodal_inputs.mm_items:
            if begin <= item.offsets[0][0] < end and not mm_schedule.embedding_cache.has(item.hash):
                missing[item.hash] = sum(last - first + 1 for first, last in item.offsets)
    return sum(missing.values())
