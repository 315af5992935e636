"""The parts of an iteration on a CPU host, where a call returns only when its work is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adaserve.checkpoints.draft_kind import HEADS
from adaserve.config import AdaServeConfig
from adaserve.engine.cpu import noise
from adaserve.engine.cpu.draft_heads import HeadForward, head_forward
from adaserve.engine.cpu.filter import by_selection
from adaserve.engine.cpu.forwards import CpuForward, cpu_forward
from adaserve.engine.cpu.install import store_again
from adaserve.engine.cpu.linear import Storage, draft_storage
from adaserve.engine.cpu.medusa import MedusaForward, medusa_forward
from adaserve.engine.device_timing import HostMark
from adaserve.engine.rotary_shift import RotaryShift
from adaserve.engine.trees import verify

MIN_GAIN = 0.05
"""Building trees is work for the host, and it competes with the models for the same cores."""


class HostValues:
    """What ``Device.get`` gives where nothing has to be copied."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def read(self) -> dict[str, np.ndarray]:
        return {name: t.numpy() for name, t in self._tensors.items()}


class CpuDevice:
    """``Device`` on a CPU."""

    stops_early = True
    least_gain = MIN_GAIN
    most_beams = None

    def __init__(
        self,
        target: CpuForward,
        *drafts: CpuForward,
        medusa: MedusaForward | None = None,
        self_drafter: CpuForward | None = None,
    ) -> None:
        self.target, self.drafts, self.medusa, self.self_drafter = target, drafts, medusa, self_drafter
        others = [drafter for drafter in (medusa, self_drafter) if drafter is not None]
        self.drafters: Sequence[CpuForward | MedusaForward] = (*drafts, *others)
        heads = [draft for draft in self.drafters if isinstance(draft, HeadForward | MedusaForward)]
        self.target_states = heads[0].target_states if heads else None
        self.shift = target.shift

    @classmethod
    def of(cls, target: Any, drafts: Sequence[Any], config: AdaServeConfig) -> CpuDevice:
        """For ``ModelRunner``s."""
        # Where it is off there is no forward of ours, neither of the target nor of drafts.
        stored: Storage = "auto" if config.cpu_weights == "off" else config.cpu_weights
        of_drafts = draft_storage(config.draft_weights, stored)

        def draft_forward(runner: Any) -> CpuForward:
            if type(runner.model).__name__ in HEADS:
                return head_forward(target, runner, of_drafts)
            store_again(runner.model, of_drafts)
            return cpu_forward(runner)

        medusa = None
        if config.medusa is not None:
            medusa = medusa_forward(target, Path(config.medusa), stored)
        shift = RotaryShift.of(target)
        made = cpu_forward(target, shift)
        self_drafter = cpu_forward(target, shift) if config.has_self else None  # timed as drafts are
        return cls(made, *map(draft_forward, drafts), medusa=medusa, self_drafter=self_drafter)

    def is_busy(self) -> bool:
        """Never: on a CPU everything queued is already done."""
        return False

    def mark(self) -> HostMark:
        return HostMark()

    def put(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        return {name: torch.from_numpy(a) for name, a in arrays.items()}

    def get(self, **tensors: Tensor) -> HostValues:
        return HostValues(tensors)

    filter = staticmethod(by_selection)
    draw = staticmethod(noise.draw)

    def accept(
        self, tensors: Mapping[str, Tensor], draws: Tensor, n: int, deepest: int, stride: int
    ) -> verify.Acceptance:
        return verify.accept_paths(tensors, draws, n, stride)

    def in_place(self, verified: verify.VerifyBatch, acceptance: verify.Acceptance) -> bool:
        """Mostly it does: the likeliest path is verified where it would be committed."""
        taken = acceptance.accepted.numpy()
        return bool((verified.held_at[:, taken] == verified.positions[taken]).all())

    moves = staticmethod(verify.moves)

    def move(self, pool: Any, target: Tensor, source: Tensor) -> None:
        moved = target != source
        if moved.any():
            pool.move_kv_cache(target[moved], source[moved])

    def time(self, models: Sequence[CpuForward], step: Callable[[], Any]) -> float:
        start = HostMark()
        step()
        return start.seconds_until(HostMark())

    def report(self) -> dict[str, Any]:
        weights = {"target": self.target.storage, "drafts": [draft.storage for draft in self.drafts]}
        return {"device": "cpu", "weights": weights}
