"""The compiled loops of the gate against what they say, written out plainly."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from adaserve.scheduler.admission.gate_loops import (
    PER_LOST,
    admitted,
    each_prefill_s,
    group_ends,
    headroom,
    one_prefill_s,
)

CHUNK = 64
SIZES = np.array([1, 8, 20, CHUNK])
SECONDS = np.array([0.010, 0.012, 0.020, 0.050])
prompts = st.lists(st.integers(1, 12) | st.integers(1, 3 * CHUNK), max_size=24)  # small ones share a forward
shares = st.floats(0.0, 1.0)


def plain_prefill_s(tokens: int) -> float:
    whole, rest = divmod(tokens, CHUNK)
    return whole * SECONDS[-1] + float(np.interp(rest, [0, *SIZES], [0.0, *SECONDS]))


def plain_groups(left: list[int], lost: list[bool], enough: float) -> list[list[int]]:
    found: list[list[int]] = []
    for i, more in enumerate(left):
        tokens = sum(left[k] for k in found[-1]) if found else 0
        if not found or tokens >= enough or tokens + more > CHUNK or lost[i] != lost[i - 1]:
            found.append([])
        found[-1].append(i)
    return [g for group in found for g in ([group] if len(group) >= PER_LOST else [[i] for i in group])]


def plain_headroom(left_s, iterations, cycle_s, joining: int, more_s: float, spared: int) -> float:
    each_s = cycle_s[min(joining, len(cycle_s) - 1)]
    room = [a / (b * each_s + more_s) for a, b in zip(left_s, iterations, strict=True)]
    return sorted(room)[spared] if spared < len(room) else math.inf


@given(st.integers(0, 10 * CHUNK))
def test_a_prefill_takes_what_the_chunks_take(tokens: int) -> None:
    assert math.isclose(one_prefill_s(tokens, SIZES, SECONDS), plain_prefill_s(tokens), abs_tol=1e-12)
    each = each_prefill_s(np.array([tokens, 1]), SIZES, SECONDS)
    assert np.allclose(each, [plain_prefill_s(tokens), 0.010])
    one = np.array([CHUNK]), np.array([0.05])
    assert math.isclose(one_prefill_s(CHUNK // 2, *one), 0.025), "a single size"


@given(prompts, st.integers(0, 24), st.sampled_from([0.0, 30.0, math.inf]))
@example([CHUNK // 4] * 5, 5, math.inf)
def test_groups_end_where_they_are_full(left: list[int], first_lost: int, enough: float) -> None:
    lost = [i >= first_lost for i in range(len(left))]
    ends = group_ends(np.array(left, np.int64), np.array(lost, np.bool_), enough, CHUNK)
    plain = plain_groups(left, lost, enough)
    assert ends.tolist() == np.cumsum([len(group) for group in plain]).tolist()


@given(prompts, st.data(), st.sampled_from([0.0, 30.0, math.inf]), st.integers(0, 6))
def test_groups_are_judged_one_after_the_other(
    left: list[int], data: st.DataObject, enough: float, running: int
) -> None:
    encode_s = data.draw(st.lists(st.sampled_from([0.0, 0.05]), min_size=len(left), max_size=len(left)))

    def drawn(n: int, scale: float) -> list[float]:
        return [scale * x for x in data.draw(st.lists(shares, min_size=n, max_size=n))]

    needed = [data.draw(st.sampled_from([0.0, 0.8, 1.1, 1.5])) for _ in left]
    left_s, iterations = drawn(running, 2.0), [1 + x for x in drawn(running, 30.0)]
    cycle_s = np.cumsum([0.01, *drawn(data.draw(st.integers(0, 8)), 0.005)]).tolist()
    judged = [i for i, least in enumerate(needed) if least]
    tokens = [left[i] for i in judged]
    groups = plain_groups(tokens, [False] * len(tokens), enough)
    expected, closed = [not least for least in needed], math.inf
    for group in groups:
        rows = [judged[k] for k in group]
        more, least = sum(left[i] for i in rows), min(needed[i] for i in rows)
        started = sum(n for n, starts in zip(left, expected, strict=True) if starts)
        encoding_s = sum(s for i, s in enumerate(encode_s) if expected[i] or i in rows)
        room = plain_headroom(
            left_s, iterations, cycle_s, sum(expected) + len(rows),
            plain_prefill_s(started + more) + encoding_s, len(rows) // PER_LOST,
        )  # fmt: skip
        waits = room < least or (least >= closed and more < enough)
        for i in rows:
            expected[i] = not waits
        if waits and len(rows) > 1:
            closed = min(closed, least)
    stakes = [np.array(x, np.float64) for x in (left_s, iterations, cycle_s)]
    ends = np.cumsum([len(group) for group in groups], dtype=np.int64)
    found = admitted(
        np.array(left, np.int64), np.array(encode_s), np.array(needed, np.float64), ends, enough, SIZES,
        SECONDS, *stakes,
    )  # fmt: skip
    assert found.tolist() == expected


def test_a_group_that_waits_keeps_back_smaller_ones_that_need_as_much() -> None:
    """The third would fit, but may not overtake the first two. The fourth is large, the fifth needs less."""
    left, needed = np.array([20, 44, 10, 30, 1]), np.array([1.1, 1.1, 1.1, 1.1, 0.8])
    stakes = np.array([0.16]), np.array([10.0]), np.array([0.01])
    found = admitted(left, np.zeros(5), needed, np.array([2, 3, 4, 5]), 30.0, SIZES, SECONDS, *stakes)
    assert found.tolist() == [False, False, False, True, True]
    assert admitted(left[2:], np.zeros(3), needed[2:], np.array([1]), 30.0, SIZES, SECONDS, *stakes)[0]


def test_nothing_at_stake_is_room_without_end() -> None:
    left_s, iterations, cycle_s = np.array([1.0, 2.0]), np.array([10.0, 10.0]), np.array([0.02, 0.03, 0.04])
    assert headroom(left_s, iterations, cycle_s, 1, 0.1, 0) == 1.0 / (10 * 0.03 + 0.1)
    assert headroom(left_s, iterations, cycle_s, 5, 0.1, 1) == 2.0 / (10 * 0.04 + 0.1)
    assert headroom(left_s, iterations, cycle_s, 1, 0.1, 2) == math.inf
