"""Prefill and overload as policy: order, chunk size, gate, and what to do with requests too late to save."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from adaserve.scheduler.interface import BoolArray, FloatArray, IntArray

Order = Literal["fcfs", "slack", "short"]


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Off by default: no gate, nobody is shed, first come first served, fixed chunks."""

    chunk_tokens: int = 512  # prefill tokens per iteration
    order: Order = "fcfs"
    gate: float | None = None  # start prefills only while the tightest class keeps this headroom
    gate_free: int = 4  # running requests below which the gate is open
    shed: bool = False  # answer 429 to requests whose TTFT SLO is already lost; off by default
    shed_factor: float = 1.0  # lost = waited longer than this many TTFT SLOs

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be >= 1, got {self.chunk_tokens}")
        if self.order not in ("fcfs", "slack", "short"):
            raise ValueError(f"order must be fcfs, slack or short, got {self.order!r}")


@dataclass(frozen=True, slots=True)
class WaitingBatch:
    """Requests whose prefill is not done; arrays of shape [n]."""

    arrival_s: FloatArray
    ttft_slo_s: FloatArray  # inf = none
    prompt_left: IntArray  # tokens still to be prefilled
    started: BoolArray  # part of the prompt is in the cache already


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """What to prefill now: rows in this order until ``tokens`` are spent; ``shed`` rows get 429."""

    tokens: int
    order: IntArray
    shed: BoolArray


def headroom(tpot_slo_s: FloatArray, pace: FloatArray, period_s: float) -> float:
    """G = min over running requests of SLO x tokens per iteration / time per iteration; inf when idle."""
    if not len(tpot_slo_s) or period_s <= 0:
        return float("inf")
    return float(np.min(tpot_slo_s * pace)) / period_s


def plan_prefill(
    config: PrefillConfig, waiting: WaitingBatch, n_running: int, headroom_now: float, now_s: float
) -> PrefillPlan:
    """Pure: the prefill share of one iteration.

    Started prompts go first (their KV is taken already). A closed gate lets only those go on.
    """
    waited = now_s - waiting.arrival_s
    shed = np.zeros(len(waited), np.bool_)
    if config.shed:
        shed = (waited > config.shed_factor * waiting.ttft_slo_s) & ~waiting.started
    if config.order == "slack":
        rank = waiting.arrival_s + np.where(np.isfinite(waiting.ttft_slo_s), waiting.ttft_slo_s, 1e6)
    elif config.order == "short":
        rank = waiting.prompt_left.astype(np.float64)
    else:
        rank = waiting.arrival_s
    eligible = ~shed
    if config.gate is not None and n_running >= config.gate_free and headroom_now < config.gate:
        eligible &= waiting.started
    order = np.lexsort((rank, ~waiting.started))
    return PrefillPlan(config.chunk_tokens, order[eligible[order]], shed)
