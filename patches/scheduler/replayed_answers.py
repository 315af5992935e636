"""Answers of a replay end where their trace says, though ``max_tokens`` says more.

Why: see adaserve/slo/replay_lengths.py. SGLang ends an answer by its tokens, its text or ``max_tokens``, and
a replay knows only the length. Every server of a comparison needs it, those without ADASERVE too.
"""

from __future__ import annotations

import os
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook
from adaserve.slo.replay_lengths import ANSWER_TOKENS, ENV


def register() -> None:
    if os.environ.get(ENV) == "1":
        request = "sglang.srt.managers.schedule_batch.Req"
        hook(f"{request}.update_finish_state", _ended, HookType.AFTER, always=True)


def _ended(_: None, self: Any, *__: Any, **___: Any) -> None:
    from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN

    tokens = (self.sampling_params.custom_params or {}).get(ANSWER_TOKENS)
    if type(tokens) is not int or not 0 < tokens <= len(self.output_ids):
        return
    # A verification can accept tokens after the end, as after a stop token, and another end among them.
    if not self.finished() or (self.finished_len or 0) > tokens:
        self.finished_reason = FINISH_MATCHED_TOKEN(matched=self.output_ids[tokens - 1])
        self.finished_len = tokens
