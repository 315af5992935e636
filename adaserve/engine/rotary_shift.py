"""Rotary positions of text behind images (M-RoPE: Qwen2-VL, section 2.1).

A token of an image has three positions, and an image takes fewer of them than it has tokens. SGLang reads the
prompt and knows its positions. What we read comes after the prompt and is text. There the three positions are
equal, and differ from the token's place in the list by the same number for all tokens of a request.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from adaserve.engine.requests import rows_of_pool
from adaserve.engine.transfer import put


class RotaryShift:
    """``by_row`` int64 [rows of the request pool], on the model's device: what is added to the places of
    generated tokens. A draft reads images as text, so for drafts it stays 0."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.by_row = torch.zeros(rows, dtype=torch.int64, device=device)
        self._known = np.zeros(rows, np.int64)  # the same

    @classmethod
    def of(cls, runner: Any) -> RotaryShift | None:
        """For the model that a ``ModelRunner`` holds; None where it has no M-RoPE."""
        if not runner.model_config.model_is_mrope:
            return None
        table = runner.req_to_token_pool.req_to_token
        return cls(table.shape[0], table.device)

    def start(self, batch: Any) -> None:
        """SGLang's ``batch`` of prompts, or of parts of them, is about to be read."""
        rows = rows_of_pool(batch)
        shift = np.array([shift_of(req.multimodal_inputs) for req in batch.reqs], np.int64)
        if (self._known[rows] != shift).any():
            self._known[rows] = shift
            there = put({"rows": rows, "shift": shift}, self.by_row.device)
            self.by_row.index_copy_(0, there["rows"], there["shift"])


def shift_of(media: Any) -> int:
    """``media``: a request's ``MultimodalInputs``, or None."""
    delta = None if media is None else media.mrope_position_delta
    return 0 if delta is None else int(delta)
