"""Requests of one prefill of which some were taken back, or ended, before SGLang looked at its result."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.scheduler_components.logprob_result_processor import SchedulerLogprobResultProcessor

from adaserve.patches.scheduler.prefill_logprobs import _process

COUNTER = object.__new__(SchedulerLogprobResultProcessor)  # what is asked of it reads the request alone
LENGTHS, STARTS = [4, 3, 5, 2], [0, 3, 2, 0]
OF_REQUEST = [[0.0, 0.1, 0.2, 0.3], [], [2.0, 2.1, 2.2], [3.0, 3.1]]


def request(retracted: bool = False, finished: bool = False, chunks: int = 0) -> Any:
    return SimpleNamespace(
        is_retracted=retracted,
        finished=lambda: finished,
        inflight_middle_chunks=chunks,
        is_prefill_only=False,
    )


def left(reqs: list[Any]) -> list[float]:
    flat = torch.tensor([x for values in OF_REQUEST for x in values])
    result = SimpleNamespace(
        logits_output=LogitsProcessorOutput(next_token_logits=None, input_token_logprobs=flat),
        extend_input_len_per_req=LENGTHS,
        extend_logprob_start_len_per_req=STARTS,
        copy_done=None,
    )
    batch, told = SimpleNamespace(reqs=reqs, return_logprob=True), list[Any]()
    processor = SimpleNamespace(logprob_result_processor=COUNTER)
    _process(lambda *given: told.append(given), processor, batch, result)
    assert told == [(processor, batch, result)]
    return [round(x, 1) for x in result.logits_output.input_token_logprobs.tolist()]


@pytest.mark.parametrize("passed_over", [{"retracted": True}, {"finished": True}])
@pytest.mark.parametrize("which", [{0}, {1}, {2}, {0, 2}, {3}, {0, 1, 2, 3}])
def test_later_prompts_keep_their_own(passed_over: dict[str, Any], which: set[int]) -> None:
    reqs = [request(**(passed_over if i in which else {})) for i in range(4)]
    assert left(reqs) == [x for i, values in enumerate(OF_REQUEST) if i not in which for x in values]


def test_nothing_is_dropped_where_sglang_passes_over_nobody() -> None:
    """A request that ends within its chunks is counted by SGLang itself."""
    everything = [x for values in OF_REQUEST for x in values]
    assert left([request() for _ in range(4)]) == everything
    assert left([request(finished=True, chunks=1), request(), request(), request()]) == everything
