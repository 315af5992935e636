"""Pricing in C buys what plain Python buys."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from adaserve.bench.selection import example_trees
from adaserve.engine.host.pricing import NativePricing, native_pricing
from adaserve.scheduler.calibration import N_BINS, Calibrator
from adaserve.scheduler.interface import CandidateTrees, FloatArray, IntArray
from adaserve.scheduler.pricing import Priced, price_nodes
from adaserve.scheduler.selection import parent_kept, within_cap


@pytest.fixture(scope="module")
def native() -> NativePricing:
    found = native_pricing()
    if found is None:
        pytest.skip("no C compiler")
    return found


def uneven(trees: CandidateTrees, rows: list[int]) -> CandidateTrees:
    """``trees`` without the candidates of ``rows``."""
    size = np.diff(trees.row_start)
    stays = ~np.isin(np.repeat(np.arange(len(size)), size), rows)
    size[rows] = 0
    start = np.concatenate([[0], np.cumsum(size)])
    columns = (trees.token, trees.parent, trees.depth, trees.logprob)
    return CandidateTrees(start, *(c[stays] for c in columns))


class Fixed(Calibrator):
    """A calibrator whose factors are given."""

    def __init__(self, factors: FloatArray) -> None:
        super().__init__()
        self.given = factors

    def batch_factors(self, rids: object, classes: object) -> FloatArray:
        return self.given


def in_python(
    trees: CandidateTrees, factors: FloatArray, weight: FloatArray, cap: IntArray | None, seconds: FloatArray
) -> Priced:
    f = Fixed(factors).few_path_values(trees, ("",) * trees.n_rows, ("",) * trees.n_rows)
    return price_nodes(trees, within_cap(trees, np.array(f), cap).tolist(), weight, seconds)


@settings(max_examples=300)
@example(n=1, depth=1, width=1, seed=0, odd=0.0, flat=False, capped=False, share=0.0)
@example(n=5, depth=4, width=3, seed=3, odd=0.3, flat=True, capped=True, share=1.0)
@given(
    n=st.integers(1, 40),
    depth=st.integers(1, 8),
    width=st.integers(1, 4),
    seed=st.integers(0, 10_000),
    odd=st.sampled_from([0.0, 0.0, 0.1]),
    flat=st.booleans(),
    capped=st.booleans(),
    share=st.sampled_from([0.0, 0.2, 1.0]),
)
def test_c_buys_what_python_buys(
    native: NativePricing,
    n: int,
    depth: int,
    width: int,
    seed: int,
    odd: float,
    flat: bool,
    capped: bool,
    share: float,
) -> None:
    """Ties (``flat``), NaN and impossible nodes, limited depths, rows without candidates, B that binds."""
    rng = np.random.default_rng(seed)
    trees = example_trees(n, depth, width, seed)
    if flat:
        trees.logprob[:] = np.round(trees.logprob)
    trees.logprob[rng.random(trees.n_nodes) < odd] = rng.choice([math.nan, -math.inf])
    trees = uneven(trees, [int(r) for r in np.flatnonzero(rng.random(n) < odd)])
    if not trees.n_nodes:
        return
    factors = rng.uniform(0.3, 1.5, (n, N_BINS + 1)) if not flat else np.ones((n, N_BINS + 1))
    weight = np.round(rng.uniform(0.25, 4, n), 0 if flat else 9) + 0.25
    cap = rng.integers(0, depth + 1, n) if capped else None
    most = int(share * trees.n_nodes)
    seconds = 0.01 + rng.uniform(1e-4, 2e-3) * np.maximum(0, np.arange(most + 1) + n - rng.integers(0, 12))
    got, want = (price(trees, factors, weight, cap, seconds) for price in (native, in_python))
    assert np.array_equal(got.keep, want.keep)
    assert got.counts.tolist() == want.counts.tolist()
    assert got.expected.tolist() == want.expected.tolist()
    assert np.array_equal(got.f, want.f) and np.array_equal(got.value, want.value)
    assert (got.rate, got.price) == pytest.approx((want.rate, want.price), rel=1e-12)
    assert parent_kept(trees, got.keep)[got.keep].all()


def test_room_grows_with_the_batch_and_results_stay(native: NativePricing) -> None:
    """More rows and nodes than it was made for; what an earlier call returned is not written over."""
    small = example_trees(2, 3, 2, 0)
    args = (np.ones((2, N_BINS + 1)), np.ones(2), None, 0.01 + 1e-4 * np.arange(small.n_nodes + 1))
    first = native(small, *args)
    before = [np.array(x) for x in (first.keep, first.counts, first.expected, first.f, first.value)]
    large = example_trees(300, 8, 4, 1)
    ones = np.ones((300, N_BINS + 1))
    seconds = 0.01 + 1e-6 * np.arange(large.n_nodes + 1)
    got = native(large, ones, np.ones(300), None, seconds)
    assert np.array_equal(got.keep, in_python(large, ones, np.ones(300), None, seconds).keep)
    after = (first.keep, first.counts, first.expected, first.f, first.value)
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    again = native(small, *args)
    assert np.array_equal(again.keep, first.keep)
