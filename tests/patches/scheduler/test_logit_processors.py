"""What a client's logit processor does wrong ends its own request."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from torch import Tensor

from adaserve.patches.scheduler.logit_processors import MAX_KEPT, apply_processors, keeping_few


def applied(*entries: tuple[Any, list[dict[str, Any]]]) -> tuple[Tensor, list[Any]]:
    """Logits [n, 4] and what ends each request; each processor has some rows, with their parameters."""
    reqs: list[Any] = []
    params: list[dict[str, Any]] = []
    groups = {}
    for processor, given in entries:
        rows = list(range(len(reqs), len(reqs) + len(given)))
        groups[len(groups)] = SimpleNamespace(processor=processor, rows=rows)
        reqs += [SimpleNamespace(to_finish=None) for _ in given]
        params += given
    given_params = [{**p, "__req__": req} for p, req in zip(params, reqs, strict=True)]
    logits = torch.zeros(len(reqs), 4)
    apply_processors(logits, SimpleNamespace(custom_logit_processor=groups, custom_params=given_params))
    return logits, [req.to_finish for req in reqs]


def fails_half_way(logits: Tensor, params: list[dict[str, Any]]) -> Tensor:
    logits.fill_(7)
    return logits[params[0]["missing"]]


@pytest.mark.parametrize(
    "bad",
    [
        fails_half_way, lambda logits, _: None, lambda logits, _: logits[:, :2], lambda logits, _: 1.0,
        lambda logits, _: logits.fill_(-torch.inf), lambda logits, _: logits.fill_(torch.nan),
        lambda logits, _: logits.fill_(torch.inf),
    ],
)  # fmt: skip
def test_a_processor_that_fails_ends_its_request_alone(bad: Any) -> None:
    logits, ends = applied(
        (bad, [{}]), (lambda logits, params: logits + params[0]["a"], [{"a": 1}, {"a": 2}])
    )
    assert logits.tolist() == [[0] * 4, [1] * 4, [2] * 4]
    assert ends[0].status_code == 400 and "custom logit processor" in ends[0].message
    assert ends[1:] == [None, None]


def test_requests_with_the_same_processor_may_differ_in_parameters() -> None:
    """SGLang's own raises for two requests that forbid different tokens."""
    logits, ends = applied((DisallowedTokensLogitsProcessor(), [{"token_ids": [0]}, {"token_ids": [1, 2]}]))
    assert logits.isneginf().tolist() == [[True, False, False, False], [False, True, True, False]]
    assert ends == [None, None]


def test_few_processors_are_kept() -> None:
    """A client may make one for each request; each would stay for as long as the server lives."""
    read: list[str] = []
    forever = cache(lambda text: read.append(text) or text.upper())
    few: Any = keeping_few(forever)
    for _ in range(2):
        assert [few(str(i)) for i in range(MAX_KEPT + 1)] == [str(i) for i in range(MAX_KEPT + 1)]
    assert few("0") == "0" and few("0") == "0"
    assert few.cache_info().currsize == MAX_KEPT and forever.cache_info().currsize == 0
    assert len(read) > 2 * MAX_KEPT, "those that were forgotten are read once more"
