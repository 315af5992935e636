"""A text that cannot fit is refused by its beginning."""

from __future__ import annotations

import pytest

from adaserve.boundary import RequestError
from adaserve.boundary.prompts import require_few, require_few_scored, require_fitting


class Counter:
    """Tokens of that many characters, and what was read to count them."""

    def __init__(self, characters: int) -> None:
        self.characters, self.read = characters, 0

    def __call__(self, text: str) -> int:
        self.read += len(text)
        return len(text) // self.characters


def test_a_long_text_is_refused_by_its_beginning() -> None:
    count = Counter(4)
    with pytest.raises(
        RequestError, match=r"10000000 characters is longer than the model's context length \(4000 tokens\)"
    ):
        require_fitting("x" * 10_000_000, 4000, count)
    assert count.read == 64_000


def test_what_may_fit_is_read_on_and_let_through() -> None:
    """A context full of tokens of 100 characters, such as spaces."""
    count = Counter(100)
    require_fitting(" " * 400_000, 4000, count)
    with pytest.raises(RequestError):
        require_fitting(" " * 4_000_000, 4000, count)
    require_fitting("x" * 65_000, 4000, Counter(15))  # 4,333 tokens, but a word that is cut has some more


def test_a_text_of_usual_length_is_not_read_twice() -> None:
    count = Counter(1)
    require_fitting("x" * 64_000, 4000, count)
    assert count.read == 0


def test_many_texts_at_once_may_hold_so_much() -> None:
    require_few("items", ["x" * 1000] * 1000, 4000)
    require_few("items", ["x" * 4_000_000], 1_000_000)
    with pytest.raises(
        RequestError, match="items may hold at most 1048576 characters or ids in all, got 1100000"
    ):
        require_few("items", ["x" * 1000] * 1100, 4000)


@pytest.mark.parametrize(("prompts", "size"), [(4097, 5000), (10, 1 << 23)])
def test_a_request_becomes_so_many_prompts(prompts: int, size: int) -> None:
    require_few_scored("items", 4096, 1 << 22)
    with pytest.raises(RequestError, match="items: a request may become at most 4096 prompts and 4194304"):
        require_few_scored("items", prompts, size)
