"""The KV caches of the target and of its drafts, in which accepted paths have to be contiguous."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from adaserve.engine.device import Device
from adaserve.engine.trees import verify


@dataclass(frozen=True, eq=False)
class KVCompactor:
    """``pools``: SGLang's, of the target and of each draft model. ``req_to_token``: int, KV slots
    [rows, places]."""

    device: Device
    pools: Sequence[Any]
    req_to_token: torch.Tensor

    def compact(
        self, verified: verify.VerifyBatch, tensors: verify.Tensors, acceptance: verify.Acceptance
    ) -> None:
        """Moves what was accepted to where committed tokens belong."""
        if self.device.in_place(verified, acceptance):
            return
        n = len(verified.root)
        target, sources = self.device.moves(tensors, acceptance, self.req_to_token, n, verified.deepest)
        pools = [self.pools[0], *(self.pools[1 + number] for number in verified.made_by)]
        for pool, source in zip(pools, sources, strict=True):
            self.device.move(pool, target, source)
        if self.device.target_states is not None:
            self.device.move(self.device.target_states, target, sources[0])
