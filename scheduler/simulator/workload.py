"""Requests of a simulation: a trace with SLOs, real lengths and a difficulty for the draft model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from adaserve.scheduler.interface import FloatArray
from adaserve.slo.classes import SLOConfig
from adaserve.slo.trace import Trace, TraceRow


@dataclass(slots=True, eq=False)
class SimRequest:
    """One request, equal to itself alone; the fields after ``bias`` are written by the simulator."""

    rid: str
    slo_class: str
    tpot_slo_s: float
    ttft_slo_s: float
    arrival_s: float
    prompt_tokens: int
    output_tokens: int  # true length, hidden from the policy
    cap_tokens: int  # what the client allows: the policy's upper bound
    difficulty: float  # mean one-step probability of the draft's best child, (0, 1)
    bias: float  # logit shift of true acceptance against the draft's claim
    prefilled: int = 0
    first_token_s: float = float("nan")
    last_token_s: float = float("nan")
    produced: int = 0  # tokens after the first
    iterations: int = 0
    shed: bool = False
    drafts: bool = True  # False: the draft model skips its prompt, so it cannot speculate

    @property
    def finished(self) -> bool:
        return self.last_token_s == self.last_token_s


@dataclass(frozen=True, slots=True)
class TextModel:
    """How predictable each class is to the draft, and how much requests of a class differ."""

    mean: dict[str, float] = field(
        default_factory=lambda: {"coding": 0.78, "chat": 0.66, "summarization": 0.71}
    )
    other: float = 0.70
    spread: float = 0.45  # standard deviation of the request's logit
    bias_spread: float = 0.25  # standard deviation of the request's miscalibration, in logits
    eos_share: float = 0.0  # share of requests that stop before their cap, uniformly


def make_requests(
    trace: Trace, slos: SLOConfig, baseline_s: float, text: TextModel, seed: int
) -> list[SimRequest]:
    """Draws lengths and difficulties for a trace, reproducibly. Raises SLOError on an unknown class."""
    rng = np.random.default_rng([seed, 0xADA])
    n = len(trace)
    slo_of = [row.slo(slos, baseline_s) for row in trace.rows]
    difficulty, bias = drawn_difficulty(text, [slo.slo_class for slo in slo_of], rng)
    early, share = rng.random(n) < text.eos_share, rng.random(n)
    requests = []
    for i, row in enumerate(trace.rows):
        slo = slo_of[i]
        cap = max(1, row.output_tokens)
        length = max(1, int(cap * share[i])) if early[i] else cap
        requests.append(
            SimRequest(
                rid=f"r{i}",
                slo_class=slo.slo_class,
                tpot_slo_s=slo.tpot_s,
                ttft_slo_s=slo.ttft_s,
                arrival_s=row.arrival_s,
                prompt_tokens=max(1, row.prompt_tokens),
                output_tokens=length,
                cap_tokens=cap,
                difficulty=difficulty[i],
                bias=bias[i],
            )
        )
    return requests


def drawn_difficulty(
    text: TextModel, classes: Sequence[str], rng: np.random.Generator
) -> tuple[FloatArray, FloatArray]:
    """``difficulty`` and ``bias`` of a SimRequest of each class, [n]."""
    logits = rng.normal(0, text.spread, len(classes))
    bias = rng.normal(0, text.bias_spread, len(classes))
    means = np.array([text.mean.get(name, text.other) for name in classes])
    return 1 / (1 + (1 / means - 1) * np.exp(-logits)), bias


def synthetic_trace(n: int, rate_rps: float, seed: int, mix: dict[str, float], burst: float = 1.0) -> Trace:
    """Gamma arrivals (``burst`` = squared coefficient of variation, 1 = Poisson), log-normal lengths."""
    rng = np.random.default_rng([seed, 0x7ACE])
    gaps = rng.gamma(1 / burst, burst / rate_rps, n)
    arrivals: FloatArray = np.cumsum(gaps) - gaps[0]
    names = list(mix)
    weights = np.array([mix[k] for k in names])
    kinds = rng.choice(len(names), n, p=weights / weights.sum())
    medians = {"coding": (120, 220), "chat": (60, 200), "summarization": (900, 160)}
    rows = []
    for i in range(n):
        name = names[kinds[i]]
        prompt, output = medians.get(name, (200, 200))
        p, o = prompt * np.exp(rng.normal(0, 0.7)), output * np.exp(rng.normal(0, 0.5))
        rows.append(TraceRow(float(arrivals[i]), int(max(4, min(p, 8000))), int(max(4, min(o, 1500))), name))
    return Trace(tuple(rows), f"synthetic {rate_rps:g} rps seed {seed}")
