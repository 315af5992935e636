"""What one iteration may write, and what it leaves of the KV pool for one request."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from adaserve.patches.start.kv_reserve import _leave_a_window, _row_headroom, _window

ROOT_AND_CANDIDATES, DEEPEST = 9, 3
LAG = 2 * (DEEPEST + 1)
"""Tokens that two iterations may accept whose outcome SGLang has not heard of."""


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    spec = SimpleNamespace(speculative_num_draft_tokens=ROOT_AND_CANDIDATES, speculative_num_steps=DEEPEST)
    schedule = SimpleNamespace(disable_overlap_schedule=True)
    monkeypatch.setattr("sglang.srt.runtime_context.get_spec", lambda: spec)
    monkeypatch.setattr("sglang.srt.runtime_context.get_schedule", lambda: schedule)
    return schedule


def test_the_window_counts_what_sglang_has_not_heard_of(settings: SimpleNamespace) -> None:
    assert _window() == ROOT_AND_CANDIDATES
    settings.disable_overlap_schedule = False
    assert _window() == ROOT_AND_CANDIDATES + LAG
    assert _row_headroom(5) > _window() and _row_headroom(1000) == 1000


@pytest.mark.parametrize(("pool", "less"), [(100, 9), (105, 4), (109, 0), (5000, 0)])
def test_the_last_window_of_the_longest_request_fits(pool: int, less: int) -> None:
    runner = SimpleNamespace(effective_logical_max_total_num_tokens=pool)
    said = _leave_a_window((0, 1, 2, 3, 100, 95, 6, 7), SimpleNamespace(model_runner=runner))
    assert said == (0, 1, 2, 3, 100 - less, 95 - less, 6, 7)
