"""What is known of a request once its prompt is tokenized."""

from __future__ import annotations

import contextvars
from types import SimpleNamespace
from typing import Any

import pytest

from adaserve.boundary import RequestError
from adaserve.patches.http.validation import _Asked, _asked, _check_tokens

CONTEXT = 8192


def check(prompt: int, params: dict[str, Any], **fields: Any) -> None:
    manager = SimpleNamespace(model_config=SimpleNamespace(context_len=CONTEXT))
    unset = {
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "return_logprob": True,
    }
    obj = SimpleNamespace(sampling_params=params, **{"session_params": None, **unset, **fields})
    _check_tokens(manager, obj, [5] * prompt)


@pytest.mark.parametrize(
    ("prompt", "params", "fields"),
    [
        (8000, {"max_new_tokens": 1}, {"logprob_start_len": 0, "top_logprobs_num": 1024}),
        (10, {"max_new_tokens": None}, {"top_logprobs_num": 1024}),
        (10, {"max_new_tokens": 5000}, {"token_ids_logprob": [5] * 1000}),
        (8000, {"max_new_tokens": 1}, {"logprob_start_len": 0, "top_logprobs_num": 100}),
    ],
)
def test_too_many_log_probabilities_are_refused(
    prompt: int, params: dict[str, Any], fields: dict[str, Any]
) -> None:
    with pytest.raises(RequestError, match="log probabilities"):
        check(prompt, params, **fields)
    check(prompt, params, **{**fields, "return_logprob": False})


def test_usual_ones_are_not() -> None:
    check(8000, {}, logprob_start_len=0, top_logprobs_num=20)
    check(8000, {"max_new_tokens": 100}, top_logprobs_num=1024)
    check(10, {}, top_logprobs_num=1024)  # 128 tokens, as SGLang has it
    check(10, {"max_new_tokens": 1 << 30}, top_logprobs_num=20, token_ids_logprob=[5, 6])


TURN = {"session_params": {"id": "s"}}


def test_what_came_before_in_a_session_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang puts it in front of a turn of few tokens, and takes logprob_start_len over all of them."""
    few: dict[str, Any] = {"max_new_tokens": 1}
    with pytest.raises(RequestError, match=r"a session's prompt, .* got 1025 at each of 8192 tokens"):
        check(5, few, logprob_start_len=0, top_logprobs_num=1024, **TURN)
    check(5, few, logprob_start_len=0, top_logprobs_num=1024)
    check(5, few, logprob_start_len=0, top_logprobs_num=20, **TURN)
    check(5, few, logprob_start_len=8000, top_logprobs_num=1024, **TURN)
    check(5, few, logprob_start_len=-1, top_logprobs_num=1024, **TURN)
    repeats = contextvars.ContextVar("repeats", default=True)
    monkeypatch.setattr("adaserve.patches.http.validation.REPEATS", repeats)
    with pytest.raises(RequestError, match="65536, got 9 at each of 8192 tokens; more are possible"):
        check(5, few, logprob_start_len=0, top_logprobs_num=8, **TURN)
    check(5, few, logprob_start_len=0, top_logprobs_num=6, **TURN)


def test_a_stream_that_repeats_them_holds_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    repeats = contextvars.ContextVar("repeats", default=True)
    monkeypatch.setattr("adaserve.patches.http.validation.REPEATS", repeats)
    check(100, {"max_new_tokens": 2000}, logprob_start_len=0, top_logprobs_num=20)
    with pytest.raises(RequestError, match="65536, got 9 at each of 8000 tokens; more are possible"):
        check(7990, {"max_new_tokens": 10}, logprob_start_len=0, top_logprobs_num=8)


def test_all_answers_of_a_request_count_together() -> None:
    """They are kept until the last one is there: 128 large ones would take a host's memory."""
    large: dict[str, Any] = {"top_logprobs_num": 999}
    check(10, {"max_new_tokens": 1000, "n": 4}, **large)
    with pytest.raises(RequestError, match="together, got 5000000"):
        check(10, {"max_new_tokens": 1000, "n": 5}, **large)

    def batch(prompts: int) -> None:
        _asked.set(_Asked())
        for _ in range(prompts):
            check(200, {"max_new_tokens": 50}, logprob_start_len=0, **large)

    contextvars.copy_context().run(batch, 16)
    with pytest.raises(RequestError, match="together, got 4250000"):
        contextvars.copy_context().run(batch, 17)


def test_all_prompts_of_a_request_count_together() -> None:
    """Each answer has a copy of its prompt."""
    params: dict[str, Any] = {"n": 128}

    def batch(prompts: int) -> None:
        _asked.set(_Asked())
        for _ in range(prompts):
            check(CONTEXT, params, return_logprob=False)

    contextvars.copy_context().run(batch, 64)
    with pytest.raises(RequestError, match="67108864 tokens together, got 68157440: send it in"):
        contextvars.copy_context().run(batch, 65)
