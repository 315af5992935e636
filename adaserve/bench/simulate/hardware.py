"""What one simulated replica runs on: a GPU by its data sheet, or a host by its profile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from adaserve.scheduler.costs.fit import fit_latency
from adaserve.scheduler.costs.latency import LatencyModel
from adaserve.scheduler.costs.profile import load_profile
from adaserve.scheduler.simulator.hardware import hardware_latency, kv_capacity_tokens

PROFILED_CACHE = 200_000
"""Tokens of KV cache if a profile is given: it does not say how much memory its host has."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """``profile``: measured on a host, instead of what ``model`` costs on ``tp`` of these GPUs."""

    model: str
    gpu: str
    tp: int
    profile: Path | None

    def latency(self) -> LatencyModel:
        """Raises ValueError on an unknown model or GPU, ProfileError."""
        if self.profile is None:
            return hardware_latency(self.model, self.gpu, self.tp)
        return fit_latency(load_profile(self.profile)).model

    def on_cpu(self) -> bool:
        """Whether it is a CPU host. Raises ProfileError."""
        return self.profile is not None and load_profile(self.profile).meta.get("device") == "cpu"

    def kv_tokens(self) -> int:
        """Tokens of KV cache. Raises ValueError."""
        return PROFILED_CACHE if self.profile else kv_capacity_tokens(self.model, self.gpu, self.tp)
