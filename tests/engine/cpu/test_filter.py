"""The C kernel for top-k, top-p and min-p keeps what the sort keeps."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from adaserve.engine.cpu import build
from adaserve.engine.cpu.filter import by_selection
from adaserve.engine.cpu.sglang_forward import SGLangForward
from adaserve.engine.logits.filters import by_sort, differences, examples

ALL = 1 << 30  # SGLang's top_k of those who ask for none
Asked = tuple[float, int, float, float]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def kernels() -> None:
    if build.load_kernels() is None:
        pytest.skip("no C compiler here")


def columns(*asked: Asked) -> list[Tensor]:
    kinds = (torch.float32, torch.int64, torch.float32, torch.float32)
    return [torch.tensor(v, dtype=kind) for v, kind in zip(zip(*asked, strict=True), kinds, strict=True)]


def kept(logits: Tensor, *asked: Asked) -> list[int]:
    """How many tokens of each row are kept, which are those that the sort keeps."""
    every, right, got = torch.arange(len(asked)), logits.clone(), logits.clone()
    by_sort(right, every, *columns(*asked))
    by_selection(got, every, *columns(*asked))
    assert torch.equal(got, right), asked
    return (right > -math.inf).sum(1).tolist()


@pytest.mark.parametrize("vocabulary", [9000, 67, 5])
def test_it_keeps_what_the_sort_keeps(vocabulary: int) -> None:
    """Many logits are equal, and some are forbidden."""
    assert differences(by_selection, *examples(48, vocabulary, CPU)).tolist() == [0] * 48
    logits = torch.randn(64, vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    asked = [
        (0.3 + 0.1 * (r % 9), (1, 3, 50, ALL)[r % 4], (0.3, 0.9, 1.0)[r % 3], 0.02 * (r % 2))
        for r in range(64)
    ]
    assert differences(by_selection, 4 * logits, columns(*asked)).tolist() == [0] * 64


def test_of_equal_logits_the_first_are_kept() -> None:
    flat = torch.full((5, 1004), -1.5)
    asked = (
        (1.0, 9, 1.0, 0.0),
        (1.0, ALL, 0.75, 0.0),
        (1.0, 1, 1.0, 0.0),
        (1.0, ALL, 1e-9, 0.0),
        (0.5, ALL, 1.0, 1.0),
    )
    assert kept(flat, *asked) == [9, 754, 1, 1, 1004]
    signs = torch.zeros(3, 300)
    signs[:, ::2] = -0.0
    signs[:, 5], signs[:, 7], signs[:, 9] = 1e-45, -1e-45, -3e38
    assert kept(signs, (1.0, 4, 1.0, 0.0), (1.0, 290, 1.0, 0.0), (1.0, 299, 1.0, 0.0)) == [4, 290, 299]


def test_a_grammar_may_leave_one_token() -> None:
    single = torch.full((3, 300), -math.inf)
    single[:, 299] = -3e38
    assert kept(single, (1.0, 5, 0.5, 0.1), (1.0, ALL, 0.5, 0.0), (1e-6, 2, 1.0, 0.0)) == [1, 1, 1]


def test_other_rows_stay_as_they_are() -> None:
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(0))
    got = logits.clone()
    by_selection(got, torch.tensor([2]), *columns((1.0, 3, 1.0, 0.0)))
    assert torch.equal(got[[0, 1, 3]], logits[[0, 1, 3]]) and int((got[2] > -math.inf).sum()) == 3


def test_a_vocabulary_that_sglang_has_padded_is_filtered() -> None:
    """Its logits are a part of wider rows."""
    padded = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    logits = SGLangForward.logits(cast(Any, None), padded[:, :50])
    by_selection(logits, torch.arange(3), *columns(*[(1.0, 3, 1.0, 0.0)] * 3))
    assert (logits > -math.inf).sum(dim=1).tolist() == [3, 3, 3]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_end_nothing(value: float) -> None:
    both = (1.0, 3, 0.5, 0.0), (0.7, ALL, 0.9, 0.1)
    by_selection(torch.full((2, 500), value), torch.arange(2), *columns(*both))
