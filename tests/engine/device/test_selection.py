"""The device's selection gives what the numpy policies give, on random trees with ties and odd shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaserve.engine.device import selection as device
from adaserve.engine.device.choose import choose
from adaserve.engine.device.selection import Kept, TreeGrid
from adaserve.scheduler import calibration
from adaserve.scheduler import selection as host
from adaserve.scheduler.interface import CandidateTrees, IterationPlan, Policy, RunningBatch, Selection
from adaserve.scheduler.latency import default_latency
from adaserve.scheduler.policies import PolicyConfig, build_policy
from adaserve.scheduler.policies.base import BasePolicy
from adaserve.scheduler.policies.paper import AdaServePolicy

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


def taught(rng: np.random.Generator, n: int) -> calibration.Calibrator:
    """A calibration that has seen a few hundred tests, or all its factors would be 1."""
    batch, calibrator = running(n), calibration.Calibrator()
    q, row = rng.random(300), rng.integers(0, n, 300)
    calibrator.observe(q, row, rng.random(300) < 0.6 * q, batch.rids, batch.slo_class)
    return calibrator


def test_calibrated_probabilities() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        trees, batch = random_beam(rng, n=4, d=5, w=3), running(4)
        calibrator = taught(rng, 4)
        right = calibrator.path_values(trees, batch.rids, batch.slo_class)
        factor = calibrator.batch_factors(batch.rids, batch.slo_class)
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


def choice_case(seed: int, name: str) -> tuple[Policy, IterationPlan, CandidateTrees]:
    rng = np.random.default_rng(seed)
    n, d, w = int(rng.integers(1, 20)), int(rng.integers(1, 6)), int(rng.integers(1, 4))
    policy = build_policy(name, PolicyConfig(latency=default_latency(), calibrate=seed % 2 == 0))
    assert isinstance(policy, BasePolicy)
    policy.calibrator = taught(rng, n)
    cap = rng.integers(0, d + 1, n) if seed % 3 == 0 else None
    plan = IterationPlan(
        0, 0.0, running(n), rng.uniform(0, 5, n), d, w, int(rng.integers(1, n * (1 + d * w) + 2)),
        weight=rng.uniform(0.5, 2.5, n), cap=cap, n_max=int(rng.integers(1, 5)),
    )  # fmt: skip
    return policy, plan, random_beam(rng, n, d, w)


NAMES = ["adaserve", "adaserve-v1", "global-greedy", "equal-greedy", "chain-3", "turbospec", "priced"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(15))
def test_every_policy_chooses_the_same_on_the_device(name: str, seed: int) -> None:
    """``choose`` against the policy's own ``select``; without ties, so exp may round as it likes."""
    policy, plan, trees = choice_case(seed, name)
    choice = choose(policy, plan, to_device(trees), trees.n_nodes)
    assert choice.on_host is None
    assert_equal(trees, choice.kept, policy.select(plan, trees))
    assert choice.counts.tolist() == choice.kept.counts.tolist()
    assert choice.learns_in_select == (name == "priced")


def test_a_policy_of_ones_own_selects_on_the_host() -> None:
    class Own(AdaServePolicy):
        def select(self, plan: IterationPlan, trees: CandidateTrees) -> Selection:
            return host.equal_share(trees, host.path_probability(trees), 2 * trees.n_rows)

    _, plan, trees = choice_case(1, "adaserve")
    policy = Own("own", PolicyConfig(latency=default_latency()))
    choice = choose(policy, plan, to_device(trees), trees.n_nodes)
    assert choice.on_host is not None
    assert_equal(trees, choice.kept, policy.select(plan, trees))


def test_priced_with_ties() -> None:
    """Equal values: the first of them are kept, so parents before children."""
    rng = np.random.default_rng(5)
    for _ in range(50):
        trees = random_beam(rng, 3, 4, 2)
        values = rng.choice([0.5, 0.25, 0.125, 0.0], trees.n_nodes)
        f = host.never_rising(trees, values)
        most = int(rng.integers(0, trees.n_nodes + 1))
        seconds = 1.0 + 0.05 * np.arange(most + 1)
        worth = 3.0 + np.concatenate([[0.0], np.sort(f)[::-1][:most].cumsum()])
        best = int(np.argmax(np.where(np.arange(most + 1) <= np.count_nonzero(f), worth / seconds, -1)))
        kept = device.priced(
            to_device(trees),
            grid_of(trees, f),
            torch.ones(3, dtype=torch.float64),
            torch.from_numpy(seconds),
            most,
        )
        order = sorted(range(trees.n_nodes), key=lambda i: (-f[i], i))
        right = np.isin(np.arange(trees.n_nodes), order[:best])
        assert kept.keep.numpy()[places(trees)].tolist() == right.tolist()
        assert host.parent_kept(trees, right)[right].all()
