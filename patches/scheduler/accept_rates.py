"""SGLang's rates of accepted drafts count the candidates that were verified.

Why: SGLang takes it that each verification of a request has as many candidates as its KV window has room for.
Ours have as many as pay off, often none. So answers, log and metrics said that few drafts were accepted when
nearly all were, and that some were proposed when none were drafted. The worker reports how many tokens it
verified, in the field that SGLang has for verifications of different length (``cap_lens``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook


def register() -> None:
    reporter = "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter"
    hook(f"{reporter}.report_decode_stats", _of_server, HookType.AROUND)
    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    hook(f"{manager}._calculate_spec_decoding_metrics", _of_request, HookType.AFTER)


def _of_server(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang divides by the drafts that it takes for granted. It is given as many accepted ones of these as
    make the right rate, and forgets them once they are reported."""
    from sglang.srt.runtime_context import get_spec

    accepted, verifications = self.spec_num_correct_drafts, self.spec_num_forward_ct
    assumed = verifications * (get_spec().speculative_num_draft_tokens - 1)
    self.spec_num_correct_drafts = assumed * _rate(accepted, self.spec_num_cap_tokens - verifications)
    try:
        return original(self, *args, **kwargs)
    finally:
        if self.spec_num_forward_ct:  # not reported yet
            self.spec_num_correct_drafts = accepted


def _of_request(_: None, self: Any, meta_info: dict[str, Any], recv_obj: Any, i: int) -> None:
    """``meta_info``: of a finished request, the ``i``-th of ``recv_obj``."""
    if "spec_num_proposed_drafts" in meta_info:
        verified = recv_obj.spec_num_cap_tokens[i] - recv_obj.spec_verify_ct[i]
        meta_info["spec_num_proposed_drafts"] = verified
        meta_info["spec_accept_rate"] = _rate(meta_info["spec_num_correct_drafts"], verified)


def _rate(accepted: float, verified: int) -> float:
    return accepted / verified if verified else 0.0
