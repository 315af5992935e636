"""A server that runs another algorithm is left as SGLang made it."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.sampling.sampling_params import get_max_seq_length

from adaserve.patches import scheduler_guard
from adaserve.patches.metric_labels import MAX_PRIORITIES, _few_queues, _path
from adaserve.patches.prefill_slack import _whole_beside_a_started_one
from adaserve.patches.routes import _render
from adaserve.patches.scheduler_guard import _drop, _open_session
from adaserve.patches.stop_strings import _longest
from adaserve.patches.tokenizing import _few_questions

pytestmark = pytest.mark.usefixtures("theirs")


@pytest.mark.parametrize("expression", ["ab", "(?<=abcdef)x", "[^z]"])
def test_a_stop_expression_is_searched_for_as_far_back(expression: str) -> None:
    """It may look around, which AdaServe refuses."""
    original = inspect.unwrap(get_max_seq_length)
    assert _longest(original, expression) == original(expression)


def test_metrics_have_all_labels() -> None:
    assert _path(("/nobody", False), None) == ("/nobody", False)
    queue = SimpleNamespace(by_priority=dict.fromkeys(range(MAX_PRIORITIES + 1), 1))
    _few_queues(SimpleNamespace(_known_priorities=set()), None, queue)
    assert len(queue.by_priority) == MAX_PRIORITIES + 1


def test_sessions_are_as_many_as_anybody_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_guard, "MAX_SESSIONS", 0)
    assert _open_session(lambda *_: "opened", SimpleNamespace(sessions={}), None) == "opened"


def test_turns_are_replaced_by_sglang() -> None:
    cleared: list[Any] = []
    _drop(lambda *given: cleared.append(given), "turn", {"rid": "turn"})
    assert cleared == [("turn", {"rid": "turn"})]


def test_questions_are_as_many_as_anybody_asks() -> None:
    async def collect(questions: Any) -> list[Any]:
        return list(questions)

    asked = [([5] * 8000, [6], [])] * 600
    assert len(asyncio.run(_few_questions(collect, iter(asked)))) == 600


def test_an_error_of_a_chat_template_stays_what_it_is() -> None:
    def fails(*_: Any) -> None:
        raise TypeError("of the template")

    with pytest.raises(TypeError, match="of the template"):
        _render(fails, None, None)


def test_prompts_are_read_beside_a_started_one() -> None:
    adder = SimpleNamespace(rem_chunk_tokens=10, is_hybrid_swa=True, ceil_paged_tokens=lambda n: n)
    req = SimpleNamespace(full_untruncated_fill_ids=[5] * 8, prefix_len=0)
    added = _whole_beside_a_started_one(lambda *_: AddReqResult.CONTINUE, adder, req, True, None)
    assert added == AddReqResult.CONTINUE
