"""Sampled output has the distribution of the server without speculation."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.chi_square import two_sample_p
from tests.engine.conftest import Served
from tests.engine.harness import Job, Server, run_jobs

PROMPT = [5, 17, 33, 99, 250]
SAMPLES = 1000
CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top-p": {"temperature": 1.0, "top_p": 0.6},
    "top-k": {"temperature": 1.2, "top_k": 4},
    "min-p": {"temperature": 1.0, "min_p": 0.2},
    "all": {"temperature": 0.9, "top_p": 0.8, "top_k": 8, "min_p": 0.05},
}
OFTEN = ("temperature", "all")
"""What every run of the tests compares; the others, one filter each, take minutes."""
SUSPICIOUS_P, SMALLEST_P = 1e-3, 1e-4
"""A case with a suspicious comparison is made again on twice as many fresh samples, which must not be worse.

Both modes and all cases make 50 comparisons: one run in twenty of a sound engine repeats a case, one in
40,000 fails."""


def sample(server: Server, params: dict[str, Any]) -> list[tuple[int, ...]]:
    """The first five tokens of many samples of one prompt, in a few large batches."""
    out: list[tuple[int, ...]] = []
    for _ in range(2):
        body = {
            "input_ids": [PROMPT] * (SAMPLES // 2),
            "sampling_params": {"max_new_tokens": 5, "ignore_eos": True, **params},
        }
        out += [tuple(a["output_ids"]) for a in server.generate(**body)]
    return out


class Without(dict[str, list[tuple[int, ...]]]):
    """Samples of the server without speculation, by case, each made when it is first asked for."""

    def __init__(self, stock: Server) -> None:
        super().__init__()
        self._stock = stock

    def __missing__(self, case: str) -> list[tuple[int, ...]]:
        self[case] = sample(self._stock, CASES[case])
        return self[case]


@pytest.fixture(scope="session")
def without(stock: Server) -> Without:
    return Without(stock)


def comparisons(got: list[tuple[int, ...]], right: list[tuple[int, ...]]) -> dict[tuple[int, int], float]:
    """Which tokens -> p-value that they have the same distribution."""
    places = ((0, 2), (1, 3), (2, 3), (3, 5), (4, 5))
    return {(a, b): two_sample_p([t[a:b] for t in got], [t[a:b] for t in right]) for a, b in places}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in OFTEN else [pytest.mark.slow]) for c in CASES]
)
def test_distribution(served: Served, stock: Server, without: Without, case: str) -> None:
    got, right = sample(served.server, CASES[case]), without[case]
    if min(comparisons(got, right).values()) < SUSPICIOUS_P:
        more, right = ([t for _ in range(2) for t in sample(s, CASES[case])] for s in (served.server, stock))
        again = comparisons(more, right)
        assert min(again.values()) > SMALLEST_P, (case, comparisons(got, without[case]), again)
    assert len({t[2] for t in right}) > 5, "nearly deterministic: the comparison says nothing"


def test_greedy_and_sampled_requests_share_a_batch(served: Served, stock: Server) -> None:
    greedy = [
        Job((i, 30 + i), {"temperature": 0, "max_new_tokens": 30, "ignore_eos": True}) for i in range(12)
    ]
    sampled = [Job((i, 60 + i), {"temperature": 1, "top_p": 0.9, "max_new_tokens": 30}) for i in range(12)]
    mixed = [job for two in zip(greedy, sampled, strict=True) for job in two]
    got = run_jobs(served.server, mixed)[::2]
    for a, b in zip(got, run_jobs(stock, greedy), strict=True):
        assert a is not None and b is not None and a["output_ids"] == b["output_ids"]
