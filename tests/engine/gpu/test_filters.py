"""Which tokens filters keep: the rule written out, and the GPU's kernel against the sort."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import Tensor

from adaserve.engine.logits import filters, portions
from tests.engine.gpu.scripts import python

ALL = 1 << 30  # SGLang's top_k of those who ask for none
CPU = torch.device("cpu")


def columns(*asked: tuple[float, int, float, float]) -> list[Tensor]:
    kinds = (torch.float32, torch.int64, torch.float32, torch.float32)
    return [
        torch.tensor(values, dtype=kind) for values, kind in zip(zip(*asked, strict=True), kinds, strict=True)
    ]


def written_out(row: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Tokens that are kept, by the rule as its text says it."""
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    likely = [math.exp((row[token] - max(row)) / temperature) for token in order]
    kept = set()
    for rank, token in enumerate(order):
        few = sum(likely[:rank]) <= top_p * sum(likely) or top_p >= 1
        if rank < top_k and few and likely[rank] >= min_p:
            kept.add(token)
    return kept


@pytest.mark.parametrize("seed", range(4))
def test_the_sort_keeps_what_the_rule_says(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of few values, so that many are equal; in portions, and only in the rows that are named."""
    monkeypatch.setattr(portions, "MAX_VALUES", 16)
    monkeypatch.setattr(portions, "ALIGNED_ROWS", 2)
    logits = torch.randint(-6, 6, (9, 40), generator=torch.Generator().manual_seed(seed)).float() / 2
    asked = [
        (1.0, 7, 1.0, 0.0),
        (0.7, ALL, 0.55, 0.0),
        (2.0, ALL, 1.0, 0.1),
        (1.0, 9, 0.6, 0.02),
        (1.0, 1, 1.0, 0.0),
    ]
    filtered, at = logits.clone(), torch.tensor([7, 0, 3, 4, 8])
    filters.by_sort(filtered, at, *columns(*asked))
    for row, settings in zip(at.tolist(), asked, strict=True):
        right = written_out(logits[row].tolist(), *settings)
        assert set((filtered[row] > -math.inf).nonzero().flatten().tolist()) == right, settings
    others = [1, 2, 5, 6]
    assert torch.equal(filtered[others], logits[others])


def test_sums_that_are_rounded_drop_nothing() -> None:
    """With top_p 1 the probabilities before the last tokens may add up to more than 1."""
    logits = 6 * torch.randn(16, 100_000, generator=torch.Generator().manual_seed(0))
    filters.by_sort(logits, torch.arange(16), *columns(*[(1.0, 99_999, 1.0, 0.0)] * 16))
    assert (logits > -math.inf).sum(1).tolist() == [99_999] * 16


KERNEL = """
import torch
from adaserve.engine.gpu.filter_kernel import BLOCK, filter_fused
from adaserve.engine.logits.filters import by_sort, differences, examples
from tests.engine.gpu.test_filters import ALL, columns

def same(logits, *asked):
    every, right, got = torch.arange(len(asked)), logits.float(), logits.clone()
    by_sort(right, every, *columns(*asked))
    filter_fused(got, every, *columns(*asked))
    assert got.dtype == logits.dtype and torch.equal(got.float(), right), asked
    return (right > -torch.inf).sum(1).tolist()

generator = torch.Generator().manual_seed(0)
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    logits = (5 * torch.randn(8, BLOCK + 100, generator=generator)).to(dtype)  # 16 bits: many are equal
    logits[4:, ::3] = -torch.inf
    asked = [(1.0, 50, 1.0, 0.0), (0.8, ALL, 0.9, 0.0), (1.5, ALL, 1.0, 0.05), (0.7, 40, 0.95, 0.01)]
    kept = same(logits, *asked, *asked)
    assert kept[0] == kept[4] == 50 and max(kept[1:4]) < 1000, kept
    odd = [(1.0, 1, 1.0, 0.0), (1.0, ALL, 1e-6, 0.0), (1.0, BLOCK + 99, 1.0, 0.0), (1.0, ALL, 1.0, 1.0)]
    assert same(logits, *odd, *odd)[0] == 1

# All equal: the first ones, across blocks too; rows of which a grammar leaves one token; the least numbers.
flat = torch.full((5, 2 * BLOCK + 5), -1.5)
assert same(flat, (1.0, BLOCK + 9, 1.0, 0.0), (1.0, ALL, 0.75, 0.0), (1.0, 1, 1.0, 0.0),
            (1.0, ALL, 1e-9, 0.0), (0.5, ALL, 1.0, 1.0))[:4] == [BLOCK + 9, int(1.5 * BLOCK + 3.75) + 1, 1, 1]
single = torch.full((2, 300), -torch.inf)
single[:, 299] = -3e38
assert same(single, (1.0, 5, 0.5, 0.1), (1.0, ALL, 0.5, 0.0)) == [1, 1]
signs = torch.zeros(3, 300)
signs[:, ::2] = -0.0
signs[:, 5], signs[:, 7], signs[:, 9] = 1e-45, -1e-45, -3e38
same(signs, (1.0, 4, 1.0, 0.0), (1.0, 290, 1.0, 0.0), (1.0, 299, 1.0, 0.0))

# Other rows stay as they are; logits that are no numbers end, too.
logits = torch.randn(4, 500, generator=generator)
got = logits.clone()
filter_fused(got, torch.tensor([2]), *columns((1.0, 3, 1.0, 0.0)))
assert torch.equal(got[[0, 1, 3]], logits[[0, 1, 3]]) and int((got[2] > -torch.inf).sum()) == 3
both = (1.0, 3, 0.5, 0.0), (1.0, 3, 1.0, 0.0)
filter_fused(torch.full((2, 500), torch.nan), torch.arange(2), *columns(*both))
filter_fused(torch.full((1, 500), torch.inf), torch.arange(1), *columns((1.0, 3, 0.5, 0.0)))
assert differences(filter_fused, *examples(8, 9000, torch.device("cpu"))).tolist() == [0] * 8
"""


def test_the_kernel_keeps_what_the_sort_keeps() -> None:
    """In Triton's interpreter; ties, rows of one value, masked tokens and types of 16 bits among them."""
    python(KERNEL, interpret=True)


COMPILED = """
import torch
from adaserve.engine.gpu.filter_kernel import BLOCK, WARPS, _filter_row
from tests.engine.gpu.compiling import compiled, compiles_once, kind_of

logits, cases = torch.zeros(4, 1024), []
for start in (0, 1):  # at the start of 64 bytes, and behind one number
    floats, ints = torch.zeros(64)[start:], torch.zeros(64, dtype=torch.int64)[start:]
    cases.append((logits, ints, floats, ints, floats, floats, 128_256, BLOCK))
assert compiles_once(_filter_row, *cases)
made = compiled(_filter_row, kind_of(_filter_row, *cases[0]), num_warps=WARPS)
assert made.asm["ptx"].count("ld.global.v4") >= 4, "logits are read in large words"
"""


def test_the_kernel_compiles_once_for_hopper() -> None:
    """A request that filters would wait for a compiler otherwise."""
    python(COMPILED, interpret=False)


def test_a_kernel_that_is_wrong_or_does_not_compile_leaves_the_sort(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Tensor) -> None:
        raise RuntimeError("one\nptxas is missing")

    def keeps_one_more(logits: Tensor, at: Tensor, temperature: Tensor, top_k: Tensor, *rest: Tensor) -> None:
        filters.by_sort(logits, at, temperature, top_k + 1, *rest)

    def right(*given: Tensor) -> None:
        filters.by_sort(*given)

    with caplog.at_level(logging.WARNING):
        for wrong in (broken, keeps_one_more):
            assert filters.checked(wrong, 3000, CPU) is filters.by_sort
        assert "ptxas is missing" in caplog.messages[0] and "2 of 8 examples" in caplog.messages[1]
        assert filters.checked(right, 3000, CPU) is right and len(caplog.messages) == 2
