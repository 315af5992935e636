"""Sampled output has the distribution of the server without speculation."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.chi_square import two_sample_p
from tests.engine.conftest import Served
from tests.engine.harness import Job, Server, run_jobs

PROMPT = [5, 17, 33, 99, 250]
SAMPLES = 1500
CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top-p": {"temperature": 1.0, "top_p": 0.6},
    "top-k": {"temperature": 1.2, "top_k": 4},
    "min-p": {"temperature": 1.0, "min_p": 0.2},
    "all": {"temperature": 0.9, "top_p": 0.8, "top_k": 8, "min_p": 0.05},
}
SMALLEST_P = 1e-4
"""Both modes and all cases make about 30 comparisons: a sound engine fails one of them with 0.3%."""


def sample(server: Server, params: dict[str, Any]) -> list[tuple[int, ...]]:
    """The first five tokens of many samples of one prompt, in a few large batches."""
    out: list[tuple[int, ...]] = []
    for _ in range(3):
        body = {
            "input_ids": [PROMPT] * (SAMPLES // 3),
            "sampling_params": {"max_new_tokens": 5, "ignore_eos": True, **params},
        }
        out += [tuple(a["output_ids"]) for a in server.generate(**body)]
    return out


@pytest.fixture(scope="session")
def without(stock: Server) -> dict[str, list[tuple[int, ...]]]:
    return {name: sample(stock, params) for name, params in CASES.items()}


@pytest.mark.parametrize("case", CASES)
def test_distribution(served: Served, without: dict[str, list[tuple[int, ...]]], case: str) -> None:
    got, right = sample(served.server, CASES[case]), without[case]
    for tokens in (slice(0, 2), slice(1, 3), slice(2, 3), slice(3, 5), slice(4, 5)):
        p = two_sample_p([t[tokens] for t in got], [t[tokens] for t in right])
        assert p > SMALLEST_P, (case, tokens, p)
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
