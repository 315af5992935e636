"""TTFT SLOs: relative to the prompt's own prefill, plus a constant; a class's own milliseconds come first."""

from __future__ import annotations

import pytest

from adaserve.bench.sweep.ttft import PrefillTime, ttft_slo_ms
from adaserve.slo.classes import SLOClass

PREFILL = PrefillTime(fixed_ms=10.0, per_token_ms=0.5)


def test_a_line_is_found_again_and_a_slow_long_prompt_does_not_bend_it() -> None:
    tokens = (16, 48, 128, 384)
    exact = PrefillTime.fitted(tokens, [PREFILL.ms(n) for n in tokens])
    assert (exact.fixed_ms, exact.per_token_ms) == (pytest.approx(10.0), pytest.approx(0.5))
    bent = PrefillTime.fitted(tokens, [*(PREFILL.ms(n) for n in tokens[:3]), 1.3 * PREFILL.ms(384)])
    assert bent.ms(16) == pytest.approx(PREFILL.ms(16), rel=0.1)
    flat = PrefillTime.fitted((10, 20), (9.0, 8.0))
    assert flat.per_token_ms == 0.0, "a longer prompt is never expected sooner"


def test_long_prompts_get_more_time_and_chat_less_than_summaries() -> None:
    coding = SLOClass(name="coding", x_baseline=1.2)
    assert ttft_slo_ms(coding, 20, PREFILL) == 5 * 20.0 + 250
    assert ttft_slo_ms(coding, 120, PREFILL) == 5 * 70.0 + 250
    assert ttft_slo_ms(SLOClass(name="summarization"), 20, PREFILL) == 10 * 20.0 + 2000
    assert ttft_slo_ms(SLOClass(name="mail"), 20, PREFILL) == 10 * 20.0 + 1000


def test_a_class_with_its_own_milliseconds_keeps_them() -> None:
    assert ttft_slo_ms(SLOClass(name="coding", ttft_ms=123.0), 500, PREFILL) == 123.0
