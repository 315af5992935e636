"""What one iteration may write, and what it leaves of the KV pool for one request."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from adaserve.patches.start.kv_reserve import _count_windows, _leave_a_window, _row_headroom, _window

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


@pytest.mark.parametrize(("running", "needed"), [(["a request"], 7), ([], 0)])
def test_a_prompt_starts_where_windows_fit(running: list[str], needed: int) -> None:
    """SGLang wants one slot more than that, and the longest request leaves it."""
    batch = SimpleNamespace(reqs=running, new_tokens_required_next_decode=lambda: 7)
    budget = SimpleNamespace(total_offset=20)
    adder = SimpleNamespace(page_size=1, per_req_token_overhead=1, memory_budget=budget, running_batch=batch)
    _count_windows(None, adder)
    assert adder.per_req_token_overhead == ROOT_AND_CANDIDATES and budget.total_offset == 20 + needed
