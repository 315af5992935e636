"""The prompts of a prefill are told their own log-probabilities, whatever became of the others.

Why: SGLang keeps the log-probabilities of all prompts of a prefill in one list and walks along it. Under the
overlap schedule it looks at a prefill after the next batch was launched. A request that was retracted or
ended in between is passed over, but its part of the list is not, so all later prompts would be told those of
their neighbors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType

from adaserve.patches import hook

Process = Callable[[Any, Any, Any], None]


def register() -> None:
    module = "sglang.srt.managers.scheduler_components.batch_result_processor"
    hook(f"{module}.SchedulerBatchResultProcessor.process_batch_result_prefill", _process, HookType.AROUND)


def _process(original: Process, self: Any, batch: Any, result: Any) -> None:
    if batch.return_logprob:
        drop_passed_over(self.logprob_result_processor, batch, result)
    original(self, batch, result)


def drop_passed_over(counter: Any, batch: Any, result: Any) -> None:
    """Takes the values of requests that SGLang will pass over out of ``result``'s input_token_logprobs."""
    output = result.logits_output
    passed_over = [r.is_retracted or (r.finished() and r.inflight_middle_chunks <= 0) for r in batch.reqs]
    if not any(passed_over) or output is None or output.input_token_logprobs is None:
        return
    if result.copy_done is not None:
        result.copy_done.synchronize()
    output.finalize_input_logprobs()
    counts = [
        counter.calculate_num_input_logprobs(req, length, start)
        for req, length, start in zip(
            batch.reqs,
            result.extend_input_len_per_req,
            result.extend_logprob_start_len_per_req,
            strict=True,
        )
    ]
    kept = torch.tensor(passed_over).logical_not().repeat_interleave(torch.tensor(counts))
    output.input_token_logprobs = output.input_token_logprobs[kept.to(output.input_token_logprobs.device)]
