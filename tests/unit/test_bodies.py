"""Bodies of very many parts are refused; token ids are not parts."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from adaserve.boundary import RequestError
from adaserve.boundary.bodies import drop_nulls, require_few_values
from adaserve.boundary.limits import MAX_BODY_IDS, MAX_BODY_VALUES


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "a"}] * 30_000},
        {"stop": [5] * 70_000},
        {"input_ids": [1.5] * 70_000},
        {"tokens": [5] * 70_000},
        {"a": {"logit_bias": ["a"] * 70_000}},
        {"stop": ["a"] * MAX_BODY_VALUES},
        {"custom_labels": {str(i): "a" for i in range(70_000)}},
        [[["a"]]] * 40_000,
    ],
)
def test_a_body_of_very_many_values_is_refused(body: Any) -> None:
    with pytest.raises(RequestError, match=f"at most {MAX_BODY_VALUES} values"):
        require_few_values(body, "/generate")


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": list(range(300_000))},
        {"input_ids": [list(range(1000))] * 4096},
        {"sampling_params": {"logit_bias": {str(i): 1.0 for i in range(150_000)}}},
        {"text": ["a"] * 4096, "sampling_params": [{"temperature": 1, "stop": "a"}] * 4096},
        {"messages": [{"role": "user", "content": "a"}] * 10_000},
        {"stop": ["a"] * (MAX_BODY_VALUES - 1)}, {}, [],
    ],
)  # fmt: skip
def test_long_prompts_and_large_batches_are_not(body: Any) -> None:
    require_few_values(body, "/generate")


def test_token_ids_are_where_a_route_takes_them() -> None:
    for name, path, other in (
        ("prompt", "/v1/completions", "/tokenize"),
        ("tokens", "/v1/detokenize", "/v1/completions"),
        ("query", "/v1/score", "/v1/completions"),
        ("items", "/v1/score", "/v1/rerank"),
    ):
        for ids in ([5] * 300_000, [[5] * 100_000] * 3):
            require_few_values({name: ids}, path)
            with pytest.raises(RequestError):
                require_few_values({name: ids}, other)


def test_a_batch_has_so_many_ids() -> None:
    """Sixteen millions, which fit into a body, held up everybody for more than two seconds."""
    ids = [5] * (MAX_BODY_IDS // 1024)
    require_few_values({"input_ids": [ids] * 1024}, "/generate", context=8192)
    for context in (8192, None):
        with pytest.raises(RequestError, match=f"at most {MAX_BODY_IDS} token ids: send them in parts"):
            require_few_values({"input_ids": [ids] * 1025}, "/generate", context)
    require_few_values({"input_ids": [5] * (MAX_BODY_IDS + 1)}, "/generate", context=1 << 24)


def test_null_is_dropped_where_it_says_nothing() -> None:
    body = {"n": None, "temperature": 0, "stop": "", "messages": [{"content": None}]}
    drop_nulls(body)
    assert body == {"temperature": 0, "stop": "", "messages": [{"content": None}]}


@pytest.mark.parametrize(
    ("body", "path", "refused"),
    [
        ({"input_ids": [5] * 101}, "/generate", True),
        ({"input_ids": [[5], [5] * 101]}, "/generate", True),
        ({"prompt": [5] * 101}, "/v1/completions", True),
        ({"input_ids": [[5] * 100] * 9}, "/generate", False),
        ({"tokens": [5] * 101}, "/v1/detokenize", False),
        ({"query": [5] * 101, "items": [[5]]}, "/v1/score", True),
        ({"query": [5], "items": [[5] * 100] * 9}, "/v1/score", False),
    ],
)
def test_ids_that_are_too_many_for_a_prompt_are_refused(body: Any, path: str, refused: bool) -> None:
    require_few_values(body, path)
    with (
        pytest.raises(RequestError, match="101 tokens is longer than the model") if refused else nullcontext()
    ):
        require_few_values(body, path, context=100)
