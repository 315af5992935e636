"""What SGLang carries from one iteration to the next: the root token of each request."""

from __future__ import annotations

import torch
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType


class RootTokens(SpecInput):
    """Bonus tokens [n] of the last iteration; the fields below are read by SGLang's relay."""

    topk_p = topk_index = hidden_states = draft_probs = dsa_topk_indices = None

    def __init__(self, bonus_tokens: torch.Tensor) -> None:
        super().__init__(SpecInputType.EAGLE_DRAFT)
        self.bonus_tokens = bonus_tokens
        self.future_indices: torch.Tensor | None = None

    def filter_batch(self, new_indices: torch.Tensor, new_indices_cpu: list[int] | None = None) -> None:
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
        else:
            self.bonus_tokens = self.bonus_tokens[new_indices]

    def merge_batch(self, other: RootTokens) -> None:
        if self.future_indices is not None:
            assert other.future_indices is not None
            self.future_indices = torch.cat([self.future_indices, other.future_indices])
        else:
            self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])
