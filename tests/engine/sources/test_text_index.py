"""The index of earlier text against a search through everything, and its memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaserve.engine.sources.text_index import _SHIFT, BYTES_PER_TOKEN, ORDERS, Text, TextIndex

Step = tuple[int, list[int]]


Place = tuple[int, int]


def latest(texts: dict[int, list[int]], order: list[Place], end: list[int]) -> Place | None:
    """(text, position) that was continued last among the places where ``end`` ends and something follows."""
    for name, position in reversed(order):
        tokens = texts.get(name, [])
        if tokens[max(0, position + 1 - len(end)) : position + 1] == end and position + 1 >= len(end):
            return name, position
    return None


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), max_size=40)), max_size=12),
    gone=st.sets(st.integers(0, 2), max_size=1),
)
def test_matches_are_those_of_a_search_through_everything(steps: list[Step], gone: set[int]) -> None:
    index = TextIndex()
    texts = {name: index.start() for name in range(3)}
    plain: dict[int, list[int]] = {name: [] for name in range(3)}
    continued: list[tuple[int, int]] = []  # places in the order in which a token followed them
    for name, new in steps:
        index.extend(texts[name], new)
        for token in new:
            if plain[name]:
                continued.append((name, len(plain[name]) - 1))
            plain[name].append(token)
    names = {id(text): name for name, text in texts.items()}
    for name in range(3):
        expected: list[tuple[int, int, int]] = []
        for order in range(len(ORDERS) - 1, -1, -1):
            end = plain[name][-ORDERS[order] :]
            place = latest(plain, continued, end) if len(end) == ORDERS[order] else None
            if place is not None and place not in [p[1:] for p in expected]:
                expected.append((order, *place))
        got = [(m.order, names[id(m.text)], m.position) for m in index.matches(texts[name])]
        assert got == expected
    for name in gone:
        index.remove(texts[name])
        for other in {0, 1, 2} - gone:
            for match in index.matches(texts[other]):
                assert names[id(match.text)] not in gone
                end = ORDERS[match.order]
                before = plain[names[id(match.text)]][: match.position + 1]
                assert before[-end:] == plain[other][-end:]


def grown(index: TextIndex, tokens: list[int]) -> Text:
    text = index.start()
    index.extend(text, tokens)
    return text


@pytest.mark.parametrize(
    ("tokens", "own", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], True, [4, 5, 1, 2, 3, 4, 5, 1]),  # goes round
        ([7, 8, 9, 7, 8, 9, 7, 8, 9], True, [7, 8, 9, 7, 8, 9, 7, 8]),
        ([1, 2, 3, 4, 5, 1, 2, 3], False, [4, 5, 1, 2, 3]),  # as if of another request: its end is the end
    ],
)
def test_a_continuation_repeats_what_repeats(tokens: list[int], own: bool, expected: list[int]) -> None:
    index = TextIndex()
    match = index.matches(grown(index, tokens))[0]
    assert match.continuation(8, own) == expected


def test_the_longest_match_comes_first() -> None:
    index = TextIndex()
    long, short = list(range(10, 18)), [15, 16, 17]
    grown(index, [*long, 1])
    grown(index, [*short, 2])
    matches = index.matches(grown(index, long))
    assert [m.continuation(1, own=False) for m in matches] == [[1], [2]]


def test_another_context_of_the_same_hash_is_no_match() -> None:
    index = TextIndex()
    other, text = grown(index, [5, 6, 7, 8, 9]), grown(index, [1, 2, 3])
    index._latest[text.hashes[0][-1]] = (other.number << _SHIFT) + 3
    assert index.matches(text) == []
    index._latest[text.hashes[0][-1]] = index._latest[other.hashes[0][2]]
    index.extend(text, [5, 6, 7])
    assert [m.position for m in index.matches(text)] == [2]


@pytest.mark.parametrize(("count", "length"), [(20_000, 1000), (3000, 250)])
def test_memory_stays_within_what_a_token_is_counted_for(count: int, length: int) -> None:
    """Also where a dictionary has six times the room that it needs."""
    tokens = np.random.default_rng(0).integers(0, 100_000, 2 * count).tolist()
    tracemalloc.start()
    try:
        index = TextIndex()
        texts = [grown(index, tokens[i : i + length]) for i in range(0, count, length)]
        for i in range(count, 2 * count, length):  # as many again in place of the old
            index.remove(texts.pop(0))
            texts.append(grown(index, tokens[i : i + length]))
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert used < count * BYTES_PER_TOKEN
    assert used > count * BYTES_PER_TOKEN / 4, "counted for far more than it needs"
    for text in texts:
        index.remove(text)
    assert len(index) == 0 and not index.matches(index.start())
