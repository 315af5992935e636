"""Log-probabilities of emitted tokens are SGLang's, however few requests are worked on at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import compute_spec_logprobs

from adaserve.engine.logits import logprobs, portions

ASKED: list[tuple[list[int] | None, list[list[int] | None] | None]] = [
    (None, None),
    ([0, 0, 3, 0, 1], [None, None, [4], None, [7, 8]]),
    ([0, 0, 0, 0, 2], [[5], None, None, None, None]),
]


@pytest.mark.parametrize(("top", "ids"), ASKED)
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_in_portions(at_once: int, greedy: bool, top: Any, ids: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    n, stride, tokens, vocabulary = 5, 3, 12, 23
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(tokens, vocabulary, generator=generator)
    draws = torch.randint(0, vocabulary, (tokens,), generator=generator)
    index = torch.randint(0, tokens, (n, stride), generator=generator)
    info = SimpleNamespace(is_all_greedy=greedy, temperatures=torch.rand(n, 1, generator=generator) + 0.5)
    batch: Any = SimpleNamespace(
        seq_lens=torch.ones(n), sampling_info=info, top_logprobs_nums=top, token_ids_logprobs=ids
    )
    right, got = (LogitsProcessorOutput(next_token_logits=logits) for _ in range(2))
    compute_spec_logprobs(batch, right, draws, accept_index=index)
    monkeypatch.setattr(portions, "ALIGNED_ROWS", 1)
    monkeypatch.setattr(portions, "MAX_VALUES", at_once * stride * vocabulary)
    logprobs.tell(batch, got, draws, index)
    assert torch.equal(got.next_token_logprobs, right.next_token_logprobs)
    for name in logprobs.LISTS:
        mine, theirs = getattr(got, name), getattr(right, name)
        if theirs is None:
            assert mine is None
            continue
        assert [type(value) for value in mine] == [type(value) for value in theirs], name
        as_lists = [[list(map(float, value)) for value in values] for values in (mine, theirs)]
        assert as_lists[0] == as_lists[1], name
