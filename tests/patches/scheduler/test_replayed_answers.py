"""In a replay an answer ends where its trace says, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from adaserve.patches.scheduler.replayed_answers import _ended
from adaserve.slo.replay_lengths import ANSWER_TOKENS


def ended(sizes: list[int], answer_tokens: Any, max_tokens: int = 512) -> tuple[Any, int]:
    """How a request ends whose tokens 1, 2, 3, ... come in portions, and after how many of them."""
    custom = None if answer_tokens is None else {ANSWER_TOKENS: answer_tokens}
    sampling = SamplingParams(max_new_tokens=max_tokens, ignore_eos=True, custom_params=custom)
    sampling.normalize(None)
    req = Req("r", "a", [5], sampling)
    for size in sizes:
        done = len(req.output_ids)
        req.output_ids.extend(range(done + 1, done + size + 1))
        req.update_finish_state(size)
        _ended(None, req, size)
        if req.finished():
            return req.finished_reason.to_json(), len(req.output_ids_through_stop)
    return None, len(req.output_ids)


@pytest.mark.parametrize("sizes", [[1] * 9, [1, 3, 3, 3], [1, 5, 1, 1], [9]])
def test_the_answer_ends_as_at_a_stop_token(sizes: list[int]) -> None:
    assert ended(sizes, 6) == ({"type": "stop", "matched": 6}, 6)


def test_the_bound_ends_it_before() -> None:
    assert ended([1, 3, 3], 6, max_tokens=4) == ({"type": "length", "length": 4}, 4)


@pytest.mark.parametrize("max_tokens", [6, 7, 8])
def test_the_first_end_counts_of_those_that_come_at_once(max_tokens: int) -> None:
    """Whoever decodes token by token ends at the sixth, whatever the bound behind it."""
    reason, tokens = ended([5, 4], 6, max_tokens)
    assert (reason["type"], tokens) == ("length" if max_tokens == 6 else "stop", 6)


@pytest.mark.parametrize("answer_tokens", [None, 0, -3, "3", 3.5, True, [3]])
def test_other_requests_go_on(answer_tokens: Any) -> None:
    assert ended([1, 3, 3], answer_tokens) == (None, 7)
