"""Speedups at long contexts against the formula and brute force."""

from __future__ import annotations

import pytest

from adaserve.bench.context.speedup import Drafting, best, inflection, rises, speedup
from adaserve.scheduler.costs.latency import ForwardCost

TARGET = ForwardCost(1e-2, per_token_s=1e-4, per_context_s=2e-7, per_pair_s=1e-8)
SELF = Drafting("self", TARGET, 0.8, window=256)


def test_the_formula() -> None:
    got = speedup(TARGET, SELF, n=2, length=10_000, depth=3)
    plain = 1e-2 + 2e-4 + 2e-7 * 20_000 + 1e-8 * 20_000
    step = 1e-2 + 2e-4 + (2e-7 + 1e-8) * 2 * 260
    verify = 1e-2 + 8e-4 + 2e-7 * 20_000 + 1e-8 * 80_000
    assert (got.plain_s, got.draft_step_s, got.verify_s) == pytest.approx((plain, step, verify))
    assert got.tokens == pytest.approx(1 + 0.8 + 0.8**2 + 0.8**3)
    assert got.ratio == pytest.approx(got.tokens * plain / (3 * step + verify))


def test_the_best_depth_grows_where_the_cache_dominates() -> None:
    short, long = (best(TARGET, SELF, 8, length).depth for length in (256, 65_536))
    assert short == 1 < long
    every = [speedup(TARGET, SELF, 8, 65_536, k).ratio for k in range(1, 9)]
    assert best(TARGET, SELF, 8, 65_536).ratio == max(every)
    assert best(TARGET, SELF, 8, 65_536, deepest=1).depth == 1


def test_from_the_inflection_on_every_step_in_requests_pays() -> None:
    batches = (1, 4, 16)
    length = inflection(TARGET, SELF, batches)
    assert length is not None and 500 < length < 50_000
    for times, right in ((1.0, True), (4.0, True), (0.7, False)):
        ratios = [best(TARGET, SELF, n, times * length).ratio for n in batches]
        assert rises(ratios) is right


def test_the_order_of_batches_does_not_matter_and_one_alone_says_nothing() -> None:
    assert inflection(TARGET, SELF, (16, 1, 4, 4)) == inflection(TARGET, SELF, (1, 4, 16))
    assert inflection(TARGET, SELF, (1, 4)) is not None
    assert inflection(TARGET, SELF, (16,)) is None


def test_a_draft_that_reads_everything_gains_nothing_by_more_requests() -> None:
    """Its own cache grows as the target's does."""
    full = Drafting("full", ForwardCost(1e-3, per_token_s=1e-5, per_context_s=1e-7), 0.8)
    assert inflection(TARGET, full, (1, 4, 16)) is None
