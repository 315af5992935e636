"""What SGLang says of accepted drafts, where verifications are of different length."""

from __future__ import annotations

import inspect
import logging
import re
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from sglang.srt.managers import tokenizer_manager
from sglang.srt.managers.scheduler_components import metrics_reporter
from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from adaserve.patches.scheduler.accept_rates import _of_request, _of_server

ROOM = 24
"""Tokens of a KV window, the root included."""


@pytest.fixture(autouse=True)
def spec(monkeypatch: pytest.MonkeyPatch) -> None:
    def settings() -> Any:
        return SimpleNamespace(speculative_num_draft_tokens=ROOM)

    monkeypatch.setattr("sglang.srt.runtime_context.get_spec", settings)
    for module in (metrics_reporter, tokenizer_manager):
        monkeypatch.setattr(module, "get_spec", settings)
    monkeypatch.setattr(metrics_reporter, "get_disagg", lambda: SimpleNamespace(language_only=False))


def of_request(verifications: int, verified: int, accepted: int) -> dict[str, Any]:
    """What an answer says. ``verified``: candidates."""
    output = SimpleNamespace(
        spec_verify_ct=[1, verifications],
        spec_num_correct_drafts=[0, accepted],
        spec_num_cap_tokens=[1, verifications + verified],
        completion_tokens=[1, verifications + accepted],
        spec_correct_drafts_histogram=[],
    )
    said: dict[str, Any] = {}
    inspect.unwrap(TokenizerManager._calculate_spec_decoding_metrics)(None, said, output, 1)
    _of_request(None, None, said, output, 1)
    return said


@pytest.mark.parametrize(("verified", "accepted", "rate"), [(30, 20, 2 / 3), (8, 8, 1.0), (0, 0, 0.0)])
def test_an_answer_says_what_was_verified_of_it(verified: int, accepted: int, rate: float) -> None:
    said = of_request(10, verified, accepted)
    assert said["spec_num_proposed_drafts"] == verified
    assert said["spec_accept_rate"] == pytest.approx(rate)
    assert said["spec_accept_length"] == 1 + accepted / 10


def test_a_request_without_a_verification_has_no_rate() -> None:
    assert of_request(0, 0, 0) == {}


class Iterations:
    """SGLang's reporter, which speaks after every second iteration. ``iteration``: gives its log."""

    def __init__(self) -> None:
        self.reporter: Any = MagicMock(spec=[])
        vars(self.reporter).update(
            scheduler=MagicMock(enable_fpm=False, waiting_queue=[]),
            current_scheduler_metrics_enabled=False, is_stats_logging_rank=True, decode_log_interval=2,
            forward_ct_decode=0, last_decode_stats_tic=0.0, num_generated_tokens=0, enable_mfu_metrics=False,
            _graph_backend_label="graph", spec_num_accept_tokens=0, spec_num_correct_drafts=0,
            spec_num_forward_ct=0, spec_total_num_accept_tokens=0, spec_total_num_forward_ct=0,
            spec_num_block_accept_tokens=0, spec_num_cap_tokens=0,
        )  # fmt: skip
        ours, pools = self.reporter.scheduler.spec_algorithm, self.reporter.scheduler.pool_stats_observer
        ours.is_none.return_value = ours.is_dspark.return_value = False
        pools.get_pool_stats().get_decode_usage_msg_parts.return_value = []

    def rate(self, n: int, verified: int, accepted: int, caplog: pytest.LogCaptureFixture) -> float | None:
        """One iteration of n requests, and what is said behind it."""
        caplog.clear()
        self.reporter.forward_ct_decode += 1
        inspect.unwrap(SchedulerMetricsReporter.update_spec_metrics)(
            self.reporter, n, accepted, n + accepted, 0, n + verified
        )
        original = inspect.unwrap(SchedulerMetricsReporter.report_decode_stats)
        _of_server(original, self.reporter, False, running_batch=MagicMock(reqs=[None] * n))
        said = re.search(r"accept len: ([\d.]+), accept rate: ([\d.]+)", caplog.text)
        return None if said is None else float(said[2])


def test_a_server_says_what_share_of_the_verified_candidates_was_accepted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    some = Iterations()
    assert some.rate(4, 10, 5, caplog) is None
    assert some.rate(2, 10, 10, caplog) == 0.75
    assert some.rate(4, 0, 0, caplog) is None
    assert some.rate(4, 0, 0, caplog) == 0.0
    assert some.rate(1, 3, 3, caplog) is None
    assert some.rate(1, 0, 0, caplog) == 1.0
