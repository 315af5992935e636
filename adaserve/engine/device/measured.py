"""A ``TreeForward`` over the padded forwards that serving uses, for the measurements at start.

So a profile holds what a draft step and a verification cost with their graphs and their padding.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from adaserve.engine.device.attention import Extent
from adaserve.engine.device.drafter import write_causal
from adaserve.engine.device.forward import DeviceForward, Key
from adaserve.engine.device.graphs import Tiers
from adaserve.engine.host.gumbel import Reading
from adaserve.engine.trees.plan import TreeAttentionPlan


class MeasuredForward:
    """Waits for the device after every forward, so that the caller's clock sees it.

    ``most_rows``: 0 for a draft, whose steps have one request per token; else as for verification.
    """

    def __init__(self, forward: DeviceForward, tiers: Tiers, most_rows: int) -> None:
        self._forward, self._tiers, self._most_rows = forward, tiers, most_rows

    def hidden(self, tokens: Tensor, positions: Tensor, slots: Tensor, plan: TreeAttentionPlan) -> Tensor:
        """Logits [T, vocab] of a target; of a draft [T, 2, K], the best log-probabilities and their ids."""
        f, count = self._forward, len(tokens)
        key = self._key(count, plan.num_requests)
        q_lens = plan.qo_indptr.diff().long().cpu().numpy()
        kv_lens = plan.kv_indptr.diff().long().cpu().numpy()
        spare = key.rows - len(q_lens)
        f.set_tokens(tokens.to(f.device), positions.to(f.device), slots.to(f.device), key.tokens)
        f.buffers.set_slots(plan.kv_indices.to(f.device), spare)
        q_lens = np.concatenate([q_lens, np.zeros(spare, np.int64)])
        if spare:
            q_lens[len(kv_lens)] = key.tokens - count
        kv_lens = np.concatenate([kv_lens, np.ones(spare, np.int64)])
        write_causal(f, q_lens, kv_lens)
        served = self._tiers.captured(key.tokens) and key == self._key(count, 0)
        first, second = f.run(key, Extent(q_lens, kv_lens), served)
        f.synchronize()
        if key.head == "logits":
            return first[:count]
        return torch.stack([first.double(), second.double()], dim=1)[:count]

    def _key(self, tokens: int, rows: int) -> Key:
        """The padded size that serving would use; with more rows where more are measured than are served."""
        padded = self._tiers.fit(tokens)
        if self._most_rows:
            return Key(padded, max(min(padded, self._most_rows), rows) + 1, "logits")
        return Key(padded, padded, "candidates")

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden.float()

    def argmax(self, hidden: Tensor) -> Tensor:
        return hidden.argmax(dim=-1).cpu()

    def topk_logprobs(self, hidden: Tensor, reading: Reading, width: int) -> tuple[Tensor, Tensor]:
        return hidden[:, 0, :width].cpu(), hidden[:, 1, :width].long().cpu()
