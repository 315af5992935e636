"""Text that a draft must not forget: what the first draft says about the shipped prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional as fn

from adaserve.pair.prompts import load_prompts
from adaserve.trainer.draft import DraftCopy
from adaserve.trainer.records import Record, kept

SEEN, LENGTH, TEXTS = 16, 160, 96
"""Tokens that are context only, tokens of a text, and texts in all."""
REHEARSAL_STEP = 6
"""Of the shipped prompts every so many are rehearsal texts; the others are left to measurements."""
_AT_ONCE = 8


@torch.no_grad()
def rehearsal_records(
    draft: DraftCopy, folder: str, pause: Callable[[], None] = lambda: None
) -> list[Record]:
    """The first draft is the teacher here, so that no target has to be run. Empty without a tokenizer.

    ``pause`` is called between small pieces of work: a large draft takes minutes."""
    texts = _tokenized(folder)
    records: list[Record] = []
    for start in range(0, len(texts), _AT_ONCE):
        pause()
        rows = [_untaught(tokens) for tokens in texts[start : start + _AT_ONCE]]
        for row, logits in zip(rows, draft.logits(rows), strict=True):
            logprobs, ids = kept(fn.log_softmax(logits, -1), whole=0)
            records.append(Record(row.tokens, row.start, logprobs, ids, temperature=1.0, key=0))
    return records


def _untaught(tokens: np.ndarray) -> Record:
    n = len(tokens) - SEEN - 1
    return Record(tokens, SEEN, np.zeros((n, 0), np.float16), None, 1.0, 0)


def _tokenized(folder: str) -> list[np.ndarray]:
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError):  # a draft may come without one: it is served with the target's
        return []
    rows = [tokenizer(p.text).input_ids[:LENGTH] for p in load_prompts()[::REHEARSAL_STEP]]
    return [np.array(r, np.int32) for r in rows if len(r) > 2 * SEEN][:TEXTS]
