"""TTFT SLOs: a multiple of the prompt's own prefill time on the idle host, plus a constant.

They were chosen before anything was measured with them. The constants are what people and industry ask
for: DistServe (OSDI '24, table 1) gives chat 0.25 s, code completion 0.125 s and summaries 15 s; MLPerf
Inference 5.0 gives Llama-2-70B 0.45 s in its interactive and 2 s in its server scenario. A multiple of the
prefill time leaves room for the chunks of a long prompt to take turns with decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from adaserve.slo.classes import SLOClass


@dataclass(frozen=True, slots=True)
class TtftRule:
    """SLO = ``x_prefill`` times the prompt's prefill time + ``plus_ms``."""

    x_prefill: float
    plus_ms: float

    def __str__(self) -> str:
        return f"{self.x_prefill:g} x prefill + {self.plus_ms:g} ms"


TTFT_RULES: Mapping[str, TtftRule] = {
    "coding": TtftRule(5.0, 250.0),
    "chat": TtftRule(5.0, 250.0),
    "summarization": TtftRule(10.0, 2000.0),
}
OTHER_RULE = TtftRule(10.0, 1000.0)
"""For classes that the paper does not have and that give no ``ttft_ms`` of their own."""


@dataclass(frozen=True, slots=True)
class PrefillTime:
    """TTFT on the idle host, by the prompt's tokens: a straight line."""

    fixed_ms: float
    per_token_ms: float

    def ms(self, prompt_tokens: float) -> float:
        return self.fixed_ms + self.per_token_ms * prompt_tokens

    @classmethod
    def fitted(cls, tokens: Sequence[float], ttft_ms: Sequence[float]) -> PrefillTime:
        """Least squares in relative errors, so that short prompts count as much as long ones."""
        y = np.array(ttft_ms, float)
        slope, fixed = np.polyfit(np.array(tokens, float), y, 1, w=1.0 / y)
        return cls(round(max(0.0, float(fixed)), 4), round(max(0.0, float(slope)), 6))


def ttft_slo_ms(slo_class: SLOClass, prompt_tokens: int, prefill: PrefillTime) -> float:
    """The SLO of one request; a class's own ``ttft_ms`` comes first."""
    if slo_class.ttft_ms is not None:
        return slo_class.ttft_ms
    rule = TTFT_RULES.get(slo_class.name, OTHER_RULE)
    return round(rule.x_prefill * prefill.ms(prompt_tokens) + rule.plus_ms, 3)
