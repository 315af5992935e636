"""The fast selection against the reference algorithms, brute force and its invariants."""

from __future__ import annotations

import itertools
import math

import numpy as np
import paper_algorithms as reference
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sched_factories import PROBABILITY, beam_trees, kept_sets, tree_rows, trees_from

from adaserve.scheduler.selection import (
    best_anywhere,
    equal_share,
    parent_kept,
    path_probability,
    rank,
    slo_counts,
    two_phase,
)

NEED = st.one_of(st.floats(-3, 6), st.just(math.inf), st.sampled_from([1.0, 1.5, 2.0]))


@given(tree_rows(), st.data())
def test_two_phase_equals_algorithm_2(rows, data):
    trees = trees_from(rows)
    n = len(rows)
    need = np.array(data.draw(st.lists(NEED, min_size=n, max_size=n)))
    budget = data.draw(st.integers(n, n + trees.n_nodes + 2))
    n_max = data.draw(st.one_of(st.none(), st.integers(1, 5)))
    depth = int(trees.depth.max(initial=1))
    got = two_phase(trees, path_probability(trees), need, depth, budget, n_max)
    want = reference.algorithm_2(reference.rows_of(trees), list(need), budget, depth, n_max)
    assert got.verify_tokens == n + sum(map(len, want.kept))
    assert got.expected_tokens.sum() == pytest.approx(want.value, rel=1e-6)


@given(tree_rows(), st.data())
def test_kept_sets_are_trees_within_budget(rows, data):
    trees = trees_from(rows)
    n = len(rows)
    need = np.array(data.draw(st.lists(NEED, min_size=n, max_size=n)))
    budget = data.draw(st.integers(0, 20))
    cap = np.array(data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)))
    f = path_probability(trees)
    for selection in (
        two_phase(trees, f, need, 3, budget, 2, cap),
        best_anywhere(trees, f, budget, cap),
        equal_share(trees, f, budget, cap),
    ):
        assert parent_kept(trees, selection.keep)[selection.keep].all()
        assert selection.counts.sum() == selection.keep.sum() <= max(0, budget - n)
        assert (selection.slo_counts <= selection.counts).all()
        deepest = np.repeat(cap, np.diff(trees.row_start))
        assert (trees.depth[selection.keep] <= deepest[selection.keep]).all()


def test_an_equal_share_is_the_same_number_for_every_row():
    trees = beam_trees(3, 2, 3)
    for budget, each in ((3, 0), (11, 2), (12, 3), (99, 6)):
        assert equal_share(trees, path_probability(trees), budget).counts.tolist() == [each] * 3


@settings(max_examples=60)
@given(tree_rows(max_rows=2, max_nodes=5), st.data())
def test_algorithm_1_is_optimal(rows, data):
    trees = trees_from(rows)
    n = len(rows)
    need = data.draw(st.lists(st.floats(0, 3), min_size=n, max_size=n))
    budget = data.draw(st.integers(0, n + trees.n_nodes))
    literal = reference.rows_of(trees)
    ours, best = reference.algorithm_1(literal, need, budget), reference.brute_force(literal, need, budget)
    assert (ours is None) == (best is None)
    if ours is not None and best is not None:
        assert ours.value == pytest.approx(best.value, abs=1e-9)


@settings(max_examples=60)
@given(tree_rows(max_rows=2, max_nodes=5), st.data())
def test_algorithm_2_is_optimal_where_every_need_can_be_met(rows, data):
    """Of all trees within the budget that meet every need, by brute force."""
    trees, n = trees_from(rows), len(rows)
    need = np.array(data.draw(st.lists(st.floats(0, 3), min_size=n, max_size=n)))
    budget = data.draw(st.integers(0, n + trees.n_nodes))
    best = reference.brute_force(reference.rows_of(trees), list(need), budget)
    if best is not None:
        got = two_phase(trees, path_probability(trees), need, 100, budget, None)
        assert got.expected_tokens.sum() == pytest.approx(best.value, abs=1e-6)
        assert (got.expected_tokens >= need - 1e-6).all()


@given(tree_rows(max_rows=6), st.data())
def test_needs_are_met_before_leftovers_are_given(rows, data):
    trees, n = trees_from(rows), len(rows)
    need = np.array(data.draw(st.lists(NEED, min_size=n, max_size=n)))
    budget, n_max = data.draw(st.integers(0, n + trees.n_nodes)), data.draw(st.integers(1, 4))
    ranked = rank(trees, path_probability(trees))
    got = two_phase(trees, path_probability(trees), need, 4, budget, n_max)
    first = 1.0 + (ranked.value * (np.arange(ranked.value.shape[1]) < got.slo_counts[:, None])).sum(axis=1)
    served = first >= np.minimum(need, 5.0) - 1e-6
    if (got.counts > got.slo_counts).any():
        assert (served | (got.slo_counts == np.minimum(ranked.available, n_max))).all()
    for behind in np.flatnonzero(~served & (got.slo_counts < np.minimum(ranked.available, n_max))):
        assert not got.slo_counts[need < need[behind]].any(), "the neediest come first"


@pytest.mark.parametrize("budget", [0, 1, 256, 257, 300, 2000])
def test_256_requests_get_what_algorithm_2_gives_them(budget):
    trees, need = beam_trees(256, 3, 2), np.random.default_rng(0).uniform(-1, 5, 256)
    got = two_phase(trees, path_probability(trees), need, 3, budget, 2)
    want = reference.algorithm_2(reference.rows_of(trees), list(need), budget, 3, 2)
    assert [set(row) for row in want.kept] == kept_sets(trees, got)


@given(tree_rows(max_rows=1, max_nodes=6), st.floats(0, 4))
def test_slo_phase_is_minimal(rows, need):
    """No smaller tree of the row reaches its need (brute force over all its trees)."""
    trees = trees_from(rows)
    literal = reference.rows_of(trees)[0]
    ranked = rank(trees, path_probability(trees))
    count = int(slo_counts(ranked, np.array([need]), 100.0, None, 100)[0])
    sizes = [
        len(t)
        for t in reference.subtrees(literal)
        if reference.expected_tokens([literal], [t]) >= need - 1e-9
    ]
    assert count == (min(sizes) if sizes else len(literal))


@given(tree_rows(), st.data())
def test_more_budget_never_lowers_expected_tokens(rows, data):
    trees = trees_from(rows)
    n = len(rows)
    need = np.array(data.draw(st.lists(NEED, min_size=n, max_size=n)))
    f = path_probability(trees)
    values = [
        two_phase(trees, f, need, 4, b, 3).expected_tokens.sum() for b in range(n, n + trees.n_nodes + 3)
    ]
    greedy = [best_anywhere(trees, f, b).expected_tokens.sum() for b in range(n, n + trees.n_nodes + 3)]
    assert all(b >= a - 1e-9 for a, b in itertools.pairwise(greedy))
    assert values[-1] == pytest.approx(greedy[-1])
    assert all(v <= g + 1e-6 for v, g in zip(values, greedy, strict=True))


@given(tree_rows(max_rows=5), st.data())
def test_order_of_requests_does_not_matter(rows, data):
    n = len(rows)
    need = np.array(data.draw(st.lists(st.floats(-2, 5), min_size=n, max_size=n, unique=True)))
    budget = data.draw(st.integers(n, n + 12))
    order = data.draw(st.permutations(range(n)))
    a, b = trees_from(rows), trees_from([rows[i] for i in order])
    one = two_phase(a, path_probability(a), need, 4, budget, 3)
    two = two_phase(b, path_probability(b), need[list(order)], 4, budget, 3)
    assert one.expected_tokens.sum() == pytest.approx(two.expected_tokens.sum(), rel=1e-6)
    f = path_probability(a)
    if len(np.unique(np.round(f, 7))) == len(f):  # without ties the very same nodes
        assert [kept_sets(a, one)[i] for i in order] == kept_sets(b, two)


@given(st.lists(PROBABILITY, min_size=3, max_size=3), st.integers(2, 4), st.integers(1, 3))
def test_theorem_4_1(weights, B, depth):
    total = sum(weights)

    def children(path):
        shift = sum(path) % 3
        return [weights[(i + shift) % 3] / total for i in range(3)]

    assert reference.beam_contains_optimum(children, B, depth)


def test_probability_one_never_precedes_its_parent():
    trees = trees_from([[(-1, 1.0), (0, 1.0), (1, 1.0), (2, 1.0)]])
    for budget in range(1, 6):
        selection = two_phase(trees, path_probability(trees), np.array([9.0]), 4, budget, None)
        assert selection.keep.tolist() == [i < budget - 1 for i in range(4)]


def test_rounding_above_the_parent_is_pulled_down():
    trees = trees_from([[(-1, 0.5), (0, 1.0)], [(-1, 0.4)]])
    f = path_probability(trees)
    f[1] = 0.5000001
    selection = two_phase(trees, f, np.zeros(2), 2, 3, None)
    assert selection.keep.tolist() == [True, False, False]


def test_nan_is_never_kept_and_empty_trees_are_fine():
    trees = trees_from([[(-1, 0.9), (0, 0.9)], []])
    trees.logprob[:] = [math.nan, math.nan]
    selection = two_phase(trees, path_probability(trees), np.array([5.0, 5.0]), 2, 10, None)
    assert not selection.keep.any()
    assert selection.expected_tokens.tolist() == [1.0, 1.0]


def test_more_requests_than_budget_keeps_roots_only():
    trees = beam_trees(6, 2, 2)
    selection = two_phase(trees, path_probability(trees), np.full(6, 9.0), 2, 4, None)
    assert selection.verify_tokens == 6
    assert not selection.keep.any()


def test_neediest_request_is_served_first_when_the_budget_is_short():
    trees = trees_from([[(-1, 0.9)], [(-1, 0.5)]])
    selection = two_phase(trees, path_probability(trees), np.array([1.2, 3.0]), 1, 3, None)
    assert selection.keep.tolist() == [False, True]
    greedy = best_anywhere(trees, path_probability(trees), 3)
    assert greedy.keep.tolist() == [True, False]


def test_a_need_that_the_root_meets_up_to_rounding_gets_nothing_first():
    trees = trees_from([[(-1, 0.9)], [(-1, 0.5)]])
    need = np.array([0.5, 1.0 + 1e-10])
    selection = two_phase(trees, path_probability(trees), need, 1, 3, None)
    assert selection.keep.tolist() == [True, False] and not selection.slo_counts.any()


def test_published_pseudocode_traps_would_be_noticed():
    """Line 15 with one-step probabilities would stop after two nodes: 0.5 + 0.9 >= 1.2."""
    trees = trees_from([[(-1, 0.5), (0, 0.9), (1, 0.9)]])
    counts = slo_counts(rank(trees, path_probability(trees)), np.array([2.2]), 9.0, None, 9)
    assert counts.tolist() == [3]  # 0.5 + 0.45 < 1.2 <= 0.5 + 0.45 + 0.405
