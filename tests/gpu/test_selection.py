"""The device's selection gives what the numpy policies give, on random trees with ties and odd shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaserve.cuda import selection as device
from adaserve.cuda.selection import Kept, TreeGrid
from adaserve.scheduler import calibration
from adaserve.scheduler import selection as host
from adaserve.scheduler.interface import CandidateTrees, IterationPlan, RunningBatch, Selection
from adaserve.scheduler.latency import default_latency
from adaserve.scheduler.policies import PolicyConfig
from adaserve.scheduler.policies.priced import PricedPolicy

PROBABILITY = st.one_of(st.sampled_from([1.0, 0.5, 0.25, 0.0]), st.floats(1e-6, 1.0))


@st.composite
def forests(draw: st.DrawFn, max_rows: int = 6, max_nodes: int = 12) -> CandidateTrees:
    """Rows of different size, some empty; many probabilities are equal, some rise above their parent's."""
    start, parent, depth, logprob = [0], [], [], []
    for _ in range(draw(st.integers(1, max_rows))):
        size = draw(st.integers(0, max_nodes))
        own: list[tuple[int, int, float]] = []
        for i in range(size):
            above = draw(st.integers(-1, i - 1))
            step = draw(PROBABILITY)
            with np.errstate(divide="ignore"):
                path = np.log(step) + (0.0 if above < 0 else own[above][2])
            if draw(st.integers(0, 15)) == 0:  # rounding, or a broken draft
                path = min(0.0, path + 0.3) if np.isfinite(path) else path
            own.append((above, 1 if above < 0 else own[above][1] + 1, path))
        order = sorted(range(size), key=lambda i: own[i][1])
        place = {old: new for new, old in enumerate(order)}
        parent += [place[own[i][0]] if own[i][0] >= 0 else -1 for i in order]
        depth += [own[i][1] for i in order]
        logprob += [own[i][2] for i in order]
        start.append(len(parent))
    m = len(parent)
    return CandidateTrees(
        np.array(start), np.zeros(m, np.int64), np.array(parent, np.int64), np.array(depth, np.int64),
        np.array(logprob, np.float64),
    )  # fmt: skip


def places(trees: CandidateTrees) -> tuple[np.ndarray, np.ndarray]:
    """Row and place in the row of every node."""
    row = host.row_of(trees)
    return row, np.arange(trees.n_nodes) - trees.row_start[row]


def grid_of(trees: CandidateTrees, values: np.ndarray, fill: float = 0) -> torch.Tensor:
    """Flat per-node values as a padded grid."""
    sizes = np.diff(trees.row_start)
    grid = np.full((trees.n_rows, int(sizes.max(initial=0))), fill, values.dtype)
    grid[places(trees)] = values
    return torch.from_numpy(grid)


def to_device(trees: CandidateTrees) -> TreeGrid:
    return TreeGrid(
        parent=grid_of(trees, trees.parent, -1),
        depth=grid_of(trees, trees.depth),
        logprob=grid_of(trees, trees.logprob, np.nan),
        size=torch.from_numpy(np.diff(trees.row_start)),
        deepest=int(trees.depth.max(initial=0)),
    )


def assert_equal(trees: CandidateTrees, kept: Kept, right: Selection) -> None:
    assert kept.counts.tolist() == right.counts.tolist()
    assert kept.slo_counts.tolist() == right.slo_counts.tolist()
    assert kept.keep.numpy()[places(trees)].tolist() == right.keep.tolist()
    assert int(kept.keep.sum()) == int(right.keep.sum()), "a place without a candidate is kept"
    np.testing.assert_allclose(kept.expected.numpy(), right.expected_tokens, rtol=1e-9)


@st.composite
def cases(draw: st.DrawFn) -> tuple[CandidateTrees, np.ndarray, int, int | None, np.ndarray | None, int]:
    """Trees, needs, budget (also below n), n_max, caps and depth."""
    trees = draw(forests())
    n = trees.n_rows
    needs = st.one_of(st.floats(-5, 9), st.sampled_from([1.0, 1.5, np.inf]))
    need = np.array(draw(st.lists(needs, min_size=n, max_size=n)))
    cap = draw(st.one_of(st.none(), st.lists(st.integers(0, 6), min_size=n, max_size=n)))
    return (
        trees, need, draw(st.integers(0, 2 * n + 20)), draw(st.one_of(st.none(), st.integers(1, 6))),
        None if cap is None else np.array(cap), draw(st.integers(1, 8)),
    )  # fmt: skip


def tensor(values: np.ndarray | None) -> torch.Tensor | None:
    return None if values is None else torch.from_numpy(values)


@settings(max_examples=400, deadline=None)
@given(cases(), st.booleans())
def test_two_phases(case: tuple, slo_phase: bool) -> None:
    trees, need, budget, n_max, cap, depth = case
    f = host.path_probability(trees)
    right = host.two_phase(trees, f, need, depth, budget, n_max, cap, slo_phase=slo_phase)
    kept = device.two_phase(
        to_device(trees), grid_of(trees, f), torch.from_numpy(need), depth, budget, n_max, tensor(cap),
        slo_phase=slo_phase,
    )  # fmt: skip
    assert_equal(trees, kept, right)
    assert host.parent_kept(trees, right.keep)[right.keep].all()


@settings(max_examples=150, deadline=None)
@given(cases())
def test_equal_share(case: tuple) -> None:
    trees, _, budget, _, cap, _ = case
    f = host.path_probability(trees)
    right = host.equal_share(trees, f, budget, cap)
    assert_equal(trees, device.equal_share(to_device(trees), grid_of(trees, f), budget, tensor(cap)), right)


@settings(max_examples=100, deadline=None)
@given(forests())
def test_path_probabilities(trees: CandidateTrees) -> None:
    got = device.path_probability(to_device(trees)).numpy()[places(trees)]
    np.testing.assert_allclose(got, host.path_probability(trees), rtol=1e-14)


def test_nan_is_never_kept() -> None:
    trees = CandidateTrees(
        np.array([0, 2]), np.zeros(2, np.int64), np.array([-1, 0]), np.array([1, 2]), np.array([np.nan, -0.1])
    )
    grid = to_device(trees)
    f = device.path_probability(grid)
    kept = device.two_phase(grid, f, torch.tensor([5.0], dtype=torch.float64), 2, 10, None)
    assert not kept.keep.any() and kept.expected.tolist() == [1.0]


def running(n: int) -> RunningBatch:
    ones = np.ones(n, np.int64)
    return RunningBatch(
        tuple(f"r{i}" for i in range(n)), tuple("abc"[i % 3] for i in range(n)), 0.05 * ones, 0.0 * ones,
        10 * ones, 200 * ones, 100 * ones, 16 * ones, 0.0 * ones,
    )  # fmt: skip


def test_calibration_constants() -> None:
    assert (device.N_BINS, device.CEILING) == (calibration.N_BINS, calibration.CEILING)


def test_calibrated_probabilities() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        trees = random_beam(rng, n=4, d=5, w=3)
        batch = running(4)
        calibrator = calibration.Calibrator()
        for _ in range(3):  # teach it something, or all factors are 1
            accepted = rng.random(trees.n_nodes) < 0.4
            calibrator.observe(trees, np.ones(trees.n_nodes, np.bool_), accepted, batch.rids, batch.slo_class)
        right = calibrator.path_values(trees, batch.rids, batch.slo_class)
        factor = (
            calibrator.factors()[calibrator._ids(batch.slo_class)]
            * calibrator.request_factors(batch.rids)[:, None]
        )
        got = device.calibrated_probability(to_device(trees), torch.from_numpy(factor))
        np.testing.assert_allclose(got.numpy()[places(trees)], right, rtol=1e-9)
        assert not np.allclose(right, host.path_probability(trees)), "the calibration changed nothing"


def random_beam(rng: np.random.Generator, n: int, d: int, w: int) -> CandidateTrees:
    parent = np.full((n, d * w), -1)
    log = np.zeros((n, d * w))
    for column in range(d * w):
        step = column // w
        if step:
            parent[:, column] = rng.integers((step - 1) * w, step * w, n)
        above = log[np.arange(n), parent[:, column]] if step else 0.0
        log[:, column] = above + np.log(rng.beta(3, 1.5, n))
    depth = np.tile(np.repeat(np.arange(1, d + 1), w), n)
    return CandidateTrees(
        np.arange(n + 1) * d * w, np.zeros(n * d * w, np.int64), parent.ravel(), depth, log.ravel()
    )


@pytest.mark.parametrize("seed", range(40))
def test_priced(seed: int) -> None:
    """The policy's own selection, fed with the same values and predictions."""
    rng = np.random.default_rng(seed)
    n, d, w = int(rng.integers(1, 20)), int(rng.integers(1, 6)), int(rng.integers(1, 4))
    trees = random_beam(rng, n, d, w)
    policy = PricedPolicy("priced", PolicyConfig(latency=default_latency()))
    batch = running(n)
    budget = int(rng.integers(n, n * (1 + d * w) + 2))
    cap = rng.integers(0, d + 1, n) if seed % 3 == 0 else None
    plan = IterationPlan(
        0, 0.0, batch, np.ones(n), d, w, budget, weight=rng.uniform(0.5, 2.5, n), cap=cap
    )
    f = policy.values(plan, trees)
    seconds = torch.from_numpy(policy._seconds(plan, trees, trees.n_nodes))
    right = policy.select(plan, trees)
    grid = to_device(trees)
    assert plan.weight is not None
    kept = device.priced(
        grid, grid_of(trees, f), torch.from_numpy(plan.weight), seconds, budget, tensor(cap)
    )
    assert_equal(trees, kept, right)
