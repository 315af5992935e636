"""The requests of one iteration as the device path sees them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from adaserve.scheduler.interface import RunningBatch


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """n requests. Lengths are known to the host, tokens only to the device."""

    seq_lens: np.ndarray  # int64 [n]: cached tokens, the root not counted
    lens: Tensor  # int64 [n]: the same on the device
    roots: Tensor  # int64 [n]: the tokens that the trees hang from
    pool_rows: Tensor  # int64 [n]: rows of ``req_to_token`` and ``history``
    req_to_token: Tensor  # [pool, context + window]: KV slots by position
    history: Tensor  # int32 [pool, context + window]: cached tokens by position
    lag: np.ndarray  # int64 [n]: cached tokens, the latest ones, that the draft has not seen
    running: RunningBatch
    keys: np.ndarray  # uint64 [n]: of the requests' noise (adaserve/noise.py)

    def __len__(self) -> int:
        return len(self.seq_lens)
